"""Servers and clients are stopped for a while, or asked to go; no episode shows it."""

import asyncio
import os
import signal
from contextlib import ExitStack
from pathlib import Path

import pytest

from starpod.client import DeadlineExceeded, Fleet
from tests.faults.episodes import ENVIRONMENTS, QUICK, busiest, compare_with_undisturbed, disturbed, live_sessions
from tests.faults.program import client_program
from tests.support import ServerProcess, start_server
from tests.waiting import eventually

TROUBLED = str(Path(__file__).with_name("troubled.py"))


async def test_a_stopped_server_is_given_up_and_used_again(pair: list[ServerProcess]) -> None:
    """SIGSTOP: the kernel keeps its connections, and nobody answers."""

    async def stop(fleet: Fleet) -> None:
        victim = busiest(fleet, pair)
        os.kill(victim.pid, signal.SIGSTOP)
        try:
            await eventually(lambda: fleet.recoveries > 0)
        finally:
            os.kill(victim.pid, signal.SIGCONT)
        await eventually(lambda: all(replica.ready and not replica.closer.unclosed for replica in fleet.replicas))

    # Leases of their own, should the fleet end before it could close what the server held when it was stopped.
    played = await disturbed([server.address for server in pair], stop, opened_with={"lease_seconds": 10.0})
    await compare_with_undisturbed(pair[0].address, played, "SIGSTOP, SIGCONT")
    assert played.recoveries > 0


async def test_a_call_that_is_never_answered_ends() -> None:
    """The server answers health checks, but the environment never returns."""
    with start_server(TROUBLED, "endless-v1") as server:
        async with Fleet(server.address, **{**QUICK, "timeout": 1.0, "patience": 3.0}) as fleet:
            (session,) = await fleet.open("endless-v1")
            async with asyncio.timeout(90):
                with pytest.raises(DeadlineExceeded, match="has not answered"):
                    await session.step("3600")
                (other,) = await fleet.open("endless-v1")
                await other.step("0")


@pytest.mark.minutes
async def test_leases_stand_still_while_the_server_does(pair: list[ServerProcess]) -> None:
    """Stopped for longer than the lease, with nowhere else to go: the sessions are still there afterwards."""

    async def stop(_: Fleet) -> None:
        os.kill(pair[1].pid, signal.SIGSTOP)
        try:
            await asyncio.sleep(4)
        finally:
            os.kill(pair[1].pid, signal.SIGCONT)
        await asyncio.sleep(2)  # the reaper's round

    played = await disturbed(pair[1].address, stop, opened_with={"lease_seconds": 2.0}, timeout=60.0)
    await compare_with_undisturbed(pair[0].address, played, "SIGSTOP for longer than the lease")
    assert played.recoveries == 0


@pytest.mark.minutes
async def test_a_client_that_sleeps_longer_than_its_leases(pair: list[ServerProcess], tmp_path: Path) -> None:
    """The server reaps its sessions meanwhile. The client opens them again and replays their turns."""
    before = await live_sessions(pair[1].address)
    settings = {"opened_with": {"lease_seconds": 1.0}, "timeout": 10.0}
    with client_program(pair[1].address, tmp_path, **settings) as program:
        program.process.send_signal(signal.SIGSTOP)
        async with asyncio.timeout(60):
            while await live_sessions(pair[1].address) > before:
                await asyncio.sleep(0.05)
        program.process.send_signal(signal.SIGCONT)
        await asyncio.sleep(1)
        played = await asyncio.to_thread(program.finish)
    await compare_with_undisturbed(pair[0].address, played, "client stopped for longer than its leases")
    assert played.recoveries > 0


@pytest.mark.minutes
async def test_servers_are_drained_one_after_the_other(server: ServerProcess) -> None:
    """SIGTERM, the end of the grace, and a new server under the same address: a rolling restart."""
    with ExitStack() as stack:
        rolling = [stack.enter_context(start_server(*ENVIRONMENTS, "--drain", "0.5")) for _ in range(2)]

        async def roll(fleet: Fleet) -> None:
            for each in rolling:
                assert await asyncio.to_thread(each.terminate) == 0
                await asyncio.to_thread(each.restart)
                await eventually(lambda: all(replica.ready for replica in fleet.replicas))

        played = await disturbed([each.address for each in rolling], roll)
    await compare_with_undisturbed(server.address, played, "SIGTERM with drain, one server after the other")
    assert played.recoveries >= 16
