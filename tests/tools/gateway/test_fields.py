"""Fields of requests that the gateway knows are heeded, or refused with a sentence that names them."""

from collections.abc import Mapping
from typing import Any

import pytest

from starpod.gateway.dialects.base import Dialect
from starpod.gateway.dialects.chat import ChatCompletions
from starpod.gateway.dialects.messages import Messages
from starpod.gateway.dialects.responses import Responses
from starpod.gateway.requests import Rejected

USER = [{"role": "user", "content": "go"}]
FUNCTION = {"name": "move", "parameters": {}}
BODIES: dict[type[Dialect], dict[str, Any]] = {
    ChatCompletions: {"messages": USER, "tools": [{"type": "function", "function": FUNCTION}]},
    Responses: {"input": "go", "tools": [{"type": "function", **FUNCTION}]},
    Messages: {"messages": USER, "max_tokens": 9, "tools": [{"name": "move", "input_schema": {}}]},
}
SCHEMA = {"type": "object", "properties": {"to": {"enum": ["Up", "Down"]}}, "required": ["to"]}
FORMAT = {"type": "json_schema", "schema": SCHEMA}
EDITS = [{"type": "clear_tool_uses_20250919"}]


@pytest.mark.parametrize(
    ("dialect", "body"),
    [
        (ChatCompletions, {"logit_bias": {"5": -100}}),
        (ChatCompletions, {"top_logprobs": 3}),
        (ChatCompletions, {"logprobs": True}),
        (ChatCompletions, {"frequency_penalty": 0.5}),
        (ChatCompletions, {"presence_penalty": 0.5}),
        (ChatCompletions, {"function_call": {"name": "move"}}),
        (ChatCompletions, {"modalities": ["text", "audio"]}),
        (ChatCompletions, {"audio": {"voice": "x"}}),
        (ChatCompletions, {"web_search_options": {}}),
        (ChatCompletions, {"moderation": {"model": "m"}}),
        (Responses, {"max_tool_calls": 1}),
        (Responses, {"truncation": "auto"}),
        (Responses, {"top_logprobs": 3}),
        (Responses, {"include": ["message.output_text.logprobs"]}),
        (Responses, {"context_management": [{"type": "compaction"}]}),
        (Responses, {"moderation": {"model": "m"}}),
        (Messages, {"context_management": {"edits": EDITS}}),
        (Messages, {"container": "c"}),
        (Messages, {"mcp_servers": [{"url": "x"}]}),
    ],
)
def test_what_is_not_heeded_is_refused(dialect: type[Dialect], body: Mapping[str, Any]) -> None:
    (name,) = body
    with pytest.raises(Rejected, match=f"`{name}.*` is not supported"):
        dialect().read({**BODIES[dialect], **body})


def test_a_call_in_the_old_form_is_refused() -> None:
    asked = {"role": "assistant", "function_call": {"name": "move", "arguments": "{}"}}
    with pytest.raises(Rejected, match="`function_call` is not supported"):
        ChatCompletions().read({"messages": [*USER, asked]})


@pytest.mark.parametrize(
    ("dialect", "body"),
    [
        (ChatCompletions, {"logit_bias": {}, "top_logprobs": 0, "n": 1, "frequency_penalty": 0.0, "audio": None}),
        (ChatCompletions, {"modalities": ["text"], "function_call": "none", "metadata": {"a": "b"}, "unheard": 1}),
        (Responses, {"truncation": "disabled", "max_tool_calls": None, "include": ["reasoning.encrypted_content"]}),
        (Messages, {"output_config": {"effort": "low"}, "mcp_servers": [], "thinking": {"type": "disabled"}}),
        (Messages, {"context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]}}),
    ],
)
def test_what_asks_for_nothing_is_accepted(dialect: type[Dialect], body: Mapping[str, Any]) -> None:
    assert dialect().read({**BODIES[dialect], **body}) == dialect().read(BODIES[dialect])


@pytest.mark.parametrize(
    ("dialect", "one", "many"),
    [
        (ChatCompletions, {"parallel_tool_calls": False}, {"parallel_tool_calls": True}),
        (Responses, {"parallel_tool_calls": False}, {"parallel_tool_calls": True}),
        (
            Messages,
            {"tool_choice": {"type": "auto", "disable_parallel_tool_use": True}},
            {"tool_choice": {"type": "any"}},
        ),
    ],
)
def test_one_call_at_a_time_is_heeded(dialect: type[Dialect], one: dict[str, Any], many: dict[str, Any]) -> None:
    asks = [dialect().read({**BODIES[dialect], **more}) for more in (one, many, {})]
    assert [ask.one_call for ask in asks] == [True, False, False]
    assert asks[0].key != asks[2].key, "another request, not a repetition"


@pytest.mark.parametrize(
    ("dialect", "body", "schema"),
    [
        (ChatCompletions, {"response_format": {"type": "text"}}, None),
        (ChatCompletions, {"response_format": {"type": "json_object"}}, {"type": "object"}),
        (ChatCompletions, {"response_format": {"type": "json_schema", "json_schema": {"schema": SCHEMA}}}, SCHEMA),
        (Responses, {"text": {"format": {"type": "json_object"}}}, {"type": "object"}),
        (Responses, {"text": {"format": {"name": "move", **FORMAT}}}, SCHEMA),
        (Messages, {"output_format": FORMAT}, SCHEMA),
        (Messages, {"output_config": {"format": FORMAT}}, SCHEMA),
    ],
)
def test_formats_of_the_reply_are_read(dialect: type[Dialect], body: dict[str, Any], schema: Any) -> None:
    ask, plain = (dialect().read({**BODIES[dialect], **more}) for more in (body, {}))
    assert ask.schema == schema and (ask.key == plain.key) is (schema is None)


@pytest.mark.parametrize("kind", ["xml", "json_schema"])
def test_other_formats_of_the_reply_are_refused(kind: str) -> None:
    for dialect, body in (
        (ChatCompletions, {"response_format": {"type": kind}}),
        (Responses, {"text": {"format": {"type": kind}}}),
        (Messages, {"output_config": {"format": {"type": kind}}}),
    ):
        with pytest.raises(Rejected, match=f"is {kind}; use text, json_object, or json_schema with a `schema`"):
            dialect().read({**BODIES[dialect], **body})
