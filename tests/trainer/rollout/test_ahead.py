"""Groups that are admitted early: the order in which they are taken, what a checkpoint keeps of them, ends of waits."""

import asyncio
import contextlib
import os
import signal
from collections.abc import Callable
from dataclasses import asdict, replace
from typing import Any, cast

import pytest

from starpod.client import Fleet
from starpod.trainer.data.episode import Episode
from starpod.trainer.engines.base import Reply, Request
from starpod.trainer.parallel.ranks import Parallel
from starpod.trainer.rollout.ahead import Ahead
from starpod.trainer.rollout.collect import Start
from tests.support import ServerProcess
from tests.trainer.lake import LAKE, TEMPLATE, collector, reply
from tests.trainer.scripted_engine import ScriptedEngine
from tests.waiting import eventually


class HeldEngine(ScriptedEngine):
    """Gives the replies of `held`, in `turns` of an episode's, when it is released; others at once."""

    def __init__(self, held: str, turns: int = 0) -> None:
        super().__init__(TEMPLATE, reply("Down"))
        self.held = held
        self.turns = turns
        self.released = asyncio.Event()
        self.reached = asyncio.Event()

    async def generate(self, request: Request) -> Reply:
        asked = sum(request.conversation == other.conversation for other in self.requests)
        if self.held in request.conversation and asked >= self.turns:
            self.reached.set()
            await self.released.wait()
        return await super().generate(request)


def played(episode: Episode) -> list[object]:
    """All of it but the clock."""
    return [replace(turn, generating=0.0, stepping=0.0) for turn in episode.turns] + [episode.end, episode.success]


async def test_groups_are_taken_in_the_order_of_admission(fleet: Fleet) -> None:
    """The first one is the slowest: it is waited for, and those behind it play on meanwhile."""
    engine = HeldEngine("train/0/")
    ahead = Ahead([(collector(fleet, engine), 2)], Parallel())
    ahead.admit([Start(0, 5), Start(1, 5), Start(2, 6)])
    taking = asyncio.ensure_future(ahead.take([Start(0, 5), Start(1, 5)]))
    await eventually(lambda: len(engine.forgotten) == 4)
    assert not taking.done()
    engine.released.set()
    assert [group.id for group in (await taking).groups] == [0, 1]
    assert len(ahead) == 1
    count = len(engine.requests)
    assert [group.id for group in (await ahead.take([Start(2, 6)])).groups] == [2]
    assert len(engine.requests) == count, "it was over"
    assert ahead.busy_seconds > 0


async def test_episodes_in_play_continue_from_a_checkpoint(fleet: Fleet) -> None:
    """Sessions are rebuilt from the turns, so no token is sampled twice."""
    starts = [Start(3, 7), Start(4, 8)]
    engine = HeldEngine("train/3/1", turns=2)
    ahead = Ahead([(collector(fleet, engine), 2)], Parallel())
    ahead.admit(starts)
    await engine.reached.wait()
    await eventually(lambda: len(engine.forgotten) == 3)
    state = ahead.state(ahead.admitted)
    assert [[len(episode["turns"]) for episode in group["episodes"]] for group in state] == [[6, 2], [6, 6]]
    engine.released.set()
    expected = (await ahead.take(starts)).groups
    assert expected[0].id == 3 and len(expected[0].episodes) == 2

    again = HeldEngine("nobody")
    resumed = Ahead([(collector(fleet, again), 2)], Parallel())
    resumed.load_state(state)
    assert resumed.state(resumed.admitted) == state
    assert resumed.oldest(2) == resumed.oldest_of(["", ""]) == starts
    resumed.admit([])
    groups = (await resumed.take(starts)).groups
    assert [[played(episode) for episode in group.episodes] for group in groups] == [
        [played(episode) for episode in group.episodes] for group in expected
    ]
    # The two turns of the checkpoint are not asked for again.
    asked = [request for request in engine.requests if request.conversation == "train/3/1"]
    assert [(each.conversation, each.seed) for each in again.requests] == [
        (each.conversation, each.seed) for each in asked[2:]
    ]


def test_a_rank_keeps_the_episodes_of_the_groups_that_it_plays() -> None:
    """A second checkpoint would otherwise hold copies as old as the first one, which overwrite the played ones."""
    ranks = [Ahead([(cast(Any, None), 1)], Parallel(rank, 2)) for rank in range(2)]
    starts, episodes = [Start(0, 5), Start(1, 6)], [Episode(id_, 0, "lake").to_json() for id_ in range(2)]
    state = [{"start": asdict(start), "episodes": [one]} for start, one in zip(starts, episodes, strict=True)]
    for ahead in ranks:
        ahead.load_state(state)
        assert ahead.oldest(2) == starts
        assert [bool(group.episodes) for group in ahead.admitted] == [
            ahead._parallel.plays(start.id) for start in starts
        ]


async def test_an_environment_that_answers_otherwise_is_played_from_there(fleet: Fleet) -> None:
    engine, again = HeldEngine("train/0/0", turns=3), HeldEngine("nobody")
    ahead = Ahead([(collector(fleet, engine), 1)], Parallel())
    ahead.admit([Start(0, 1)])
    await engine.reached.wait()
    state = ahead.state(ahead.admitted)
    await ahead.close()
    other = LAKE.with_options({"map": ["SFF", "FFF", "HFG"]})
    resumed = Ahead([(collector(fleet, again, other), 1)], Parallel())
    resumed.load_state(state)
    resumed.admit([])
    (group,) = (await resumed.take([Start(0, 1)])).groups
    # The hole shows up in the second observation: the second reply is another one's.
    assert len(again.requests) == len(group.episodes[0].turns) - 1
    assert group.episodes[0].end == "terminal" and not group.episodes[0].success


DEADLINE = 1234.0


@pytest.fixture
def expire(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Ends the time of all episodes in play that have `DEADLINE`."""
    limits: list[asyncio.Timeout] = []
    timeout = asyncio.timeout

    def remember(delay: float | None) -> asyncio.Timeout:
        limit = timeout(delay)
        if delay == DEADLINE:
            limits.append(limit)
        return limit

    def end() -> None:
        for limit in limits:
            with contextlib.suppress(RuntimeError):  # the episode is over
                limit.reschedule(0.0)

    monkeypatch.setattr(asyncio, "timeout", remember)
    return end


@pytest.mark.parametrize("turns", [0, 1])
async def test_an_episode_that_hangs_fails_and_tells_for_what_it_waited(
    fleet: Fleet, expire: Callable[[], None], turns: int
) -> None:
    engine = HeldEngine("train/0/1", turns=turns)
    ahead = Ahead([(replace(collector(fleet, engine), deadline=DEADLINE), 2)], Parallel())
    ahead.admit([Start(0, 1)])
    await engine.reached.wait()
    await eventually(lambda: engine.forgotten)  # the other episode is over
    expire()
    collected = await ahead.take([Start(0, 1)], min_size=2)
    assert (collected.failed, collected.dropped, collected.groups) == (1, 1, [])
    assert collected.error == (
        "an episode was not over after 1234 seconds (collect.deadline), and waited for the policy's reply in turn "
        f"{turns + 1}"
    )


async def test_an_environment_that_hangs_is_reported(server: ServerProcess, expire: Callable[[], None]) -> None:
    async with Fleet(server.address, timeout=60) as fleet:

        def say(request: Request, context: str) -> str:
            if len(engine.requests) == 2:
                os.killpg(server.pid, signal.SIGSTOP)
                asyncio.get_running_loop().call_later(0.2, expire)
            return reply("Down")

        engine = ScriptedEngine(TEMPLATE, say)
        try:
            collected = await replace(collector(fleet, engine), deadline=DEADLINE).collect([Start(0, 1)], 1)
        finally:
            os.killpg(server.pid, signal.SIGCONT)
    assert collected.failed == 1
    assert collected.error.endswith("(collect.deadline), and waited for the environment to step in turn 2")


async def test_closing_ends_what_is_in_play(fleet: Fleet) -> None:
    engine = HeldEngine("train/")
    ahead = Ahead([(collector(fleet, engine), 2)], Parallel())
    ahead.admit([Start(0, 1)])
    await engine.reached.wait()
    await ahead.close()
    assert len(ahead) == 0 and sorted(engine.forgotten) == ["train/0/0", "train/0/1"]
    await ahead.close()


async def test_what_no_group_survives_ends_the_run_before_its_turn(fleet: Fleet) -> None:
    def say(request: Request, context: str) -> str:
        if "train/1/" in request.conversation:
            raise RuntimeError("the engine is gone")
        return reply("Down")

    ahead = Ahead([(collector(fleet, ScriptedEngine(TEMPLATE, say)), 1)], Parallel())
    ahead.admit([Start(0, 1), Start(1, 1)])
    await ahead.take([Start(0, 1)])
    ahead.admit([Start(2, 1)])
    with pytest.raises(RuntimeError, match="the engine is gone"):
        await ahead.take([Start(2, 1)])
    await ahead.close()
