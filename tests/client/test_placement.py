"""Servers that come and go behind a name, and where sessions are placed; a small run of benchmarks.fleet.placement."""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import pytest

from benchmarks.fleet.placement import Result, measure, open_groups
from benchmarks.fleet.simulated import ENVIRONMENT, NAME, PORT, Cluster
from starpod.client import DeadlineExceeded, Fleet, Overloaded, Unreachable
from starpod.client.pool import upkeep
from starpod.v1 import environment_pb2 as pb
from tests.client.fake_server import FakeServer, overloaded
from tests.client.test_fleet import give_patience
from tests.waiting import eventually


@asynccontextmanager
async def fleet_of(cluster: Cluster, **arguments: float) -> AsyncIterator[Fleet]:
    asyncio.get_running_loop().getaddrinfo = cluster.resolve  # type: ignore[method-assign, assignment]
    fleet = Fleet(f"dns:///{NAME}:{PORT}", health_seconds=0.02, grace=0.01, **arguments)
    fleet.pool.transport = cluster
    async with fleet:
        yield fleet


def addresses(fleet: Fleet) -> set[str]:
    return {replica.address for replica in fleet.replicas}


async def test_servers_come_and_go_behind_a_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(upkeep, "RESOLVE_SECONDS", 0.05)
    cluster = Cluster(3)
    async with fleet_of(cluster) as fleet:
        first = list(cluster.living)
        sessions = await open_groups(fleet, 30, 1)
        assert addresses(fleet) == {server.address for server in first}
        fresh = cluster.start(2)
        await eventually(lambda: addresses(fleet) == {server.address for server in first + fresh})
        first[0].kill()
        # It is not only out of use: nobody knocks at its door for ever.
        await eventually(lambda: addresses(fleet) == {server.address for server in cluster.living})
        await fleet.step_many(sessions, ["left"] * len(sessions))
        assert {session.address for session in sessions} <= {server.address for server in cluster.living}
        assert {replica.instance_id for replica in fleet.pool.by_instance.values()} == addresses(fleet)
        # The same pods under other addresses, all at once, as after a rolling update.
        for server in cluster.living:
            server.kill()
        cluster.start(4)
        await fleet.step_many(sessions, ["left"] * len(sessions))
        await eventually(lambda: addresses(fleet) == {server.address for server in cluster.living})


async def test_a_name_without_addresses_for_a_while_costs_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(upkeep, "RESOLVE_SECONDS", 0.05)
    cluster = Cluster(2)
    async with fleet_of(cluster) as fleet:
        (session,) = await fleet.open(ENVIRONMENT, seed=1)
        for server in cluster.living:
            server.kill()
        step = asyncio.create_task(session.step("left"))
        await eventually(lambda: all(replica.lost for replica in fleet.replicas))
        with pytest.raises(OSError, match="no such name"):
            await cluster.resolve(NAME, PORT)
        cluster.start(1)
        await step
        assert session.recoveries == 1


async def test_a_name_that_never_was_is_refused_at_the_start() -> None:
    with pytest.raises(Unreachable, match="cannot be resolved"):
        async with fleet_of(Cluster(0)):
            pass


async def test_a_server_that_has_begun_to_drain_is_asked_once() -> None:
    async with (
        FakeServer() as one,
        FakeServer() as two,
        Fleet([one.address, two.address], health_seconds=600) as fleet,
    ):
        one.draining = True  # which nobody has been told
        sessions = [session for seed in range(12) for session in await fleet.open("walk-v1", seed=seed)]
        assert {session.address for session in sessions} == {two.address}
        assert one.calls["open"] == 1


async def test_the_newest_version_that_fits_takes_the_sessions_also_when_it_comes_later(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(upkeep, "RESOLVE_SECONDS", 0.05)
    cluster = Cluster(2)
    async with fleet_of(cluster) as fleet:
        await open_groups(fleet, 4, 1)
        pinned = await fleet.open(ENVIRONMENT, seed=1, version=">=1,<1.1", count=2)
        (newer,) = cluster.start(1, version="1.1.0")
        await eventually(lambda: len([replica for replica in fleet.replicas if replica.ready]) == 3)
        assert {session.address for session in await open_groups(fleet, 4, 1)} == {newer.address}
        again = await fleet.open(ENVIRONMENT, seed=1, version=">=1,<1.1")
        assert {session.version for session in pinned + again} == {"1.0.0"}


async def test_sessions_that_wait_for_a_server_share_the_calls_that_look_for_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    calls = 0

    async def describe(request: pb.DescribeRequest) -> pb.DescribeResponse:
        nonlocal calls
        calls += 1
        return await FakeServer.describe(one, request)

    async with (
        FakeServer() as one,
        FakeServer(version="1.3.0") as two,
        Fleet([one.address, two.address], health_seconds=600, grace=0.0) as fleet,
    ):
        await two.stop()
        await eventually(lambda: sum(replica.ready for replica in fleet.replicas) == 1)
        monkeypatch.setattr(one, "describe", describe)
        opening = asyncio.gather(*(fleet.open("walk-v1", seed=seed, version="==1.3.0") for seed in range(50)))
        await eventually(lambda: calls > 0)
        await two.start(int(two.address.rpartition(":")[2]))
        assert len(await opening) == 50
        assert calls < 25


async def test_a_placement_looks_at_few_servers_however_many_there_are(monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = Cluster(150)
    async with fleet_of(cluster) as fleet:
        await fleet.open(ENVIRONMENT, seed=1)
        looks: Counter[str] = Counter()
        kind = type(fleet.replicas[0])
        load = kind.load.fget
        mine = asyncio.current_task()  # the fleet's own tasks look, too, now and then

        def look(name: str) -> None:
            looks[name] += asyncio.current_task() is mine

        monkeypatch.setattr(kind, "load", property(lambda replica: look("load") or load(replica)))
        monkeypatch.setattr(kind, "specs", property(lambda replica: look("specs") or []))
        for _ in range(100):
            await fleet.pool.choose(ENVIRONMENT, "", 0.0)
        assert 0 < looks["load"] <= 1_000 and looks["specs"] == 0


async def test_news_of_a_server_takes_no_look_at_all_the_others() -> None:
    cluster = Cluster(200)
    async with fleet_of(cluster) as fleet:
        looks = 0

        class Watched(list):  # type: ignore[type-arg]
            def __iter__(self):  # type: ignore[no-untyped-def]
                nonlocal looks
                looks += 1
                return super().__iter__()

        fleet.pool.replicas = Watched(fleet.replicas)
        for server in cluster.living:
            fleet.pool.changed(server.address)
        assert looks == 0


async def test_many_servers_are_filled_evenly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(upkeep, "RESOLVE_SECONDS", 0.05)
    result = await measure(Result(20, 800, 4, 2, health_seconds=0.1, upkeep_seconds=0.05))
    assert all(part.balance is None or part.balance < 2.5 for part in result.parts)
    filled = next(part for part in result.parts if part.name.startswith("open groups"))
    assert filled.balance is not None and filled.balance < 1.5
    assert {sum(values) for name, values in result.counts.items() if "new" not in name} == {800}


async def test_a_server_that_is_full_is_left_alone_as_long_as_it_asks_while_another_has_room() -> None:
    async with (
        FakeServer() as full,
        FakeServer() as other,
        Fleet([full.address, other.address], health_seconds=600) as fleet,
    ):
        full.before = refuse(600.0)
        opened = [session for seed in range(6) for session in await fleet.open("walk-v1", seed=seed)]
        restored = [await fleet.restore(await opened[0].snapshot()) for _ in range(6)]
        assert {session.address for session in opened + restored} == {other.address}
        assert full.calls["open"] + full.calls.get("restore", 0) == 1
        # A new process there has room for all that is known.
        full.before = lambda kind, request: None
        await full.restart()
        await eventually(lambda: all(replica.accepts("walk-v1") for replica in fleet.replicas))
        (session,) = await fleet.open("walk-v1", seed=9)
        assert session.address == full.address


@pytest.mark.parametrize(
    ("limit", "has_room"), [("max_processes", True), ("environment", True), ("max_sessions", False)]
)
async def test_a_server_without_room_for_one_environment_has_room_for_the_others(limit: str, has_room: bool) -> None:
    async with FakeServer() as server, Fleet(server.address) as fleet:
        server.before = refuse(600.0, limit)
        with pytest.raises(Overloaded):
            await fleet.open("walk-v1", seed=3)
        (replica,) = fleet.replicas
        assert not replica.accepts("walk-v1")
        assert replica.accepts("run-v1") is has_room


async def test_where_all_are_full_they_are_asked_again_until_the_patience_ends() -> None:
    async with (
        FakeServer() as one,
        FakeServer() as two,
        Fleet([one.address, two.address]) as hasty,
        Fleet([one.address, two.address]) as patient,
    ):
        one.before = refuse(0.01)
        two.before = refuse(600.0)
        first = asyncio.create_task(patient.open("walk", seed=9))
        await eventually(lambda: one.calls.get("open", 0) > 3)
        assert two.calls["open"] == 1
        give_patience(hasty, 0.5)
        with pytest.raises((Overloaded, DeadlineExceeded)):  # the latter where the last call is cut off
            await hasty.open("walk-v1", seed=3)
        opening = asyncio.gather(first, *(patient.open("walk-v1", seed=seed) for seed in range(5)))
        await eventually(lambda: not any(replica.accepts("walk-v1") for replica in patient.replicas))
        one.before = lambda kind, request: None
        assert {session.address for group in await opening for session in group} == {one.address}


async def test_who_waits_for_a_server_is_told_when_the_fleet_is_closed() -> None:
    async with FakeServer() as server:
        fleet = Fleet(server.address)
        await fleet.start()
        (session,) = await fleet.open("walk-v1", seed=3)
        snapshot = await session.snapshot()
        server.before = refuse(10.0)
        waiting = asyncio.gather(fleet.open("walk-v1"), fleet.restore(snapshot), return_exceptions=True)
        await eventually(lambda: not fleet.replicas[0].accepts("walk-v1"))
        server.lose = lambda kind: kind == "render"
        calls = asyncio.gather(session.render(), session.render(), return_exceptions=True)
        await asyncio.sleep(0.05)
        async with asyncio.timeout(60):
            await fleet.close()
            later = [fleet.open("walk-v1"), fleet.restore(snapshot), session.render(), session.fork()]
            results = [*await waiting, *await calls, *await asyncio.gather(*later, return_exceptions=True)]
        assert [type(result) for result in results] == [Unreachable] * 8


def refuse(retry: float, limit: str = "max_sessions") -> Callable[[str, object], None]:
    """A server that takes no more sessions."""

    def before(kind: str, _: object) -> None:
        if kind in ("open", "restore"):
            raise overloaded(retry, limit)

    return before
