"""Sessions that come back with all that they were: their turns, options, wishes and luck."""

from __future__ import annotations

import asyncio
from typing import Any

import grpc
import pytest

from starpod.client import BadArgument, Fleet, ReplayDiverged, SessionLost, Unreachable, Want
from tests.client.fake_server import FakeServer, Refusal, overloaded, session_lost
from tests.client.test_fleet import seen, undisturbed

TURNS = ["left", "right", "left", "right"]


# --- resets that fail ------------------------------------------------------------------------------------------------


async def test_a_refused_reset_of_a_lost_session_leaves_the_episode_where_it_was() -> None:
    async with FakeServer() as server, Fleet(server.address) as fleet:
        (session,) = await fleet.open("walk-v1", seed=3)
        played = [seen(await session.step(turn)) for turn in TURNS[:2]]
        server.sessions.clear()
        with pytest.raises(BadArgument, match="did you mean length"):
            await session.reset(options={"lenght": 9})
        assert session.step_index == 2
        played.append(seen(await session.step(TURNS[2])))
        server.sessions.clear()
        played.append(seen(await session.step(TURNS[3])))
        assert played == await undisturbed(3, TURNS)


async def test_so_does_one_that_was_refused_on_another_server() -> None:
    one, two = FakeServer(), FakeServer()
    async with two:
        await one.start()
        async with Fleet([one.address, two.address], grace=0.05, health_seconds=0.05) as fleet:
            two.draining = True
            await fleet.describe()
            (session,) = await fleet.open("walk-v1", seed=3)
            two.draining = False
            await fleet.describe()
            played = [seen(await session.step(turn)) for turn in TURNS[:2]]
            await one.stop()
            with pytest.raises(BadArgument):
                await session.reset(options={"lenght": 9})
            played += [seen(await session.step(turn)) for turn in TURNS[2:]]
            assert played == await undisturbed(3, TURNS)
            assert session.address == two.address
            async with asyncio.timeout(60):
                while len(two.sessions) > 1:  # the one in which the reset was tried is closed
                    await asyncio.sleep(0.01)


async def test_what_could_not_be_closed_is_closed_later() -> None:
    def before(kind: str, request: Any) -> None:
        if kind == "close" and server.calls["close"] <= 2:
            raise Refusal(grpc.StatusCode.INTERNAL, "ENVIRONMENT_ERROR", "it would not be closed", "give_up")

    async with FakeServer() as server, Fleet(server.address, health_seconds=0.05) as fleet:
        server.before = before
        (session,) = await fleet.open("walk-v1", seed=3)
        await session.step("left")
        server.sessions.clear()
        server.noise = 1  # so that what is rebuilt comes out differently, and is given up
        with pytest.raises(ReplayDiverged):
            await session.step("right")
        assert len(server.sessions) == 1
        async with asyncio.timeout(30):
            while server.sessions:
                await asyncio.sleep(0.01)


# --- full servers ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("deterministic", [True, False])
async def test_what_a_full_server_does_not_take_back_comes_back_on_another(deterministic: bool) -> None:
    def before(kind: str, request: Any) -> None:
        if kind in ("open", "restore"):
            raise overloaded()

    async with (
        FakeServer(deterministic=deterministic) as one,
        FakeServer(deterministic=deterministic) as two,
        Fleet([one.address, two.address], patience=5) as fleet,
    ):
        (session,) = await fleet.open("walk-v1", seed=3)
        others = await fleet.open("walk-v1", seed=3, count=4)
        home, other = (one, two) if session.address == one.address else (two, one)
        await session.step("left")
        home.before = before
        home.sessions.clear()
        await session.step("left")
        assert {session.address, *(each.address for each in others)} == {other.address}


# --- copies ----------------------------------------------------------------------------------------------------------


async def test_a_reset_copy_keeps_the_options_that_a_restored_session_was_reset_with() -> None:
    async def episode(*, disturb: bool) -> list[Any]:
        async with FakeServer() as server, Fleet(server.address) as fleet:
            (first,) = await fleet.open("walk-v1", seed=3, options={"length": 3})
            restored = await fleet.restore(await first.snapshot())
            await restored.reset(seed=5, options={"length": 6})
            (copy,) = await restored.fork(reseed=True, dynamics_seeds=[8])
            (copy,) = await copy.fork(reseed=True, dynamics_seeds=[9])
            await copy.reset(seed=7)
            transitions = [await copy.step("left")]
            if disturb:
                server.sessions.clear()
            while not copy.done:
                transitions.append(await copy.step("right"))
            return [seen(transition) for transition in transitions]

    whole = await episode(disturb=False)
    assert len(whole) == 6
    assert await episode(disturb=True) == whole


# --- snapshots after every turn --------------------------------------------------------------------------------------


async def test_what_a_reset_wants_is_wanted_after_a_recovery_from_a_snapshot() -> None:
    async with FakeServer(deterministic=False) as server, Fleet(server.address) as fleet:
        (session,) = await fleet.open("walk-v1", seed=3)
        await session.reset(seed=4, want=Want(state_key=True))
        for _ in range(2):
            assert len((await session.step("left")).observation.state_key) == 16
            server.sessions.clear()


@pytest.mark.parametrize("call", ["step", "reset"])
async def test_closing_the_fleet_ends_a_call_that_waits_for_its_snapshot(call: str) -> None:
    async with FakeServer(deterministic=False) as server:
        fleet = Fleet(server.address)
        await fleet.start()
        (session,) = await fleet.open("walk-v1", seed=3)
        server.lose = lambda kind: kind == "snapshot"
        waiting: asyncio.Task[Any] = asyncio.create_task(session.step("left") if call == "step" else session.reset())
        while server.calls["snapshot"] < 2:
            await asyncio.sleep(0.01)
        await fleet.close()
        async with asyncio.timeout(60):
            with pytest.raises(Unreachable):
                await waiting


@pytest.mark.parametrize("snapshots", [0, 1, 2])
async def test_what_is_too_large_for_a_snapshot_is_played_without_recovery(
    snapshots: int, caplog: pytest.LogCaptureFixture
) -> None:
    """However many were taken before: a reset's is the second, a turn's the third."""

    def before(kind: str, request: Any) -> None:
        if kind == "snapshot" and server.calls["snapshot"] > snapshots:
            raise Refusal(grpc.StatusCode.RESOURCE_EXHAUSTED, "TOO_LARGE", "too large a snapshot", "give_up")

    async with FakeServer(deterministic=False) as server, Fleet(server.address) as fleet:
        server.before = before
        (session,) = await fleet.open("walk-v1", seed=3)
        await session.reset(seed=4)
        await session.step("left")
        assert server.calls["snapshot"] == snapshots + 1
        assert "will not be recovered: too large a snapshot" in caplog.text
        server.sessions.clear()
        with pytest.raises(SessionLost, match="no snapshot to go on from"):
            await session.step("left")


async def test_a_snapshot_that_always_kills_its_session_is_not_tried_for_ever() -> None:
    def before(kind: str, request: Any) -> None:
        if kind == "snapshot":
            server.sessions.clear()
            raise session_lost()

    async with FakeServer(deterministic=False) as server, Fleet(server.address) as fleet:
        server.before = before
        with pytest.raises(SessionLost):
            await fleet.open("walk-v1", seed=3)
    assert server.calls["snapshot"] <= 5
