"""Structures accept what policies should write, in every format, and nothing else."""

import sys
from typing import Any

import pytest

from starpod.trainer.configuration.loading import parse_config
from starpod.trainer.configuration.preflight import check
from starpod.trainer.configuration.section import ConfigError
from starpod.trainer.models.masks import TokenMasks
from starpod.trainer.prompts.formats.base import CallFormat, ReplyCall
from starpod.trainer.prompts.formats.table import FORMATS
from starpod.trainer.prompts.grammar import Grammar
from starpod.trainer.prompts.structure import answer_structure, structure_of
from starpod.trainer.prompts.template import Template
from tests.trainer.chat_templates import tokenizer
from tests.trainer.prompts.formats.replies import tool

SCHEMA = {"type": "object", "properties": {"to": {"type": "string"}, "n": {"type": "integer"}}, "required": ["to"]}
TOOLS = [tool("move", to={"type": "string"}), tool("go", n={"type": "integer"})]
REQUIRABLE = [form for form in FORMATS.values() if form.xgrammar]
UP = '{"to": "Up"}'


def accepts(template: Template, structure: str, text: str) -> bool:
    """Whether a whole reply with this text, without the beginning that the prompt has, is allowed."""
    matcher = TokenMasks(template.tokenizer, len(template.tokenizer)).matcher(structure)
    return bool(matcher.accept_string(text) and matcher.is_completed())


@pytest.mark.parametrize("form", REQUIRABLE, ids=lambda form: form.name)
def test_a_required_call_is_what_the_format_writes(form: CallFormat) -> None:
    template = Template(tokenizer("chatml"), calls=form.name)
    any_tool = structure_of(template, tools=TOOLS, one_call=True)
    one_tool = structure_of(template, tools=TOOLS, name="go", one_call=True)
    move, go, other = (ReplyCall(*call) for call in (("move", UP), ("go", '{"n": 3}'), ("stop", "{}")))
    cases = [(move, True, False), (go, True, True), (other, False, False)]
    for call, by_any, by_one in cases:
        text = form.write(None, "", [call])
        assert (accepts(template, any_tool, text), accepts(template, one_tool, text)) == (by_any, by_one), text
    assert not accepts(template, any_tool, "no call")
    assert not accepts(template, any_tool, form.write(None, "", [move, move]))
    two = form.write(None, "", [move, move])
    assert accepts(template, structure_of(template, tools=TOOLS), two) or form.name in ("llama3_json",), two


@pytest.mark.parametrize("form", [form for form in FORMATS.values() if not form.xgrammar], ids=lambda form: form.name)
def test_a_format_without_a_grammar_is_refused_by_name(form: CallFormat) -> None:
    with pytest.raises(ValueError, match=f"cannot be required in the format {form.name}, for which xgrammar has no"):
        structure_of(Template(tokenizer("chatml"), calls=form.name), tools=TOOLS)


@pytest.mark.parametrize(
    ("name", "calls", "text", "is_allowed"),
    [
        ("chatml", "", UP, True),
        ("chatml", "", '{\n"to":"Up","n":-1}', True),
        ("chatml", "", '{"n": 1}', False),
        ("chatml", "", '{"to": "Up", "n": 0.5}', False),
        ("chatml", "", f"{UP} and more", False),
        ("chatml", "", f"<think>why</think>{UP}", False),  # its template shows no thoughts
        ("reasoner", "", f"I think {{1}}.</think>\n\n{UP}", True),
        ("reasoner", "", UP, False),  # the prompt has opened a thought
        ("qwen3", "", f"<think>why</think>\n\n{UP}", False),
        ("chatml", "harmony", f"<|channel|>final<|message|>{UP}", True),
    ],
)
def test_a_schema_is_enforced_after_the_thought(name: str, calls: str, text: str, is_allowed: bool) -> None:
    template = Template(tokenizer(name), calls=calls)
    assert accepts(template, structure_of(template, schema=SCHEMA), text) is is_allowed


@pytest.mark.parametrize(
    ("thinking", "prefill", "text"),
    [
        (True, "<think>", f"why</think><answer>{UP}</answer>"),
        (True, "", f"<think>why</think><answer>{UP}</answer>"),
        (False, "<answer>", f"{UP}</answer>"),
        (False, "", f"<answer>{UP}</answer>"),
    ],
)
def test_the_answer_of_our_prompts_has_the_schema(thinking: bool, prefill: str, text: str) -> None:
    template = Template(tokenizer("chatml"), prefill=prefill)
    structure = answer_structure(template, Grammar(thinking), SCHEMA)
    assert accepts(template, structure, text)
    assert not accepts(template, structure, text.replace('"to"', '"from"'))
    assert not accepts(template, structure, f"{text} and more")


def test_a_policy_with_tools_and_a_schema_chooses() -> None:
    template = Template(tokenizer("chatml"))
    structure = structure_of(template, schema=SCHEMA, tools=TOOLS)
    call = FORMATS["hermes"].write(None, "", [ReplyCall("go", '{"n": 3}')])
    assert [accepts(template, structure, text) for text in (UP, call, "Up")] == [True, True, False]


def test_what_cannot_be_enforced_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    template = Template(tokenizer("chatml"))
    with pytest.raises(ValueError, match="the schema cannot be enforced"):
        structure_of(template, schema={"type": "nothing"})
    monkeypatch.setitem(sys.modules, "xgrammar", None)
    with pytest.raises(ValueError, match=r"pip install '.\[structured\]'"):
        structure_of(template, schema=SCHEMA)


SCHEMA_IN_TAGS: dict[str, Any] = {"sampling": {"json_schema": SCHEMA}}


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"prompt": {"grammar": "hermes"}}, "set prompt.grammar to tags"),
        ({"script": {"name": "attempts"}}, "drop script"),
        ({"collect": {"agent": {"command": ["python", "agent.py"]}}}, "programs ask for a response_format"),
        ({"sampling": {"json_schema": {"type": "nothing"}}}, "sampling.json_schema: the schema cannot be enforced"),
    ],
)
def test_a_schema_that_cannot_hold_is_refused_before_the_run(values: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        check(parse_config({**SCHEMA_IN_TAGS, **values}), world=1)
