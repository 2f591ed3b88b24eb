"""Servers are killed while sessions are in the middle of episodes, and no episode shows it.

64 sessions of two environments play on 3 servers, real processes on real sockets. Again and again one server gets
SIGKILL and is started anew on its port. Every episode must come out exactly as in a run that nobody disturbed.
STARPOD_KILLS=100 makes it a hundred kills.
"""

import asyncio
import os
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AsyncExitStack, ExitStack

import pytest

from starpod.client import Fleet
from tests.faults.episodes import ENVIRONMENTS, Played, compare_with_undisturbed, disturbed
from tests.faults.faulty_calls import FaultyCalls
from tests.support import ServerProcess, start_server
from tests.waiting import eventually

KILLS = int(os.environ.get("STARPOD_KILLS", "4"))


@pytest.fixture(scope="module")
def servers() -> Iterator[list[ServerProcess]]:
    with ExitStack() as stack:
        yield [stack.enter_context(start_server(*ENVIRONMENTS)) for _ in range(3)]


async def killed(
    servers: list[ServerProcess],
    addresses: list[str],
    kills: int,
    every: float,
    enough: Callable[[], bool] = lambda: True,
) -> Played:
    """Return the episodes of 64 sessions while a server is killed every few seconds, until enough have been killed."""
    restarts: list[asyncio.Task[None]] = []

    async def kill(_: Fleet) -> None:
        for number in range(kills):
            await asyncio.sleep(every)
            if number >= len(servers):
                await restarts[number - len(servers)]  # the same server's
            servers[number % len(servers)].kill()  # without a goodbye
            restarts.append(asyncio.create_task(asyncio.to_thread(servers[number % len(servers)].restart)))
        await eventually(enough)

    played = await disturbed(
        addresses, kill, groups=8, pause=0.05, grace=0.1, timeout=1.0, patience=90.0, health_seconds=1.0
    )
    await asyncio.gather(*restarts)
    return played


@pytest.mark.timeout(300 + 3 * KILLS)
async def test_no_episode_shows_that_servers_were_killed(servers: list[ServerProcess]) -> None:
    played = await killed(servers, [server.address for server in servers], kills=KILLS, every=0.5)
    await compare_with_undisturbed(servers[0].address, played, "SIGKILL")
    assert played.recoveries > 0


async def test_nor_that_calls_were_doubled_delayed_lost_and_cut(servers: list[ServerProcess]) -> None:
    async with AsyncExitStack() as stack:
        proxies = [
            await stack.enter_async_context(FaultyCalls(server.address, number))
            for number, server in enumerate(servers)
        ]

        def all_came() -> bool:
            counts = sum((proxy.counts for proxy in proxies), start=Counter[str]())
            return min(counts[kind] for kind in ("doubled", "delayed", "lost", "cut")) > 0

        played = await killed(servers, [proxy.address for proxy in proxies], kills=2, every=1.0, enough=all_came)
    await compare_with_undisturbed(servers[0].address, played, "calls doubled, delayed, lost, cut; SIGKILL")
    assert played.recoveries > 0
