"""The way to a server delays, cuts, chokes, swallows, refuses and disorders; no episode shows it."""

import asyncio
import contextlib
import os
from typing import Any

import grpc
import pytest

from starpod.client import DeadlineExceeded, Fleet, Unreachable
from starpod.v1 import environment_pb2 as pb
from starpod.v1.environment_pb2_grpc import EnvironmentServiceStub
from tests.faults.episodes import busiest, compare_with_undisturbed, disturbed, live_sessions
from tests.faults.proxy import Proxy
from tests.support import ServerProcess, start_server
from tests.waiting import eventually


def open_files(server: ServerProcess) -> int:
    return len(os.listdir(f"/proc/{server.pid}/fd"))


@pytest.mark.parametrize(
    ("swallowed", "fault"),
    [
        ({}, "black hole"),
        ({"to_client": False}, "black hole towards the server"),
        ({"to_server": False}, "black hole towards the client"),
    ],
)
async def test_a_black_hole(
    pair: list[ServerProcess], proxies: list[Proxy], swallowed: dict[str, bool], fault: str
) -> None:
    """A server that is connected and never heard of again is given up; what it still holds is closed afterwards."""
    before = {proxy: await live_sessions(server.address) for proxy, server in zip(proxies, pair, strict=True)}
    left: list[int] = []

    async def swallow(fleet: Fleet) -> None:
        proxy = busiest(fleet, proxies)
        proxy.black_hole(**swallowed)
        await eventually(lambda: fleet.recoveries > 0)
        proxy.heal()
        await eventually(lambda: all(replica.ready and not replica.closer.unclosed for replica in fleet.replicas))
        # Only sessions that the program still uses are alive on the server.
        server = pair[proxies.index(proxy)]
        held = {replica.address: len(replica.sessions) for replica in fleet.replicas}
        async with asyncio.timeout(60):
            while await live_sessions(server.address) > held[proxy.address] + before[proxy]:
                await asyncio.sleep(0.05)
        left.append(sum(held.values()))

    played = await disturbed([proxy.address for proxy in proxies], swallow)
    await compare_with_undisturbed(pair[0].address, played, fault)
    assert left == [16]
    assert played.recoveries > 0


@pytest.mark.parametrize(
    ("resets", "fault"), [(True, "cut inside a message (RST)"), (False, "cut inside a message (FIN)")]
)
async def test_cuts_in_the_middle_of_a_message(
    pair: list[ServerProcess], proxies: list[Proxy], resets: bool, fault: str
) -> None:
    async def cut(_: Fleet) -> None:
        for number in range(8):
            proxy = proxies[number % 2]
            proxy.resets = resets
            cuts = proxy.counts["cut"]
            proxy.cut_after = 1 + 13 * number
            await eventually(lambda proxy=proxy, cuts=cuts: proxy.counts["cut"] > cuts)

    played = await disturbed([proxy.address for proxy in proxies], cut)
    await compare_with_undisturbed(pair[0].address, played, fault)
    assert sum(proxy.counts["cut"] for proxy in proxies) >= 8


async def test_refused_connections(pair: list[ServerProcess], proxies: list[Proxy]) -> None:
    async def refuse(fleet: Fleet) -> None:
        for proxy in proxies:
            proxy.refuse()
            await eventually(lambda: any(replica.lost for replica in fleet.replicas))
            proxy.accept()
            await eventually(lambda: all(replica.ready for replica in fleet.replicas))

    played = await disturbed([proxy.address for proxy in proxies], refuse)
    await compare_with_undisturbed(pair[0].address, played, "refused")
    assert played.recoveries > 0


async def test_a_new_connection_overtakes_the_old_one(pair: list[ServerProcess], proxies: list[Proxy]) -> None:
    """Bytes that the client sent before it lost the connection arrive after all calls of the next connection."""

    async def overtake(fleet: Fleet) -> None:
        for _ in range(2):
            for proxy in proxies:
                proxy.to_server.open = False
                await asyncio.sleep(0.1)
                await eventually(proxy.detain)
                proxy.to_server.open = True
                accepted = proxy.counts["accepted"]
                await eventually(lambda proxy=proxy, accepted=accepted: proxy.counts["accepted"] > accepted)
                await eventually(lambda: all(replica.ready for replica in fleet.replicas))
                await asyncio.sleep(0.05)
                proxy.release()

    played = await disturbed([proxy.address for proxy in proxies], overtake, grace=5.0)
    await compare_with_undisturbed(pair[0].address, played, "overtaken connection")


async def test_when_nobody_can_be_reached_the_call_ends(proxies: list[Proxy]) -> None:
    """Refused or swallowed: the patience bounds the call."""
    quick: dict[str, Any] = {"timeout": 0.2, "grace": 0.05, "health_seconds": 0.1, "patience": 0.5}
    proxy = proxies[0]
    async with Fleet(proxy.address, **quick) as fleet:
        async with asyncio.timeout(60):
            while True:  # until this machine is quick enough for so little patience
                with contextlib.suppress(Unreachable, DeadlineExceeded):
                    (session,) = await fleet.open("frozen_lake-v1", seed=1)
                    break
        proxy.black_hole()
        for call in (session.step("Left"), fleet.open("frozen_lake-v1"), session.snapshot()):
            async with asyncio.timeout(60):
                with pytest.raises((Unreachable, DeadlineExceeded)):
                    await call
        await asyncio.wait_for(session.close(), 60)


@pytest.mark.skipif(not os.path.isdir("/proc/self/fd"), reason="needs /proc to see the server's connections")
async def test_a_client_that_vanishes_is_forgotten() -> None:
    """No FIN, no RST: the server asks whether somebody is there, and ends the connection and its stream."""
    with start_server("frozen_lake-v1", "--keepalive", "0.4") as server, Proxy(server.address) as proxy:
        while True:
            async with grpc.aio.insecure_channel(proxy.address) as channel:
                stream = EnvironmentServiceStub(channel).Stream()
                try:
                    await renew(stream)
                    connected = open_files(server)
                    await renew(stream)  # so it was still connected then
                except (grpc.aio.AioRpcError, asyncio.InvalidStateError):
                    continue  # a pause of this machine has ended the connection
                proxy.black_hole()
                await eventually(lambda connected=connected: open_files(server) < connected)
                return


async def renew(stream: Any) -> None:
    """One call on a Stream, and its reply."""
    await stream.write(pb.StreamRequest(calls=[pb.Call(call_id=1, renew=pb.RenewRequest())]))
    if await stream.read() is grpc.aio.EOF:
        raise asyncio.InvalidStateError


@pytest.mark.parametrize(
    ("way", "fault"),
    [
        ({"delay": 0.05, "jitter": 0.2}, "delay and jitter"),
        ({"bytes_per_second": 20_000.0}, "throttle to 20 kB/s"),
    ],
)
async def test_a_slow_network(
    pair: list[ServerProcess], proxies: list[Proxy], way: dict[str, float], fault: str
) -> None:
    """Slow is not lost: nothing is moved, nothing is asked twice."""

    async def slow(_: Fleet) -> None:
        for proxy in proxies:
            for direction in (proxy.to_server, proxy.to_client):
                for name, value in way.items():
                    setattr(direction, name, value)
        await asyncio.sleep(1)
        for proxy in proxies:
            proxy.heal()

    played = await disturbed([proxy.address for proxy in proxies], slow, timeout=60.0)
    await compare_with_undisturbed(pair[0].address, played, fault)
    assert played.recoveries == 0


@pytest.mark.minutes
async def test_keepalive_alone_finds_a_black_hole(pair: list[ServerProcess], proxies: list[Proxy]) -> None:
    """No health checks, no calls asked again: HTTP/2 pings that nobody answers."""

    async def swallow(fleet: Fleet) -> None:
        busiest(fleet, proxies).black_hole()
        await eventually(lambda: fleet.recoveries > 0, 60)

    played = await disturbed(
        [proxy.address for proxy in proxies], swallow, timeout=300.0, health_seconds=300.0, keepalive_seconds=2.0
    )
    await compare_with_undisturbed(pair[0].address, played, "black hole, found by keepalive")


@pytest.mark.minutes
async def test_leases_of_others_outlive_a_black_hole(pair: list[ServerProcess], proxies: list[Proxy]) -> None:
    """Renewals for one server do not wait for another one that swallows them, though leases are short."""
    async with Fleet([proxy.address for proxy in proxies], timeout=20.0, health_seconds=0.5, recovery=False) as fleet:
        sessions = await fleet.open("frozen_lake-v1", seed=1, lease_seconds=2.0)
        while len({session.address for session in sessions}) < 2:
            sessions += await fleet.open("frozen_lake-v1", seed=1, lease_seconds=2.0)
        proxies[1].black_hole()
        await asyncio.sleep(5)
        for session in sessions:
            if session.address == proxies[0].address:
                await session.step("Left")
