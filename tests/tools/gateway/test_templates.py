"""Chat templates may change the past of conversations with tools, and no client's text becomes a control token."""

import copy
import functools
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from starpod.gateway.dialects.base import Dialect
from starpod.gateway.dialects.chat import ChatCompletions
from starpod.gateway.dialects.messages import Messages
from starpod.gateway.dialects.responses import Responses
from starpod.gateway.lineage import ChatLayout, Lineage
from starpod.gateway.requests import Ask, Message, Rejected
from starpod.gateway.session import Replied, RolloutSession
from starpod.trainer.prompts.formats.base import ReplyCall
from starpod.trainer.prompts.grammar import TAGS
from starpod.trainer.prompts.template import Template
from tests.tools.gateway.sampling import engine_of, scripted
from tests.trainer.chat_templates import PUBLISHED, tokenizer

TOOL = {"type": "function", "function": {"name": "move", "description": "Moves.", "parameters": {"type": "object"}}}
USER = {"role": "user", "content": "go"}
CALL = '<tool_call>\n{"name": "move", "arguments": {}}\n</tool_call>'


# --- what moves -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["Qwen2.5", "Llama-3", "Gemma", "SmolLM2"])
def test_nothing_is_said_of_templates_that_keep_the_past(name: str) -> None:
    assert ChatLayout(Template(tokenizer(name))).warnings() == []


def test_what_moves_is_said_with_an_example() -> None:
    (thoughts,) = ChatLayout(Template(tokenizer("Qwen3"))).warnings()
    assert thoughts.startswith("the chat template changes the thoughts of earlier replies as a conversation grows: ")
    assert thoughts.endswith("; a request whose past has changed begins a fresh sample of its episode")
    (tools,) = ChatLayout(Template(tokenizer("tools_last"))).warnings()
    assert tools.startswith("with tools, the chat template changes the tools as a conversation grows: '")
    assert "[AVAILABLE_TOOLS]" in tools.partition(" becomes ")[0]


@pytest.mark.parametrize(
    ("name", "tools", "fresh"),
    [
        ("tools_last", True, [True, False, True]),  # the tools move to the new question
        ("tools_last", False, [True, False, False]),
        ("Qwen3", True, [True, False, True]),  # a question drops the thoughts before it, a result does not
        ("Qwen2.5", True, [True, False, False]),
        ("Llama-3", True, [True, False, False]),
    ],
)
async def test_a_sample_continues_until_the_template_moves_its_past(name: str, tools: bool, fresh: list[bool]) -> None:
    sampler = scripted(
        lambda request, text: f"<think>\na thought\n</think>\n\n{CALL}" if "result" not in text else "done", name
    )
    took: list[Replied] = []
    session = RolloutSession("one", sampler, took.append)
    ask = Ask((Message("system", "be good"), Message("user", "go")), (TOOL,) if tools else ())
    for following in (Message("tool" if tools else "user", "a result"), Message("user", "on"), None):
        answer = await session.complete(ask)
        if following:
            ask = replace(ask, messages=(*ask.messages, answer.message, following))
    assert [replied.turn.fresh for replied in took] == fresh
    shown = tokenizer(name).decode(engine_of(sampler).requests[-1].prompt)
    whole = sampler.layout.whole(ask.messages, [message.text for message in ask.messages], ask.tools)
    assert shown.count("[AVAILABLE_TOOLS]") == whole.count("[AVAILABLE_TOOLS]")
    assert shown.rpartition("on")[0].endswith(whole.rpartition("on")[0][-20:])


AS_TYPES = (
    "{% for tool in tools or [] %}{{ '// ' + tool.function.description + '\ntype ' + tool.function.name }}"
    "{% for property in (tool.function.parameters or {}).get('properties', {}).values() %}"
    "{{ ' = ' + property.enum | join(' | ') + ' // default: ' + property.default }}{% endfor %}{% endfor %}"
)
"""Tools as in the template of gpt-oss."""


@pytest.mark.parametrize("dialect", ["chat", "responses", "messages"])
def test_a_template_gets_the_descriptions_that_it_needs(dialect: str) -> None:
    typed = copy.deepcopy(tokenizer("chatml"))
    typed.chat_template = AS_TYPES + str(typed.chat_template)
    layout = ChatLayout(Template(typed))
    parameters = {"type": "object", "properties": {"to": {"type": "integer", "enum": [1, 2], "default": 1}}}
    tool: dict[str, Any] = {"name": "move", "description": "Moves."}
    readers: dict[str, Any] = {
        "chat": lambda tool: ChatCompletions().read(
            {"messages": [USER], "tools": [{"type": "function", "function": tool}]}
        ),
        "responses": lambda tool: Responses().read({"input": [USER], "tools": [{"type": "function", **tool}]}),
        "messages": lambda tool: Messages().read(
            {"messages": [USER], "tools": [{"input_schema" if key == "parameters" else key: tool[key] for key in tool}]}
        ),
    }
    read = readers[dialect]
    assert "// \ntype move<|im_start|>" in layout.template.decode(Lineage(layout).ask(read({"name": "move"})).context)
    with pytest.raises(Rejected, match="`description` must be text"):
        read({**tool, "description": 7})
    with pytest.raises(Rejected, match="such as a `default` that is not text") as caught:
        Lineage(layout).ask(read({**tool, "parameters": parameters}))
    assert caught.value.status == 400


# --- texts ------------------------------------------------------------------------------------------------------------


def bodies(text: str) -> Mapping[type[Dialect], dict[str, Any]]:
    """A request in each dialect, with the text in each place."""
    schema = {"type": "object", "properties": {text: {"type": "string", "description": text}}}
    function = {"name": text, "description": text, "parameters": schema}
    call = {"id": "c", "type": "function", "function": {"name": "move", "arguments": "{}"}}
    used = {"type": "tool_use", "id": "c", "name": "move", "input": {}}
    result = {"type": "tool_result", "tool_use_id": "c", "content": [{"type": "text", "text": text}]}
    chat = [
        {"role": "user", "content": text},
        {"role": "assistant", "content": "fine"},
        {"role": "user", "content": text},
    ]
    return {
        ChatCompletions: {
            "messages": [
                {"role": "developer", "content": text},
                *chat,
                {"role": "assistant", "content": None, "tool_calls": [call]},
                {"role": "tool", "tool_call_id": "c", "content": text},
            ],
            "tools": [{"type": "function", "function": function}],
        },
        Responses: {
            "instructions": text,
            "input": [
                *chat,
                {"type": "function_call", "call_id": "c", "name": "move", "arguments": "{}"},
                {"type": "function_call_output", "call_id": "c", "output": text},
            ],
            "tools": [{"type": "function", **function}],
        },
        Messages: {
            "system": text,
            "max_tokens": 9,
            "messages": [*chat, {"role": "assistant", "content": [used]}, {"role": "user", "content": [result]}],
            "tools": [{"name": text, "description": text, "input_schema": schema}],
        },
    }


def prompts(layout: ChatLayout, text: str) -> list[list[int]]:
    """The prompts of all dialects, and one that extends a reply."""
    lineage, asks = Lineage(layout), [dialect().read(body) for dialect, body in bodies(text).items()]
    user, call = Message("user", "go"), Message("assistant", "", (ReplyCall("move", "{}"),))
    draft = lineage.ask(first := Ask((user,), asks[0].tools))
    node, _ = lineage.node(draft, layout.template.encode_reply(layout.template.opening + CALL), CALL, call)
    lineage.add(node, call)
    following = replace(first, messages=(user, call, Message("tool", text), Message("user", text)))
    return [lineage.ask(ask).context for ask in (*asks, following)]


@functools.cache
def layout_of(name: str) -> ChatLayout:
    return ChatLayout(Template(tokenizer(name)))


@pytest.mark.parametrize("name", [*PUBLISHED, "sentencepiece"])
@given(st.data())
@settings(max_examples=8, deadline=None)
def test_control_tokens_in_requests_are_read_as_text(name: str, data: st.DataObject) -> None:
    layout, added = layout_of(name), tokenizer(name).added_tokens_decoder.items()
    control = {index: str(token) for index, token in added if str(token) not in TAGS}
    tokens = st.sampled_from([layout.template.layout.end_text, *control.values()])
    pieces = data.draw(st.lists(st.one_of(tokens, tokens, st.sampled_from([*'<|a\n"\\'])), min_size=1, max_size=6))
    hostile, harmless = prompts(layout, f"a{''.join(pieces)}b"), prompts(layout, "hi")
    for with_it, without in zip(hostile, harmless, strict=True):
        assert [with_it.count(index) for index in control] == [without.count(index) for index in control]
