"""One bad call, or one bad reply, costs nobody but its own caller; and what nobody waits for leaves nothing behind."""

import asyncio
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest

from starpod.client import BadArgument, Fleet, ServerBug, ToolCall, Transition
from starpod.client.connection.calls import OPEN, AwaitedCall, SessionStep
from starpod.client.connection.queue import CallQueue
from starpod.v1 import environment_pb2 as pb
from tests.client.fake_server import FakeServer, every_way
from tests.client.test_fleet import seen, undisturbed
from tests.waiting import eventually

UNSENDABLE: list[Any] = [
    "\ud800",
    ["left", "\udfff", "left"],
    ["\ud83d", "\ude00"],
    ToolCall("open", {"n": np.int64(1)}),
    ToolCall("\ud800"),
]


@every_way
@pytest.mark.parametrize("turn", UNSENDABLE, ids=ascii)
async def test_an_action_that_cannot_be_sent_is_refused_alone(fake: FakeServer, turn: Any) -> None:
    async with Fleet(fake.address) as fleet, asyncio.timeout(60):
        sessions = await fleet.open("walk-v1", seed=3, count=3)
        results = await fleet.step_many(sessions, ["left", turn, "left"], return_exceptions=True)
        assert isinstance(results[1], BadArgument)
        assert "cannot be sent" in str(results[1])
        with pytest.raises(BadArgument):
            await sessions[0].step(turn)
        for result in results[0], await sessions[1].step("left"):
            assert isinstance(result, Transition)
        assert seen(results[0]) == (await undisturbed(3, ["left"]))[0]
        assert fleet.replicas[0].reconnects == 1


async def test_nor_is_it_sent_where_it_is_long() -> None:
    server = FakeServer()
    server.limits.max_message_bytes = 4096
    async with server, Fleet(server.address) as fleet, asyncio.timeout(60):
        (session,) = await fleet.open("walk-v1", seed=3)
        with pytest.raises(BadArgument):
            await session.step("\ud800" * 1_000)
        await session.step("left")


async def test_a_large_call_shares_its_message_with_no_steps() -> None:
    queue = CallQueue("here", Mock(), messages_in_flight=2, bytes_allowed=4096)
    queue.columns = True
    queue.add(AwaitedCall(OPEN, pb.OpenRequest(key="k" * 3800), asyncio.get_running_loop().create_future()))
    step = SessionStep("s" * 22, 1, 0)
    step.actions = ("a" * 300,)
    queue.add(step)
    messages = [queue.collect(0.0) for _ in range(2)]
    assert [(len(message.calls), len(message.steps.call_ids)) for message in messages if message] == [(1, 0), (0, 1)]


async def test_a_stream_whose_writer_fails_is_reopened(monkeypatch: pytest.MonkeyPatch) -> None:
    async with FakeServer() as server, Fleet(server.address, grace=60.0) as fleet, asyncio.timeout(60):
        (session,) = await fleet.open("walk-v1", seed=3)
        (replica,) = fleet.replicas
        collect = replica.queue.collect

        def fail(now: float) -> pb.StreamRequest:
            replica.queue.collect = collect  # type: ignore[method-assign]
            raise ZeroDivisionError

        monkeypatch.setattr(replica.queue, "collect", fail)
        assert seen(await session.step("left")) == (await undisturbed(3, ["left"]))[0]
        assert replica.reconnects == 2


@every_way
async def test_a_token_file_may_be_away_for_a_while(fake: FakeServer, tmp_path: Path) -> None:
    file = tmp_path / "token"
    file.write_text("secret")
    fake.token = "secret"
    async with Fleet(fake.address, token=file, timeout=0.5) as fleet, asyncio.timeout(60):
        (session,) = await fleet.open("walk-v1", seed=3)
        file.unlink()
        step = asyncio.create_task(session.step("left"))
        await asyncio.sleep(0.05)
        assert [spec.id for spec in await fleet.describe()] in (["walk-v1"], [])
        file.write_text("secret")
        assert seen(await step) == (await undisturbed(3, ["left"]))[0]


@every_way
async def test_a_reply_that_cannot_be_read_costs_its_own_call_only(fake: FakeServer) -> None:
    async with Fleet(fake.address) as fleet, asyncio.timeout(60):
        one, other = await fleet.open("walk-v1", seed=3, count=2)
        reset = fake.reset

        async def garble(request: pb.ResetRequest) -> pb.ResetResponse:
            response = await reset(request)
            response.session.observation.parts.add(json="{no")
            return response

        fake.reset = garble  # type: ignore[method-assign]
        results = await asyncio.gather(one.reset(seed=5), other.step("left"), return_exceptions=True)
        assert isinstance(results[0], ServerBug)
        assert isinstance(results[1], Transition)
        assert fleet.replicas[0].reconnects == 1


@pytest.mark.parametrize("wrong", ["end_reasons", "texts"])
async def test_rows_that_cannot_be_read_end_the_calls_that_wait_for_them(wrong: str) -> None:
    rows = pb.StreamResponse()

    def garble(reply: pb.Reply, columns: bool) -> pb.StreamResponse:
        """Sends three rows at once, one of them wrong."""
        rows.MergeFrom(FakeServer.pack(server, reply, columns))
        if len(rows.transitions.call_ids) < 3:
            return pb.StreamResponse()
        if wrong == "texts":
            rows.transitions.texts.pop()
        else:
            rows.transitions.ended_rows.append(1)
            rows.transitions.end_reasons.append(77)  # type: ignore[arg-type]
            rows.transitions.end_successes.append(0)
        return rows

    async with FakeServer() as server, Fleet(server.address) as fleet, asyncio.timeout(60):
        sessions = await fleet.open("walk-v1", seed=3, count=3)
        server.pack = garble  # type: ignore[method-assign]
        results = await fleet.step_many(sessions, ["left"] * 3, return_exceptions=True)
        assert [type(result) for result in results] == [ServerBug] * 3


@every_way
@pytest.mark.parametrize("deterministic", [True, False])
@pytest.mark.parametrize("method", ["open", "fork"])
async def test_a_cancelled_call_leaves_no_sessions_behind(fake: FakeServer, deterministic: bool, method: str) -> None:
    fake.deterministic = deterministic
    async with Fleet(fake.address, health_seconds=0.02) as fleet, asyncio.timeout(60):
        (parent,) = await fleet.open("walk-v1", seed=1)
        for moment in range(40):
            fake.delay = lambda kind, seconds=0.002 * (moment % 3): seconds  # type: ignore[misc]
            work = fleet.open("walk-v1", seed=moment, count=2) if method == "open" else parent.fork(2)
            task = asyncio.create_task(work)
            for _ in range(moment // 3):
                await asyncio.sleep(0)
            if moment % 5 == 0:
                await asyncio.sleep(0.002)
            if not task.cancel():
                for session in await task:
                    await session.close()
        await eventually(lambda: len(fake.sessions) == 1)


async def test_a_cancelled_call_that_is_answered_late_leaves_no_sessions_behind(fake: FakeServer) -> None:
    async with Fleet(fake.address, timeout=0.1, health_seconds=0.02) as fleet, asyncio.timeout(60):
        delays = iter([0.5])
        fake.delay = lambda kind: next(delays, 0.0) if kind == "open" else 0.0
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(fleet.open("walk-v1", seed=1), 0.05)
        await eventually(lambda: len(fake.sessions) == 1)
        await eventually(lambda: not fake.sessions)


async def test_a_reply_that_comes_with_the_deadline_is_returned(fleet: Fleet, monkeypatch: pytest.MonkeyPatch) -> None:
    (replica,) = fleet.replicas
    until, reply = replica.loop.time() + 0.01, pb.OpenResponse(instructions="Walk.")
    monkeypatch.setattr(replica, "submit", lambda call: replica.loop.call_at(until - 1e-6, call.answered, reply))
    assert await replica.call(OPEN, pb.OpenRequest(), until) is reply


@every_way
@pytest.mark.parametrize("outage", ["slow", "away"])
async def test_an_open_that_nobody_awaits_is_completed_and_closed_with_the_fleet(fake: FakeServer, outage: str) -> None:
    """Even if its reply comes only after a time-out or a new connection, or while the fleet is being closed."""
    delays = iter([0.3])
    fake.delay = lambda kind: next(delays, 0.0) if kind == "open" else 0.0
    async with Fleet(fake.address, timeout=0.1, grace=60) as fleet, asyncio.timeout(60):
        task = asyncio.create_task(fleet.open("walk-v1", seed=1))
        await eventually(lambda: len(fake.sessions) == 1, 5)
        task.cancel()
        if outage == "away":
            await fake.stop()
            await fake.start(int(fake.address.rpartition(":")[2]))
    assert not fake.sessions


async def test_a_session_that_the_program_drops_is_closed_soon_and_others_stay(fake: FakeServer, fleet: Fleet) -> None:
    sessions = await fleet.open("walk-v1", seed=1, count=3)
    kept_id = sessions[0].id
    copy, step = await sessions[0].fork(), asyncio.create_task(sessions[2].step("left"))
    del sessions[1:], copy
    await eventually(lambda: set(fake.sessions) == {kept_id}, 5)
    assert isinstance(await step, Transition)


def test_ready_steps_wait_for_an_acknowledgement_and_share_messages_equally() -> None:
    """However long that takes: a timer would send them in ever smaller messages to a server that is slow."""
    queue = CallQueue("here", Mock(), messages_in_flight=2, bytes_allowed=2**20)
    queue.columns = queue.acknowledgements = True
    steps = [SessionStep(f"session {number}", 1, 0) for number in range(260)]
    for step in steps:
        step.actions = ("left",)
    queue.ready_steps += steps[:250]
    messages = [queue.collect(now) for now in (0.0, 0.1)]
    assert [len(message.steps.call_ids) for message in messages if message and message.acknowledge] == [125, 125]
    queue.ready_steps += steps[250:]
    assert queue.hold(now=1e6) is None
    queue.take(pb.StreamResponse(acknowledged=1))
    assert queue.hold(now=1e6) == 0.0
