"""The Stream call: columns equal calls, replies come as they finish, one bad call fails alone."""

import asyncio
from collections.abc import Iterable
from typing import Any

import grpc
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from starpod.env_server.auth import Grant
from starpod.env_server.columns import Transitions
from starpod.env_server.config import ServerLimits
from starpod.env_server.session import SessionTable
from starpod.env_server.stream import StreamServer
from starpod.env_server.timing import begin, clock
from starpod.v1 import environment_pb2 as pb
from tests.env_server.conftest import Client, Serve, entered, read_status, step_request, text_of
from tests.env_server.troublesome import Waiting
from tests.waiting import eventually


def columns(rows: Iterable[tuple[int, pb.Session, int, tuple[str, ...]]], epoch: int = 1) -> pb.StreamRequest:
    """A request of (call id, session, step index, actions)."""
    rows = list(rows)
    return pb.StreamRequest(
        steps=pb.StepColumns(
            call_ids=[row[0] for row in rows],
            session_ids=[row[1].session_id for row in rows],
            epochs=[epoch] * len(rows),
            step_indices=[row[2] for row in rows],
            action_counts=[len(row[3]) for row in rows],
            actions=[action for row in rows for action in row[3]],
        )
    )


def transitions_of(response: pb.StreamResponse) -> dict[int, pb.Transition]:
    """The columns of a response as the transitions that they stand for, by call id."""
    table = response.transitions
    ended = dict(zip(table.ended_rows, zip(table.end_reasons, table.end_successes, strict=True), strict=True))
    counts = list(table.outcome_counts) or [1] * len(table.call_ids)
    shares = list(table.outcome_rewards) or list(table.rewards)
    found, start = {}, 0
    for row, call_id in enumerate(table.call_ids):
        reason, success = ended.get(row, (0, 0))
        flags = table.outcome_flags[start : start + counts[row]]
        found[call_id] = pb.Transition(
            observation=pb.Observation(
                parts=[pb.Part(text=table.texts[row])], state_key=table.state_keys[row] if table.state_keys else b""
            ),
            reward=table.rewards[row],
            outcomes=[
                pb.Outcome(executed=bool(flag & 1), valid=bool(flag & 2), effective=bool(flag & 4), reward=share)
                for flag, share in zip(flags, shares[start : start + counts[row]], strict=True)
            ],
            terminated=reason == pb.END_REASON_TERMINAL,
            truncated=reason > pb.END_REASON_TERMINAL,
            end_reason=reason,
            success=None if success == 0 else success == 2,
        )
        start += counts[row]
    return found


class Stream:
    """One stream whose replies are kept by call id."""

    def __init__(self, client: Client) -> None:
        self.call = client.stub.Stream()
        self.replies: dict[int, Any] = {}
        self.order: list[int] = []

    async def send(self, request: pb.StreamRequest) -> None:
        await self.call.write(request)

    async def until(self, count: int) -> None:
        while len(self.replies) < count:
            response = await asyncio.wait_for(self.call.read(), 60)
            assert response is not grpc.aio.EOF, await self.call.details()
            arrived: dict[int, Any] = transitions_of(response)
            for reply in response.replies:
                arrived[reply.call_id] = getattr(reply, reply.WhichOneof("response"))
            assert not arrived.keys() & self.replies.keys(), "answered twice"
            self.replies.update(arrived)
            self.order += arrived


async def test_columns_equal_calls(client: Client) -> None:
    turns = [("Right",), ("left", "RIGHT", "jump"), ("report",), (), ("Right", "stop", "Left")]
    wants = [pb.Want(), pb.Want(state_key=True), pb.Want(score=True), pb.Want(valid_actions=True)]
    by_call, by_column = [
        [await client.open("walk-v1", seed=3, dynamics_seed=4, want=want) for want in wants] for _ in range(2)
    ]
    stream = Stream(client)
    for index, actions in enumerate(turns):
        await stream.send(columns((10 * index + k, s, index, actions) for k, s in enumerate(by_column)))
        await stream.until(len(wants) * (index + 1))
        for k, session in enumerate(by_call):
            got = stream.replies[10 * index + k]
            got = got.transition if isinstance(got, pb.StepResponse) else got
            assert got == await client.step(session, index, *actions)


@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.lists(
        st.lists(st.tuples(st.integers(0, 3), st.sampled_from(["Left", "Right", "report", "stop", "?"])), max_size=8),
        max_size=4,
    )
)
async def test_any_batches_equal_the_same_steps_one_by_one(
    client: Client, batches: list[list[tuple[int, str]]]
) -> None:
    streamed, single = [
        (await client.stub.Open(pb.OpenRequest(environment_id="walk-v1", seed=5, count=4))).sessions for _ in range(2)
    ]
    stream, indices, call_id = Stream(client), [0] * 4, 0
    for batch in batches:
        rows = []
        for place, action in batch:
            rows.append((call_id, streamed[place], indices[place], (action,)))
            indices[place] += 1
            call_id += 1
        if not rows:
            continue
        await stream.send(columns(rows))
        await stream.until(call_id)
        for row, (place, action) in zip(rows, batch, strict=True):
            got = stream.replies[row[0]]
            try:
                expected = await client.step(single[place], row[2], action)
            except grpc.aio.AioRpcError as error:
                assert got.message == error.details()
            else:
                assert (got.transition if isinstance(got, pb.StepResponse) else got) == expected
    stream.call.cancel()


async def test_a_slow_environment_delays_nobody(client: Client) -> None:
    slow, fast = await client.open("waiting-v1"), await client.open("walk-v1")
    stream = Stream(client)
    await stream.send(columns([(1, slow, 0, ("gate",)), (2, fast, 0, ("Right",))]))
    for index in range(1, 5):
        await stream.until(index)
        await stream.send(columns([(2 + index, fast, index, ("Right",))]))
    await stream.until(5)
    assert stream.order == [2, 3, 4, 5, 6]
    Waiting.opened.set()
    await stream.until(6)


async def test_messages_are_written_one_at_a_time(client: Client) -> None:
    """gRPC loses a message that is written while another is: what finished just before a batch waits for its turn."""

    class Connection:
        writing, most, replies = 0, 0, 0

        async def write(self, message: pb.StreamResponse) -> None:
            self.writing += 1
            self.most = max(self.most, self.writing)
            await asyncio.sleep(0.01)
            self.writing -= 1
            self.replies += len(message.replies)

    async def reply() -> pb.Reply:
        return pb.Reply(call_id=1)

    connection, table = Connection(), SessionTable()
    stream = StreamServer(client.server._service._calls, table, connection, Grant(table.tenant))
    flusher = asyncio.create_task(stream._flush())
    await asyncio.sleep(0)
    late = asyncio.create_task(reply())
    await late
    stream._finish(begin(clock()), late)
    batch = Transitions()
    batch.message.replies.append(pb.Reply(call_id=2))
    await stream._write(batch, clock())
    await eventually(lambda: connection.replies == 2)
    flusher.cancel()
    assert connection.most == 1


async def test_many_slow_renders_delay_nobody(client: Client) -> None:
    slow, fast = await client.open("waiting-v1"), await client.open("walk-v1")
    stream = Stream(client)
    render = pb.RenderRequest(session_id=slow.session_id)
    calls = [pb.Call(call_id=call_id, render=render) for call_id in range(1, 19)]
    request = columns([(100, fast, 0, ("Right",))])
    request.calls.extend([pb.Call(call_id=0, step=step_request(slow, 0, "gate")), *calls])
    await stream.send(request)
    await stream.until(3)
    assert stream.replies.keys() == {17, 18, 100}
    Waiting.opened.set()
    await stream.until(20)
    for call_id in (17, 18):
        failure = read_status(stream.replies[call_id])
        assert (failure.reason, failure.metadata["limit"]) == ("OVERLOADED", "large_replies")
        assert failure.retry_after
    assert {stream.replies[call_id].data for call_id in range(1, 17)} == {b"gate"}
    await stream.send(pb.StreamRequest(calls=[pb.Call(call_id=17_000, render=render)]))
    await stream.until(21)
    assert stream.replies[17_000].data == b"gate"


async def test_calls_on_one_session_keep_their_order_in_a_stream(client: Client) -> None:
    session = await client.open("waiting-v1")
    stream = Stream(client)
    calls = [pb.Call(call_id=index, step=step_request(session, index, str(40 - 10 * index))) for index in range(3)]
    request = columns([(3, session, 3, ("1",))])
    request.calls.extend(calls)
    await stream.send(request)
    await stream.until(4)
    last = stream.replies[3]
    assert text_of(last.transition if isinstance(last, pb.StepResponse) else last) == "40,30,20,1"


async def test_one_bad_call_fails_alone(client: Client) -> None:
    good, bug = await client.open("walk-v1"), await client.open("walk-v1")
    stream = Stream(client)
    request = columns(
        [(1, good, 0, ("Right",)), (2, pb.Session(session_id="none"), 0, ("Right",)), (3, bug, 0, ("bug",))]
    )
    request.calls.append(pb.Call(call_id=4))
    request.calls.append(pb.Call(call_id=5, step=step_request(good, 7, "Right")))
    request.calls.append(pb.Call(call_id=6, open=pb.OpenRequest(environment_id="walk-v1")))
    await stream.send(request)
    await stream.until(6)
    reasons = {call_id: read_status(stream.replies[call_id]).reason for call_id in (2, 3, 4, 5)}
    assert reasons == {2: "UNKNOWN_SESSION", 3: "ENVIRONMENT_BUG", 4: "BAD_ARGUMENT", 5: "OUT_OF_ORDER"}
    assert len(stream.replies[6].sessions) == 1 and stream.replies[1].observation.parts
    await stream.send(columns([(7, bug, 0, ("Right",))]))
    await stream.until(7)
    assert read_status(stream.replies[7]).reason == "SESSION_LOST"


async def test_columns_that_do_not_fit_fail_row_by_row(client: Client) -> None:
    session = await client.open("walk-v1")
    stream = Stream(client)
    request = columns([(1, session, 0, ("Right",)), (2, session, 1, ("Right",))])
    del request.steps.epochs[1:]
    await stream.send(request)
    await stream.until(2)
    assert [read_status(stream.replies[call_id]).fields for call_id in (1, 2)] == [["steps.epochs"]] * 2
    await client.step(session, 0, "Right")


async def test_a_timeout_answers_and_the_work_goes_on(client: Client) -> None:
    session = await client.open("waiting-v1")
    stream = Stream(client)
    call = pb.Call(call_id=1, timeout_ms=50, step=step_request(session, 0, "gate"))
    await stream.send(pb.StreamRequest(calls=[call]))
    await stream.until(1)
    failure = read_status(stream.replies[1])
    assert (failure.code, failure.metadata["advice"]) == ("DEADLINE_EXCEEDED", "retry")
    Waiting.opened.set()
    call.call_id, call.timeout_ms = 2, 0
    await stream.send(pb.StreamRequest(calls=[call]))
    await stream.until(2)
    assert text_of(stream.replies[2].transition) == "gate"


async def test_half_close_finishes_what_was_received(client: Client) -> None:
    sessions = [await client.open("waiting-v1") for _ in range(3)]
    stream = Stream(client)
    await stream.send(columns((k, session, 0, ("150",)) for k, session in enumerate(sessions)))
    await stream.call.done_writing()
    await stream.until(3)
    assert await stream.call.read() is grpc.aio.EOF
    assert await stream.call.code() is grpc.StatusCode.OK


async def test_cancelling_a_stream_leaves_its_sessions_and_their_work(client: Client) -> None:
    session = await client.open("waiting-v1")
    stream = Stream(client)
    await stream.send(columns([(1, session, 0, ("gate",))]))
    await entered()
    stream.call.cancel()
    await eventually(lambda: not client.server.metrics.streams)
    Waiting.opened.set()
    assert text_of(await client.step(session, 0, "gate")) == "gate"
    assert text_of(await client.step(session, 1, "1")) == "gate,1"


async def test_calls_in_flight_are_bounded_in_a_stream_too(serve: Serve) -> None:
    client = await serve(limits=ServerLimits(max_calls_in_flight=2))
    sessions = [await client.open("waiting-v1") for _ in range(4)]
    stream = Stream(client)
    await stream.send(columns((k, session, 0, ("100",)) for k, session in enumerate(sessions)))
    await stream.until(4)
    refused = [k for k in range(4) if not isinstance(stream.replies[k], pb.StepResponse)]
    assert len(refused) == 2
    failure = read_status(stream.replies[refused[0]])
    assert (failure.reason, failure.metadata["limit"]) == ("OVERLOADED", "max_calls_in_flight")
    assert failure.retry_after


@pytest.mark.parametrize("rows", [1, 700, 1500])
async def test_long_batches_are_answered_in_parts_and_whole(client: Client, rows: int) -> None:
    response = await client.stub.Open(pb.OpenRequest(environment_id="walk-v1", seed=1, count=rows))
    stream = Stream(client)
    await stream.send(columns((k, session, 0, ("Right",)) for k, session in enumerate(response.sessions)))
    await stream.until(rows)
    assert all(isinstance(reply, pb.Transition) for reply in stream.replies.values())
