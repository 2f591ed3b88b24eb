"""Formats of tool calls: what is written is read, however it is cut, and in linear time."""

import json
from collections.abc import Iterator
from typing import Any

import pytest

from starpod.trainer.prompts.formats.base import MOST_BROKEN, CallFormat, ReplyCall, ReplyParser, ReplyPart
from starpod.trainer.prompts.formats.source import Source
from starpod.trainer.prompts.formats.table import FORMATS, find_format
from tests.trainer.prompts.formats.replies import TOOLS, Sample, reply

each_format = pytest.mark.parametrize("form", FORMATS.values(), ids=FORMATS)
AMBIGUOUS = ("</arg_value></tool_call>", "</arg_value><arg_key>", "</parameter></function>", "</parameter><parameter=")


def samples(form: CallFormat, count: int) -> Iterator[Sample]:
    for seed in range(count):
        sample = reply(form, seed)
        # A text between tags ends at its first closing mark that a valid mark follows.
        if not any(mark in sample.text for mark in AMBIGUOUS) or form.typed:
            yield sample


def values(calls: tuple[ReplyCall, ...]) -> list[tuple[str, dict[str, Any]]]:
    return [(call.name, call.values) for call in calls]


@each_format
def test_what_is_written_is_read(form: CallFormat) -> None:
    for sample in samples(form, 500):
        parts = form.parse(sample.text, TOOLS)
        if sample.calls is not None:
            assert (values(parts.calls), parts.thought, parts.text) == (sample.calls, sample.thought, sample.content)
            assert len(parts.ends) == len(parts.calls) and all(end <= len(sample.text) for end in parts.ends)


def joined(parts: list[ReplyPart]) -> list[ReplyPart]:
    """Return the parts, with neighbouring pieces of one kind joined."""
    whole: list[ReplyPart] = []
    for part in parts:
        if whole and part.kind == whole[-1].kind != "call":
            whole[-1] = whole[-1]._replace(text=whole[-1].text + part.text)
        elif part.text or part.kind != "text":
            whole.append(part)
    return whole


@each_format
def test_pieces_do_not_change_the_result(form: CallFormat) -> None:
    """Pieces of one character, and two pieces with a cut at every place."""
    for number, sample in enumerate(samples(form, 80)):
        parsers = [ReplyParser(form, TOOLS) for _ in range(2)]
        whole = joined([*parsers[0].feed(sample.text), *parsers[0].finish()])
        pieces = [part for character in sample.text for part in parsers[1].feed(character)]
        assert joined([*pieces, *parsers[1].finish()]) == whole
        for cut in range(1, len(sample.text)) if number < 8 else ():
            parser = ReplyParser(form, TOOLS)
            pieces = [*parser.feed(sample.text[:cut]), *parser.feed(sample.text[cut:]), *parser.finish()]
            assert joined(pieces) == whole


@each_format
def test_text_is_emitted_as_it_arrives(form: CallFormat) -> None:
    parser = ReplyParser(form, TOOLS)
    beginning = form.write(None, "I see the goal. ", [])
    emitted = "".join(part.text for part in parser.feed(beginning))
    assert emitted == "I see the goal. "


@each_format
def test_a_call_that_is_cut_is_neither_call_nor_text(form: CallFormat) -> None:
    call = [ReplyCall("move", '{"to": "é", "steps": 2}')]
    whole, first = form.write(None, "", call * 2), form.parse(form.write(None, "", call), TOOLS).ends[0]
    for end in range(whole.rindex("steps"), whole.rindex("2") - 1):
        parts = form.parse(whole[:end], TOOLS)
        # A list in Python is one text: without its end, there is no call.
        assert (values(parts.calls), parts.text) == (values(tuple(call)) * (not form.name.endswith("pythonic")), "")
    assert first <= len(whole)


@pytest.mark.parametrize(
    ("form", "raw", "arguments"),
    [
        ("hermes", '<tool_call>{"name": "move", "arguments": {"t": "a\nb"}}</tool_call>', {"t": "a\nb"}),
        ("hermes", '<tool_call>{"name": "move", "arguments": "{\\"t\\": 1}"}</tool_call>', {"t": 1}),
        ("hermes", '<tool_call>{"name": "move"}', {}),
        ("hermes", '<tool_call>{"name": "move", "arguments": [1]}</tool_call>', None),
        ("hermes", '<tool_call>{"name": "move", "arguments": null}</tool_call>', None),
        ("hermes", '<tool_call>{"name": "move", "arguments": {"x": NaN}}</tool_call>', None),
        ("hermes", '<tool_call>{"name": "move"} and</tool_call>', None),
        ("hermes", '<tool_call>{"name": "move", "argumens": {}}</tool_call>', None),
        ("hermes", '<tool_call>{"name": "move", "arguments"": {"to":', None),
        ("hermes", '<tool_call>{"name": "to move", "arguments": {}}', None),
        ("hermes", "use <tool_call> and </tool_call>", None),
        ("hermes", '<tool_call>{"a": "b</tool_call>', None),
        ("hermes", "<tool_call> a", None),
        ("llama3_json", '{"name": "move", "parameters": {"t": "<|python_tag|>"}}', {"t": "<|python_tag|>"}),
        ("llama3_json", '<|python_tag|>{"name": "move", "arguments": {}}', {}),
        ("llama3_json", '{"name": "Ada", "age": 36}', None),
        ("llama3_json", '{"answer": "it is cu', None),
        ("llama3_pythonic", "[move(t=[1, -2.5, true, None], from_='x')]", {"t": [1, -2.5, True, None], "from_": "x"}),
        ("llama3_pythonic", "[move(1)]", None),
        ("llama3_pythonic", "[move(t=open('x'))]", None),
        ("llama3_pythonic", "[1, 2]", None),
        ("llama3_pythonic", "[move(t='x)]", None),
        ("qwen3_coder", "<function=move>\n<parameter=t>\n12\n</parameter>\n</function>", {"t": 12}),
        ("qwen3_coder", "<tool_call>\n<function=move>\n</function>\n</tool_call>", {}),
        ("qwen3_coder", "<tool_call>\n<function=move>\n</tool_call>", None),
        ("glm", "<tool_call>move<arg_key>t</arg_key><arg_value>True</arg_value></tool_call>", {"t": True}),
        ("glm", "<tool_call> opens a call", None),
        ("mistral", '[TOOL_CALLS] [{"name": "move", "arguments": {"t": 1}}]', {"t": 1}),
        ("mistral", '[TOOL_CALLS]move[CALL_ID]abc[ARGS]{"t": 1}', {"t": 1}),
        ("mistral", '[TOOL_CALLS][{"name": "move", "arguments": {t}}] hello', None),
        ("mistral", "[TOOL_CALLS] is a mark", None),
        ("harmony", '<|start|>assistant to=functions.move<|channel|>commentary json<|message|>{"t": 1}', {"t": 1}),
        ("harmony", ' to=functions.move<|channel|>commentary<|message|>{"t": 1}<|call|>', {"t": 1}),
    ],
)
def test_arguments_are_an_object(form: str, raw: str, arguments: Any) -> None:
    parts = FORMATS[form].parse(raw)
    assert [call.values for call in parts.calls] == [arguments] * (arguments is not None)
    assert parts.text.strip() == ("" if arguments is not None else raw)


@pytest.mark.parametrize(
    ("schema", "text", "value"),
    [
        ({"type": "string"}, "12", "12"),
        ({"type": "integer"}, "12", 12),
        ({"type": "integer"}, "1.5", "1.5"),
        ({"type": ["number", "null"]}, "None", None),
        ({"anyOf": [{"type": "boolean"}, {"type": "string"}]}, "True", True),
        ({"enum": [1, 2]}, "2", 2),
        ({"type": "object"}, '{"a": 1', '{"a": 1'),
        ({}, "[1]", "[1]"),
        (7, "[1]", "[1]"),
    ],
)
@pytest.mark.parametrize("form", ["qwen3_coder", "glm"])
def test_the_schema_decides_the_type(form: str, schema: Any, text: str, value: Any) -> None:
    tool = {"type": "function", "function": {"name": "f", "parameters": {"properties": {"x": schema}}}}
    written = FORMATS[form].write(None, "", [ReplyCall("f", json.dumps({"x": text}))])
    assert FORMATS[form].parse(written, [tool]).calls[0].values == {"x": value}


@each_format
def test_a_thought_is_no_text_and_hides_calls(form: CallFormat) -> None:
    call = [ReplyCall("go", "{}")]
    hidden = "" if form.name == "harmony" else form.write(None, "", call)
    parts = form.parse(form.write(f"so {hidden}", "", call))
    assert (parts.thought, len(parts.calls)) == (f"so {hidden}".strip(), 1)
    assert form.parse(form.write("so", "text", []), None)[:3] == ("so", "text", ())
    assert form.parse(f"{form.thought[0]}cut")[:3] == ("cut", "", ())


@each_format
def test_no_input_takes_more_than_linear_time(form: CallFormat, monkeypatch: pytest.MonkeyPatch) -> None:
    """Count the characters that are read, again after every rewind, for inputs of one and of two lengths."""
    work = [0]
    read, more = Source._read, Source._more

    def count_read(source: Source, end: int) -> str:
        text = read(source, end)
        work[0] += len(text)
        return text

    def count_more(source: Source) -> Any:
        work[0] += len(source._text) - source._index  # this is searched again
        return (yield from more(source))

    monkeypatch.setattr(Source, "_read", count_read)
    monkeypatch.setattr(Source, "_more", count_more)
    opens, value = form.opens[0] or form.bare, form.write(None, "", [ReplyCall("move", '{"to": "x"}')])
    begun = value[: value.index("x")]
    units = [
        opens,
        f"{opens} a",
        f"{opens} x {form.close}",
        begun,
        value,
        " ",
        "{",
        "[",
        '"',
        "\\",
        "<",
        begun + form.close,
    ]
    for unit in units:
        costs = []
        for count in (200, 400):
            for text, size in ((opens + unit * count, 1 << 20), (value[:-1] + unit * count, 7)):
                work[0] = 0
                parser = ReplyParser(form, TOOLS)
                for start in range(0, len(text), size):
                    parser.feed(text[start : start + size])
                parser.finish()
                costs.append(work[0] / len(text))
        assert max(costs) <= 2 * MOST_BROKEN + 20, (unit, costs)
        assert costs[2] <= 1.3 * costs[0] + 2 and costs[3] <= 1.3 * costs[1] + 2, (unit, costs)


TEMPLATES = {
    "hermes": "<tool_call>",
    "qwen3_coder": "<tool_call> <function= <parameter=",
    "glm": "<tool_call>{{ name }} <arg_key> <arg_value>",
    "llama3_json": '<|start_header_id|> {"name": x, "parameters": y}',
    "deepseek_v3": "<\uff5ctool\u2581sep\uff5c> ```json",
    "deepseek_v31": "<\uff5ctool\u2581sep\uff5c>",
    "mistral": "[TOOL_CALLS] [THINK]",
    "harmony": "<|channel|>analysis<|message|>",
    "kimi_k2": "<|tool_calls_section_begin|>",
}


def test_a_chat_template_shows_its_format() -> None:
    assert {name: find_format(text).name for name, text in TEMPLATES.items()} == {name: name for name in TEMPLATES}
    assert find_format("{{ messages }}").name == find_format(None).name == "hermes"


@each_format
def test_an_example_is_no_call(form: CallFormat) -> None:
    """A small model may repeat it."""
    assert not form.parse(form.example).calls


@each_format
@pytest.mark.parametrize("name", ["move", ""])
def test_a_call_begins_as_it_is_written(form: CallFormat, name: str) -> None:
    beginning = form.begin_call(name)
    assert form.write_calls([ReplyCall("move", '{"to": "x"}')]).startswith(beginning) and beginning.strip() == beginning


@each_format
@pytest.mark.parametrize("arguments", ["", "oops", "[1]", '{"a": 1', "NaN"])
def test_what_a_client_sends_as_arguments_is_written(form: CallFormat, arguments: str) -> None:
    written = form.write(None, "", [ReplyCall("move", arguments)])
    assert "move" in written and arguments in written.replace("\\", "")
