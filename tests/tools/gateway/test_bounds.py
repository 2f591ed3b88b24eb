"""One session neither takes the gateway's memory nor keeps the others waiting."""

import asyncio
import itertools
import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from starlette.requests import Request

from starpod.client import Limits, Observation
from starpod.gateway import app, session
from starpod.gateway.played import OutsideAgent
from starpod.gateway.requests import Ask, Message, Rejected
from starpod.gateway.session import RolloutSession
from starpod.gateway.turns import Rotation
from starpod.trainer.agents.base import AgentError, Move, Task
from starpod.trainer.data.episode import Episode, Turn
from starpod.trainer.engines.base import Reply
from starpod.trainer.engines.base import Request as Sampled
from starpod.trainer.prompts.formats.base import ReplyCall
from tests.tools.gateway.sampling import engine_of, scripted

BLANKS = " " * 7_900_000
USER = Message("user", "go")


WALKING: Any = SimpleNamespace(step_index=0, limits=Limits(), done=False, observation=Observation("start"))
"""A session of an environment, as far as an outside agent looks at it."""


def named(name: str, sampler: Any) -> RolloutSession:
    return RolloutSession(name, sampler, lambda replied: None)


@pytest.mark.parametrize(
    "ask",
    [
        Ask((Message("user", BLANKS),)),
        Ask((USER, Message("assistant", BLANKS), USER)),
        Ask((USER, Message("assistant", "", (ReplyCall("move", BLANKS),)), USER)),
        Ask((USER, Message("assistant", "", (ReplyCall(BLANKS, "{}"),)), USER)),
        Ask((Message("tool", BLANKS),)),
        Ask((Message("system", BLANKS), USER)),
        Ask((USER,), ({"type": "function", "function": {"name": "move", "description": BLANKS}},)),
    ],
    ids=["user", "assistant", "arguments", "name", "tool", "system", "tools"],
)
@pytest.mark.parametrize("call", [RolloutSession.complete, RolloutSession.count], ids=["complete", "count"])
async def test_no_part_of_a_long_conversation_is_encoded(ask: Ask, call: Callable[..., Any]) -> None:
    sampler = scripted(lambda request, text: "x")
    session = named("one", sampler)
    session._lineage.ask = lambda ask: pytest.fail("it was encoded")  # type: ignore[method-assign]
    with pytest.raises(Rejected, match=r"has at least \d+ tokens"):
        await call(session, ask)
    # An agent that counts tokens may still ask for less.
    assert session.full == ("context" if call is RolloutSession.complete else "")


async def test_long_prompts_are_encoded_one_at_a_time_and_sessions_take_turns() -> None:
    sampler = scripted(lambda request, text: "x", max_episode_tokens=200_000)
    go, order, inside = threading.Event(), [], itertools.count()

    def slow(text: str, encode: Callable[[str], list[int]] = sampler.template.encode) -> list[int]:
        if len(text) > session.LONG_PROMPT:
            assert next(inside) == len(order), "two at a time"
            assert go.wait(20)
            order.append("one" if "1" in text else "two")
        return encode(text)

    sampler.template.encode = slow  # type: ignore[method-assign]
    one, two = named("one", sampler), named("two", sampler)
    long = "word " * (session.LONG_PROMPT // 4)
    asked = [asyncio.ensure_future(one.complete(Ask((Message("user", f"1 {long}"),), seed=str(n)))) for n in range(5)]
    while not sampler.layout.encoding._waiting:
        await asyncio.sleep(0)
    asked.append(asyncio.ensure_future(two.complete(Ask((Message("user", long),)))))
    for _ in range(20):
        await asyncio.sleep(0)
    go.set()
    await asyncio.gather(*asked)
    assert order == ["one", "one", "two", "one", "one", "one"]


async def test_a_turn_whose_caller_is_cancelled_is_given_on() -> None:
    turns, go, ran = Rotation(), threading.Event(), []
    held = asyncio.ensure_future(turns.in_thread("a", go.wait, 20))
    await asyncio.sleep(0)
    waiting = [asyncio.ensure_future(turns.in_thread("a", ran.append, n)) for n in range(3)]
    await asyncio.sleep(0)
    for each in (held, waiting[0]):
        each.cancel()
    await asyncio.sleep(0)
    assert not ran, "the thread of the cancelled call still runs"
    go.set()
    await asyncio.gather(*waiting[1:])
    assert ran == [1, 2] and turns._free == 1


async def test_a_request_whose_session_is_closed_is_told_so() -> None:
    sampler = scripted(lambda request, text: "x")
    sampling = asyncio.Event()

    async def generate(_: Sampled) -> Reply:
        sampling.set()
        await asyncio.Event().wait()
        raise AssertionError

    engine_of(sampler).generate = generate  # type: ignore[method-assign]
    one = named("one", sampler)
    asking = asyncio.ensure_future(one.complete(Ask((USER,))))
    await sampling.wait()
    one.close("it was ended")
    with pytest.raises(Rejected, match="the session one is over: it was ended"):
        await asking


async def test_no_session_has_more_replies_than_the_limit_and_none_samples_all_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(session, "MOST_REPLIES", 50)
    sampler = scripted(lambda request, text: "x")
    engine, sampling, most = engine_of(sampler), 0, 0
    generate = engine.generate

    async def counted(request: Sampled) -> Reply:
        nonlocal sampling, most
        sampling += 1
        most = max(most, sampling)
        await asyncio.sleep(0.001)
        sampling -= 1
        return await generate(request)

    engine.generate = counted  # type: ignore[method-assign]
    one = named("one", sampler)
    asks = [Ask((USER,), seed=str(n)) for n in range(90)]
    replies = await asyncio.gather(*(one.complete(ask) for ask in asks), return_exceptions=True)
    refused = [each for each in replies if isinstance(each, Rejected)]
    assert (one.replies, len(refused), {each.code for each in refused}) == (50, 40, {"session_too_long"})
    assert most == session.AT_ONCE
    assert await one.complete(asks[0]) is replies[0], "what was asked before still has its reply"


async def test_a_reply_that_failed_leaves_its_place_to_another(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session, "MOST_REPLIES", 1)
    said = iter(["fails", "x"])

    def say(request: Sampled, text: str) -> str:
        if next(said) == "fails":
            raise RuntimeError("the engine died")
        return "x"

    one = named("one", scripted(say))
    with pytest.raises(Rejected, match="the engine died"):
        await one.complete(Ask((USER,)))
    assert (await one.complete(Ask((USER,)))).text == "x"


def posted(key: str, size: int, parts: Callable[[], Any]) -> Request:
    headers = {"authorization": f"Bearer {key}", "content-type": "application/json", "content-length": str(size)}
    raw = [(name.encode(), value.encode()) for name, value in headers.items()]
    return Request({"type": "http", "method": "POST", "headers": raw}, parts)


async def test_few_large_bodies_are_received_at_a_time_and_small_ones_do_not_wait() -> None:
    receiving, go = [], asyncio.Event()

    def body(name: str) -> Callable[[], Any]:
        async def receive() -> dict[str, Any]:
            receiving.append(name)
            await go.wait()
            return {"type": "http.request", "body": b"{}", "more_body": False}

        return receive

    large = [asyncio.ensure_future(app.read_json(posted("one", 8_000_000, body("large")))) for _ in range(40)]
    large.append(asyncio.ensure_future(app.read_json(posted("two", 8_000_000, body("other")))))
    small = asyncio.ensure_future(app.read_json(posted("one", 1_000, body("small"))))
    for _ in range(20):
        await asyncio.sleep(0)
    assert receiving == ["large"] * app._LARGE_BODIES + ["small"]
    go.set()
    assert await asyncio.gather(small, *large) == [{}] * 42
    assert receiving.index("other") <= 2 * app._LARGE_BODIES, "the other session did not wait for all of the first's"


async def test_a_body_that_does_not_arrive_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(app, "_BODY_SECONDS", 0.01)

    async def receive() -> dict[str, Any]:
        await asyncio.Event().wait()
        raise AssertionError

    with pytest.raises(Rejected, match="did not arrive within"):
        await app.read_json(posted("one", 8_000_000, receive))
    assert app._large_bodies._free == app._LARGE_BODIES


async def test_a_limit_that_did_not_end_the_session_excuses_no_later_failure() -> None:
    agent = OutsideAgent("one", scripted(lambda request, text: "x"), WALKING, Task("walk-v1"), stream="", order=0)
    with pytest.raises(Rejected, match="tokens"):
        await agent.session.complete(Ask((Message("user", "word " * 5000),)))
    assert agent.session.full == "context"
    await agent.session.complete(Ask((USER,)))
    agent.leave("the disk is full")
    with pytest.raises(AgentError, match="the disk is full"):
        await agent.act(Observation("start"), Episode(group=0, member=0, environment="walk-v1"))


async def test_a_step_behind_a_reply_is_answered_when_it_was_played() -> None:
    """Replies of a parallel subagent come before the step in the queue of events."""
    agent = OutsideAgent("one", scripted(lambda request, text: "x"), WALKING, Task("walk-v1"), stream="", order=0)
    episode = Episode(group=0, member=0, environment="walk-v1")
    for text in ("first", "second"):
        await agent.session.complete(Ask((Message("user", text),)))
    played = asyncio.ensure_future(agent.step(["left"], None))
    await asyncio.sleep(0)
    for actions in (None, ("left",)):
        move = await agent.act(Observation("start"), episode)
        assert isinstance(move, Move) and move.actions == actions
        await asyncio.sleep(0)
        assert not played.done(), "it is not played yet"
    episode.turns.append(Turn(parts={"environment": 0.5}, fresh=True))
    acting = asyncio.ensure_future(agent.act(Observation("start"), episode))
    assert (await played)["reward"] == 0.5
    acting.cancel()


async def test_a_step_that_is_never_played_has_no_result() -> None:
    """A step that waits at the end of the episode used to be answered with the previous turn's reward."""
    observation = Observation("start")
    environment: Any = SimpleNamespace(**vars(WALKING))
    agent = OutsideAgent("one", scripted(lambda request, text: "x"), environment, Task("walk-v1"), stream="", order=0)
    episode = Episode(group=0, member=0, environment="walk-v1")
    played = asyncio.ensure_future(agent.step(["left"], None))
    await agent.act(observation, episode)
    episode.turns.append(Turn(parts={"environment": 0.5}, fresh=True))
    environment.step_index = 1
    acting = asyncio.ensure_future(agent.act(observation, episode))
    assert (await played)["reward"] == 0.5
    acting.cancel()
    waiting = asyncio.ensure_future(agent.step(["left"], None))
    await asyncio.sleep(0)
    agent.close()
    with pytest.raises(Rejected, match="is over"):
        await waiting
