"""Servers are killed while sessions are in the middle of episodes, and no episode shows it.

64 sessions of two environments play on 3 servers, real processes on real sockets. Again and again one server gets
SIGKILL and is started anew on its port. Every episode must come out exactly as in a run that nobody disturbed.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Iterator
from contextlib import AsyncExitStack, ExitStack
from typing import Any

import pytest

from starpod.client import Fleet, Limits, Session
from tests.e2e.faulty_proxy import FaultyProxy
from tests.support import ServerProcess, start_server

ENVIRONMENTS = {
    "frozen_lake-v1": ["Left", "Down", "Right", "Up"],
    "sokoban-v1": ["Left", "Down", "Right", "Up", "Jump"],
}
GROUPS = 8  # of each environment
GROUP_SIZE = 4
LIMITS = Limits(max_turns=12, max_actions=0)

Episode = list[tuple[Any, ...]]


@pytest.fixture(scope="module")
def servers() -> Iterator[list[ServerProcess]]:
    with ExitStack() as stack:
        yield [stack.enter_context(start_server(*ENVIRONMENTS)) for _ in range(3)]


class Killer:
    """Kills one server after the other, each on its own port up again before its next turn comes."""

    def __init__(self, servers: list[ServerProcess]) -> None:
        self.servers = servers
        self.kills = 0
        self._restarts: dict[int, asyncio.Task[None]] = {}

    async def kill_one(self) -> None:
        """Kills the next server, without a goodbye, and starts it again in the background."""
        number = self.kills % len(self.servers)
        await self.wait_for(number)
        self.kills += 1
        server = self.servers[number]
        server.kill()
        self._restarts[number] = asyncio.create_task(asyncio.to_thread(server.restart))

    async def wait_for(self, number: int) -> None:
        """Until this server is up again after its last kill."""
        if number in self._restarts:
            await self._restarts[number]

    async def wait_for_all(self) -> None:
        for number in range(len(self.servers)):
            await self.wait_for(number)


async def play(
    session: Session, script: random.Random, episodes: int, pause: float, until: asyncio.Event
) -> list[Episode]:
    """At least so many episodes, and more until the event: turn by turn, as the script says."""
    names = ENVIRONMENTS[session.environment_id]
    played: list[Episode] = []
    while len(played) < episodes or not until.is_set():
        observation = await session.reset(seed=script.getrandbits(32))
        episode: Episode = [(observation.text, session.seed, session.dynamics_seed)]
        while not session.done:
            if pause:
                await asyncio.sleep(pause * random.random())
            turn = script.choices(names, k=script.randrange(1, 4))
            transition = await session.step(turn)
            episode.append(
                (
                    transition.observation.text,
                    transition.reward,
                    transition.outcomes,
                    transition.end_reason,
                    transition.success,
                    session.step_index,
                )
            )
        played.append(episode)
    return played


async def open_all(fleet: Fleet) -> list[Session]:
    groups = [
        await fleet.open(name, seed=group, count=GROUP_SIZE, limits=LIMITS)
        for name in ENVIRONMENTS
        for group in range(GROUPS)
    ]
    return [session for group in groups for session in group]


async def play_all(fleet: Fleet, counts: list[int], pause: float, until: asyncio.Event) -> list[list[Episode]]:
    sessions = await open_all(fleet)
    assert len(sessions) == 64
    return await asyncio.gather(
        *(play(session, random.Random(number), counts[number], pause, until) for number, session in enumerate(sessions))
    )


async def disturb(
    servers: list[ServerProcess], addresses: list[str], kills: int, every: float
) -> tuple[list[list[Episode]], Fleet]:
    """What 64 sessions see while servers are killed, one every so many seconds."""
    over = asyncio.Event()
    async with Fleet(addresses, grace=0.1, timeout=1.0, patience=90.0, health_seconds=1.0) as fleet:
        playing = asyncio.create_task(play_all(fleet, [1] * 64, 0.05, over))
        killer = Killer(servers)
        while killer.kills < kills:
            await asyncio.sleep(every)
            await killer.kill_one()
            assert not playing.done() or playing.exception() is None, playing.exception()
        over.set()
        played = await playing
        await killer.wait_for_all()
        return played, fleet


async def undisturbed(address: str, played: list[list[Episode]]) -> list[list[Episode]]:
    """What they see otherwise: the same programs, as many episodes each."""
    over = asyncio.Event()
    over.set()
    async with Fleet(address, recovery=False) as fleet:
        return await play_all(fleet, [len(episodes) for episodes in played], 0.0, over)


async def compare(servers: list[ServerProcess], played: list[list[Episode]], fleet: Fleet, note: str) -> None:
    expected = await undisturbed(servers[0].address, played)
    episodes = turns = 0
    for number, (found_all, expected_all) in enumerate(zip(played, expected, strict=True)):
        for place, (found, wanted) in enumerate(zip(found_all, expected_all, strict=True)):
            assert found == wanted, f"session {number}, episode {place}"
            episodes += 1
            turns += len(found) - 1
    print(f"{note}; {fleet.recoveries} recoveries; {episodes} episodes of {turns} turns as in the undisturbed run")
    assert fleet.recoveries > 0


@pytest.mark.timeout(240)  # twenty servers are started
async def test_no_episode_shows_that_servers_were_killed(servers: list[ServerProcess]) -> None:
    played, fleet = await disturb(servers, [server.address for server in servers], kills=20, every=0.5)
    await compare(servers, played, fleet, "20 kills")


async def test_nor_that_calls_were_doubled_delayed_lost_and_cut(servers: list[ServerProcess]) -> None:
    async with AsyncExitStack() as stack:
        proxies = [
            await stack.enter_async_context(FaultyProxy(server.address, number))
            for number, server in enumerate(servers)
        ]
        played, fleet = await disturb(servers, [proxy.address for proxy in proxies], kills=3, every=1.0)
        counts = sum((proxy.counts for proxy in proxies), start=Counter[str]())
    await compare(servers, played, fleet, f"3 kills, calls {dict(counts)}")
    assert min(counts[kind] for kind in ("doubled", "delayed", "lost", "cut")) > 0


@pytest.mark.slow
@pytest.mark.timeout(300)
async def test_soak(servers: list[ServerProcess]) -> None:
    played, fleet = await disturb(servers, [server.address for server in servers], kills=100, every=1.0)
    await compare(servers, played, fleet, "100 kills")
