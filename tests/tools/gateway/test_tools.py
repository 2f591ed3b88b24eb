"""Tool calls in replies: JSON is decoded from the opening tag on, and histories are compared by values."""

import json
from typing import Any

import pytest

from starpod.gateway import tools
from starpod.gateway.dialects.chat import ChatCompletions
from starpod.gateway.dialects.messages import Messages
from starpod.gateway.dialects.responses import Responses
from starpod.gateway.requests import Answer, Ask, Message, ReplyCall
from starpod.gateway.session import Replied, RolloutSession
from starpod.gateway.tools import parse_reply, write_reply
from tests.tools.gateway.sampling import scripted

USER = Message("user", "go")
TOOL = {"type": "function", "function": {"name": "move", "parameters": {"type": "object"}}}


def call(arguments: str = '{"to": "Up"}', name: str = "move") -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


@pytest.mark.parametrize("text", ["a</tool_call>b", "<tool_call>", "</tool_call>", "</think>", '{"a": "\\"'])
@pytest.mark.parametrize("around", ["{}", "before {} after", "<think>t</think>{}", "{}\n{}", "<tool_call>x {}"])
def test_tags_inside_an_argument_belong_to_it(text: str, around: str) -> None:
    whole = call(json.dumps({"text": text}))
    parts = parse_reply(around.replace("{}", whole), tools=True)
    assert [json.loads(each.arguments) for each in parts.calls] == [{"text": text}] * around.count("{}")
    assert parts.text == around.replace("<think>t</think>", "").replace("{}", "").strip()


@pytest.mark.parametrize(
    ("raw", "arguments"),
    [
        (call('{"t": "a\nb"}'), {"t": "a\nb"}),
        (call('{"t": "a\tb"}'), {"t": "a\tb"}),
        (call('"{\\"t\\": \\"a\\nb\\"}"'), {"t": "a\nb"}),
        ('{"name": "move", "arguments": {"t": "a\nb"}}', {"t": "a\nb"}),
        ('{"name": "move", "parameters": {"t": "<tool_call>"}}', {"t": "<tool_call>"}),
        ('<tool_call>{"name": "move"}', {}),
        (call("[1]"), None),
        (call("1"), None),
        (call("null"), None),
        (call('"go up"'), None),
        (call('"[1]"'), None),
        (call().replace("}\n<", "} and\n<"), None),
    ],
)
def test_arguments_are_an_object(raw: str, arguments: Any) -> None:
    parts = parse_reply(raw, tools=True)
    assert [json.loads(each.arguments) for each in parts.calls] == [arguments] * (arguments is not None)
    assert parts.text == ("" if arguments is not None else raw)


CUTS = range(len("<tool_call>"), len(call('{"to": ["é", -1.5e+7, true]}')) - len("}\n</tool_call>"))


@pytest.mark.parametrize("length", CUTS)
def test_a_call_that_is_cut_is_neither_call_nor_text(length: int) -> None:
    parts = parse_reply(f"I move.{call()}" + call('{"to": ["é", -1.5e+7, true]}')[:length], tools=True)
    assert (parts.text, len(parts.calls)) == ("I move.", 1)


@pytest.mark.parametrize(
    "raw", ["use <tool_call> and </tool_call>", '<tool_call>{"a": "b</tool_call>', "<tool_call> a"]
)
def test_what_is_no_call_stays_text(raw: str) -> None:
    assert parse_reply(raw, tools=True)[:3] == (None, raw, ())


OPEN, CLOSE = "<tool_call>", "</tool_call>"


@pytest.mark.parametrize(
    "raw",
    [
        OPEN + "{" + " " * 300_000 + "}",
        OPEN + " a" * 150_000,
        OPEN * 30_000,
        (OPEN + '{"a":') * 20_000,
        (OPEN + " x " + CLOSE) * 12_000,
        OPEN + '{"name":"a","arguments":' + "[" * 300_000,
    ],
    ids=["blanks", "words", "opens", "begun", "empty", "deep"],
)
def test_the_number_of_tries_is_bounded(raw: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each try takes time linear in the length of the reply, in C."""
    tries, read = [], tools._read_call
    monkeypatch.setattr(tools, "_read_call", lambda text, start: tries.append(start) or read(text, start))
    assert not parse_reply(raw, tools=True).calls
    assert len(tries) <= tools._MOST_BROKEN + 1


def test_a_cut_reply_is_reported_as_cut_even_with_whole_calls() -> None:
    ask = Ask((USER,))
    answer = Answer("x", 1, "", None, (ReplyCall("move", "{}", "c"),), "length", 1, 1, 0, 0)
    told = ChatCompletions().write(ask, answer)["choices"][0]["finish_reason"]
    assert (told, Messages().write(ask, answer)["stop_reason"]) == ("length", "max_tokens")
    assert Responses().write(ask, answer)["status"] == "incomplete"


@pytest.mark.parametrize(
    ("written", "sent"),
    [
        ('{"x": 1.0}', '{"x":1}'),
        ('{"x": 1e2}', '{"x": 100}'),
        ('{"x": -0.0}', '{"x": 0}'),
        ("{}", ""),
        ("{}", " "),
        ('{"x": [1, 2]}', '{"x":[1,2]}'),
        ('{"x": 1, "y": 2}', '{"y": 2.0, "x": 1}'),
        ('{"x": "\u00e9"}', '{"x": "\\u00e9"}'),
        ('{"x": "a\nb"}', '{"x": "a\\nb"}'),
    ],
)
async def test_a_history_is_known_however_a_client_spells_it(written: str, sent: str) -> None:
    took: list[Replied] = []
    one = RolloutSession("one", scripted(lambda request, text: call(written)), took.append)
    first = await one.complete(Ask((USER,), (TOOL,)))
    back = Message("assistant", first.text, (ReplyCall("move", sent, "other"),))
    await one.complete(Ask((USER, back, Message("tool", "ok")), (TOOL,)))
    assert [replied.turn.fresh for replied in took] == [True, False]


@pytest.mark.parametrize(("one", "other"), [("1", "2"), ("1.5", "1"), ("true", "1"), ('"1"', "1"), ("null", "0")])
def test_other_values_are_another_history(one: str, other: str) -> None:
    keys = {Message("assistant", "", (ReplyCall("move", f'{{"x": {value}}}'),)).key for value in (one, other)}
    assert len(keys) == 2


def test_a_call_without_arguments_is_written_as_an_object() -> None:
    assert (
        parse_reply(write_reply(Message("assistant", "", (ReplyCall("move", ""),))), tools=True).calls[0].arguments
        == "{}"
    )


@pytest.mark.parametrize("then", [f"\n{call()}", " and then", ""])
@pytest.mark.parametrize("required", [False, True])
async def test_a_reply_of_one_call_ends_with_it(then: str, required: bool) -> None:
    begun = '<tool_call>\n{"name": "move", "arguments":' if required else ""
    took: list[Replied] = []
    sampler = scripted(lambda request, text: f"{call()}{then}".removeprefix(begun))
    body = {"messages": [{"role": "user", "content": "go"}], "tools": [TOOL], "parallel_tool_calls": False}
    ask = ChatCompletions().read({**body, "tool_choice": "required" if required else "auto"})
    answer = await RolloutSession("one", sampler, took.append).complete(ask)
    assert (len(answer.calls), answer.text, answer.finish) == (1, "", "stop")
    (turn,) = [replied.turn for replied in took]
    assert turn.text == call() and sampler.template.decode(turn.reply) == call().removeprefix(begun)
    assert len(turn.reply) == len(turn.logprobs) == len(turn.versions) == answer.reply_tokens
