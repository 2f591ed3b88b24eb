"""Tool calls in replies: histories are compared by values, and a reply of one call ends with it."""

import pytest

from starpod.gateway.dialects.chat import ChatCompletions
from starpod.gateway.dialects.messages import Messages
from starpod.gateway.dialects.responses import Responses
from starpod.gateway.requests import Answer, Ask, Message
from starpod.gateway.session import Replied, RolloutSession
from starpod.trainer.engines.base import Request
from starpod.trainer.prompts.formats.base import CallFormat, ReplyCall
from starpod.trainer.prompts.formats.table import FORMATS
from tests.tools.gateway.sampling import scripted

USER = Message("user", "go")
TOOL = {"type": "function", "function": {"name": "move", "parameters": {"type": "object"}}}


def call(arguments: str = '{"to": "Up"}', name: str = "move") -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


def test_a_cut_reply_is_reported_as_cut_even_with_whole_calls() -> None:
    ask = Ask((USER,))
    answer = Answer("x", 1, 0, 0, calls=(ReplyCall("move", "{}", "c"),), finish="length")
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


@pytest.mark.parametrize("form", FORMATS.values(), ids=FORMATS)
def test_a_call_without_arguments_is_written_as_an_object(form: CallFormat) -> None:
    written = form.write(None, "", [ReplyCall("move", "")])
    assert form.parse(written).calls == (ReplyCall("move", "{}"),)


@pytest.mark.parametrize("then", [f"\n{call()}", " and then", ""])
async def test_a_reply_of_one_call_ends_with_it(then: str) -> None:
    took: list[Replied] = []
    sampler = scripted(lambda request, text: f"{call()}{then}")
    body = {"messages": [{"role": "user", "content": "go"}], "tools": [TOOL], "parallel_tool_calls": False}
    ask = ChatCompletions().read(body)
    answer = await RolloutSession("one", sampler, took.append).complete(ask)
    assert (len(answer.calls), answer.text, answer.finish) == (1, "", "stop")
    (turn,) = [replied.turn for replied in took]
    assert turn.text == sampler.template.decode(turn.reply) == call()
    assert len(turn.reply) == len(turn.logprobs) == len(turn.versions) == answer.reply_tokens


@pytest.mark.parametrize("form", FORMATS.values(), ids=FORMATS)
async def test_every_format_is_described_read_and_continued(form: CallFormat) -> None:
    prompts: list[str] = []

    def say(request: Request, prompt: str) -> str:
        prompts.append(prompt)
        return form.write("I think.", "", [ReplyCall("move", '{"to": "</tool_call>"}')])

    took: list[Replied] = []
    session = RolloutSession("one", scripted(say, calls=form.name), took.append)
    first = await session.complete(Ask((USER,), (TOOL,)))
    assert (first.thought, first.text) == ("I think.", "")
    assert [(one.name, one.arguments, one.id) for one in first.calls] == [
        ("move", '{"to": "</tool_call>"}', "call_1_0")
    ]
    assert form.example in prompts[0]
    await session.complete(Ask((USER, first.message, Message("tool", "ok")), (TOOL,)))
    assert [replied.turn.fresh for replied in took] == [True, False]
    # A reply of another model is written in this format.
    other = Message("assistant", "", (ReplyCall("move", '{"to": "Down"}'),))
    await session.complete(Ask((USER, other, Message("tool", "ok")), (TOOL,)))
    assert form.write(None, "", other.calls) in prompts[-1]
