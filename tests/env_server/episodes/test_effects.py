"""Environments that ask a judge: nothing is asked twice, and a judge that fails is no reward."""

import asyncio
import contextlib
import math
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AsyncExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from starpod.client import EnvironmentBug, Fleet, Overloaded, Session
from starpod.env_server.authoring.environment import Concurrency, EnvironmentOptions
from starpod.env_server.episodes import effects
from starpod.env_server.episodes.effects import EffectFailed, Journal, UselessReply
from starpod.env_server.operation.config import ServerConfig
from starpod.env_server.registry import Registry, RegistryError
from starpod.env_server.server.listening import ServerError
from starpod.env_server.server.server import EnvironmentServer
from tests.client.test_fleet import give_patience
from tests.env_server.judged import Judged
from tests.fake_openai import Model

JUDGED = "judged-v1"
START = "0.001"


@pytest.fixture
def model(monkeypatch: pytest.MonkeyPatch) -> Iterator[Model]:
    monkeypatch.setattr(effects, "RETRY_SECONDS", 0.05)
    with Model() as model:
        for name, value in model.variables.items():
            monkeypatch.setenv(name, value)
        yield model


Serve = Callable[..., Any]


@pytest.fixture
async def serve(model: Model, tmp_path: Path) -> AsyncIterator[Serve]:
    """Starts servers and a fleet of them; stops them after the test."""
    async with AsyncExitStack() as stack:

        async def start(servers: int = 1, *, journal: Path | None = tmp_path, **settings: Any) -> Fleet:
            addresses = []
            for _ in range(servers):
                server = EnvironmentServer(Registry([Judged]).prepare(), ServerConfig(port=0, effects=journal))
                await server.start()
                stack.push_async_callback(server.stop, 0)
                addresses.append(server.address)
            fleet = Fleet(addresses, **{"grace": 0.05, "health_seconds": 0.2, **settings})
            fleet.servers = [server]  # type: ignore[attr-defined]
            return await stack.enter_async_context(fleet)

        yield start


async def opened(fleet: Fleet, seed: int = 1) -> Session:
    return (await fleet.open(JUDGED, seed=seed))[0]


async def say(session: Session, *lines: str) -> tuple[tuple[str, float], ...]:
    """Return the observation and the reward of each turn."""
    turns = [await session.step(line) for line in lines]
    return tuple((turn.observation.text, turn.reward) for turn in turns)


async def test_the_same_episode_again_asks_nobody(serve: Serve, model: Model) -> None:
    fleet = await serve()
    first = await say(await opened(fleet), "hello", "bye")
    assert first == ((f"1: {START} | hello | 0.002", 0.003), (f"2: {START} | hello | 0.002 | bye | 0.004", 0.005))
    assert await say(await opened(fleet), "hello", "bye") == first
    model.asked_once(5)
    await say(await opened(fleet), "other")  # the same words up to here
    model.asked_once(7)
    (server,) = fleet.servers
    assert server.metrics.effects == {(JUDGED, "asked"): 7, (JUDGED, "recorded"): 6}
    families = {family.name: family for family in server.metrics.collect()}
    assert {sample.labels["outcome"]: sample.value for sample in families["starpod_effects"].samples} == {
        "asked": 7,
        "recorded": 6,
    }


async def test_servers_that_share_a_journal_replay_each_others_sessions(serve: Serve, model: Model) -> None:
    fleet = await serve(2)
    sessions = [await opened(fleet, seed) for seed in range(4)]
    await asyncio.gather(*(say(session, "hello") for session in sessions))
    await fleet.servers[0].stop(0)
    await asyncio.gather(*(say(session, "more") for session in sessions))
    assert fleet.recoveries == 2
    model.asked_once(4 * 5)


@pytest.mark.parametrize("durable", [True, False])
async def test_a_judge_is_asked_until_it_replies(serve: Serve, model: Model, tmp_path: Path, durable: bool) -> None:
    """The environment is deterministic if the journal outlives the server."""
    fleet = await serve(journal=tmp_path if durable else None)
    (spec,) = fleet.replicas[0].specs
    assert spec.capabilities.deterministic is durable
    session = await opened(fleet)
    model.failing = [200, 500, 429]  # the user replies, the judge does not, twice
    assert await say(session, "hello") == ((f"1: {START} | hello | 0.002", 0.003),)
    assert model.refused == 2
    model.asked_once(3)


@pytest.mark.parametrize("line", ["hello", "swallow"])
async def test_a_judge_that_keeps_failing_gives_no_reward(serve: Serve, model: Model, line: str) -> None:
    """Whatever the environment makes of it. Copies of the turn that failed ask only for what is missing."""
    fleet = await serve()
    session = await opened(fleet)
    model.failing = [200] + [500] * 100
    give_patience(fleet, 0.5)
    with pytest.raises(Overloaded, match="HTTP Error 500"):
        await session.step(line)
    give_patience(fleet, 60.0)
    assert await session.render() == f"0: {START}"
    model.failing = []
    (fork,) = await session.fork()
    restored = await fleet.restore(await session.snapshot())
    for each in (session, fork, restored):
        assert await say(each, line) == ((f"1: {START} | {line} | 0.002", 0.003),)
    model.asked_once(3)


async def test_a_judge_that_hangs_is_asked_again(serve: Serve, model: Model) -> None:
    session = await opened(await serve())
    Judged.model = replace(Judged.model, seconds=3.0)
    model.failing = [200, 0]
    assert await say(session, "hello") == ((f"1: {START} | hello | 0.002", 0.003),)


@pytest.mark.parametrize("line", ["hello", "swallow"])
async def test_a_judge_that_makes_no_sense_fails_the_turn_after_a_few_replies(
    serve: Serve, model: Model, line: str
) -> None:
    """A reply may cost money. The session is not lost: only what is missing is asked for by who tries again."""
    session = await opened(await serve())
    model.nonsense = 5
    with pytest.raises(EnvironmentBug, match=rf"{model.url}: could not convert .*after 3 replies, .*well, hm"):
        await session.step(line)
    assert (model.nonsense, model.refused) == (2, 0)
    assert await session.render() == f"0: {START}"
    ((text, reward),) = await say(session, line)
    assert text == f"1: {START} | {line} | 0.002" and reward > 0


async def test_a_judge_that_refuses_the_key_is_asked_once(serve: Serve, model: Model) -> None:
    session = await opened(await serve())
    model.failing = [200, 401]
    with pytest.raises(EnvironmentBug, match=f"{model.url}: HTTP Error 401"):
        await session.step("hello")
    assert model.refused == 1


async def test_a_reset_that_fails_is_asked_again(serve: Serve, model: Model) -> None:
    model.failing = [503]
    session = await opened(await serve())
    model.failing = [503]
    assert (await session.reset(seed=2)).text == "0: 0.002"
    assert model.refused == 2
    model.asked_once(2)


async def test_a_fork_shares_past_requests_and_with_the_same_random_state_future_ones(
    serve: Serve, model: Model
) -> None:
    session = await opened(await serve())
    await say(session, "hello")
    same = await session.fork(2)
    assert len({await say(each, "more") for each in [session, *same]}) == 1
    model.asked_once(5)
    others = await session.fork(2, reseed=True)
    assert len({await say(each, "again") for each in [session, *others]}) == 3
    assert sum(model.asked.values()) == 5 + 3 * 2


async def test_members_of_a_group_share_the_start_and_not_the_judge(serve: Serve, model: Model) -> None:
    group = await (await serve()).open(JUDGED, seed=1, count=4)
    assert {session.observation.text for session in group} == {f"0: {START}"}
    assert len({(await session.step("hello")).reward for session in group}) == 4
    assert sum(model.asked.values()) == 1 + 4 * 2


async def test_who_asks_the_same_at_the_same_time_waits_for_the_reply(serve: Serve, model: Model) -> None:
    fleet = await serve(2)
    sessions = await asyncio.gather(*(opened(fleet) for _ in range(8)))
    assert len(set(await asyncio.gather(*(say(session, "hello", "bye") for session in sessions)))) == 1
    model.asked_once(5)


# --- the journal alone -----------------------------------------------------------------------------------------------


def player() -> Judged:
    environment = Judged()
    environment.options, environment.seed = EnvironmentOptions(), 1
    return environment


def ask(journal: Journal, reply: Any, request: Any = "a question", turn: int | None = 0) -> Any:
    environment = player()
    with journal.recording(environment, turn):
        return environment.effect(request, lambda: reply)


def test_a_reply_is_what_a_later_reader_finds(tmp_path: Path) -> None:
    journal = Journal(tmp_path)
    assert ask(journal, ("a", {"b": 1})) == ["a", {"b": 1}] == ask(journal, "never")
    assert ask(journal, "another", request="another question") == "another" == ask(journal, "another", turn=1)
    assert journal.counts == {(JUDGED, "asked"): 3, (JUDGED, "recorded"): 1}


def test_an_entry_that_was_cut_off_is_asked_again(tmp_path: Path) -> None:
    first = "a long reply, of which a part is lost"
    assert ask(Journal(tmp_path), first) == first
    (path,) = tmp_path.glob("*/*")
    whole = path.read_text()
    for length in range(0, len(whole), 20):
        path.write_text(whole[:length])
        assert ask(Journal(tmp_path), "short") == "short" == ask(Journal(tmp_path), "never")


def test_what_was_caught_fails_all_the_same(tmp_path: Path) -> None:
    environment, journal = player(), Journal(tmp_path)

    def fail() -> None:
        raise ConnectionError("nobody there")

    recording = journal.recording(environment, 0)
    recording.__enter__()
    with contextlib.suppress(EffectFailed):
        environment.effect("a question", fail)
    with pytest.raises(EffectFailed, match="nobody there"):
        recording.__exit__(None, None, None)
    assert journal.counts == {(JUDGED, "failed"): 1}


@pytest.mark.parametrize("perform", [lambda: {}["mark"], lambda: float("well"), lambda: math.nan, object])
def test_a_reply_that_cannot_be_read_or_recorded_is_useless(tmp_path: Path, perform: Any) -> None:
    """A paid service is asked again only if it did not answer."""
    environment, journal = player(), Journal(tmp_path)
    with (
        pytest.raises(UselessReply, match=f"a call of {JUDGED} got no usable reply"),
        journal.recording(environment, 0),
    ):
        environment.effect("a question", perform)


def test_a_folder_that_cannot_be_made_is_reported(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ServerError, match="cannot record effects"):
        EnvironmentServer(Registry(), ServerConfig(port=0, effects=tmp_path / "file"))


def test_effects_are_for_reset_and_step_on_a_thread() -> None:
    with pytest.raises(RuntimeError, match="effects=True"):
        player().effect("a question", lambda: "a reply")

    class Hasty(Judged):
        spec = replace(Judged.spec, concurrency=Concurrency.INLINE)

    with pytest.raises(RegistryError, match=r"concurrency=Concurrency\.THREAD"):
        Registry([Hasty])
