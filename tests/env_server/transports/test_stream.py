"""The Stream call: columns equal calls, replies are sent as they finish, and a bad call fails no other."""

import asyncio
from collections.abc import Sequence
from typing import Any

import grpc
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from starpod.check.grpc_connection import start_rows
from starpod.env_server.episodes.timing import begin, clock
from starpod.env_server.operation.config import ServerLimits
from starpod.env_server.sessions.columns import Answers
from starpod.env_server.sessions.responses import split_response, too_large
from starpod.env_server.transports.outbox import Outbox
from starpod.v1 import environment_pb2 as pb
from tests.env_server.conftest import (
    Client,
    Failure,
    Serve,
    Stream,
    columns,
    entered,
    read_status,
    step_request,
    text_of,
)
from tests.env_server.troublesome import Waiting, Walk
from tests.waiting import eventually


async def test_columns_equal_calls(client: Client) -> None:
    turns = [("Right",), ("left", "RIGHT", "jump"), ("report",), (), ("Right", "stop", "Left")]
    wants = [pb.Want(), pb.Want(state_key=True), pb.Want(score=True), pb.Want(valid_actions=True)]
    by_call, by_column = [
        [await client.open("walk-v1", seed=3, dynamics_seed=4, want=want) for want in wants] for _ in range(2)
    ]
    stream = Stream(client)
    for index, actions in enumerate(turns):
        streamed = await stream.ask(*((session, index, *actions) for session in by_column))
        assert streamed == [await client.step(session, index, *actions) for session in by_call]


@pytest.mark.parametrize(
    ("texts", "size"),
    [(["é" * 500], 0), (["é" * 513], 1026), (["😀" * 257], 1028), (["😀" * 128] * 3, 1536), (["a" * 1025], 1025)],
)
async def test_the_bytes_of_a_row_are_bounded(serve: Serve, texts: list[str], size: int) -> None:
    client = await serve(limits=ServerLimits(max_step_bytes=1024))
    session = await client.open("walk-v1")
    (reply,) = await Stream(client).ask((session, 0, *texts))
    assert reply == await client.step(session, 0, *texts) if not size else f"have {size} bytes" in reply.message


@pytest.mark.parametrize("environment", ["walk-v1", "altering-v1", "waiting-v1"])
@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    rows=st.lists(
        st.tuples(st.integers(0, 2), st.integers(0, 2), st.sampled_from(["Right", "Left", "report", "stop", "bug"])),
        min_size=2,
        max_size=8,
    )
)
async def test_rows_of_one_message_equal_the_same_steps_one_by_one(
    client: Client, environment: str, rows: list[tuple[int, int, str]]
) -> None:
    """The rows are in order, repeated or refused, of sessions that end or break. Each reply is that of its own step."""
    together, alone = [await client.group(environment, 3, seed=5) for _ in range(2)]
    if environment == "waiting-v1":
        rows = [(place, index, str(len(action) % 2)) for place, index, action in rows]
    stream = Stream(client)
    streamed = await stream.ask(*((together[place], index, action) for place, index, action in rows))
    for got, (place, index, action) in zip(streamed, rows, strict=True):
        try:
            assert got == await client.step(alone[place], index, action)
        except grpc.aio.AioRpcError as error:
            assert got.message == error.details()
    stream.call.cancel()
    await client.close(*together, *alone)


async def test_a_slow_environment_delays_nobody(client: Client) -> None:
    slow, fast = await client.open("waiting-v1"), await client.open("walk-v1")
    stream = Stream(client)
    await stream.send((slow, 0, "gate"), (fast, 0, "Right"))
    for index in range(1, 5):
        await stream.until(index)
        await stream.send((fast, index, "Right"))
    await stream.until(5)
    assert list(stream.replies) == [1, 2, 3, 4, 5]
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

    connection = Connection()
    outbox = Outbox(connection, 0, lambda _, size: too_large(size, 0))  # type: ignore[arg-type]
    outbox.add(pb.Reply(call_id=1), begin(clock()))
    await asyncio.sleep(0)
    await outbox.write(pb.StreamResponse(replies=[pb.Reply(call_id=2)]))
    await eventually(lambda: connection.replies == 2)
    outbox.close()
    assert connection.most == 1


async def test_many_slow_renders_delay_nobody(client: Client) -> None:
    slow, fast = await client.open("waiting-v1"), await client.open("walk-v1")
    stream = Stream(client)
    render = pb.RenderRequest(session_id=slow.session_id)
    calls = [pb.Call(step=step_request(slow, 0, "gate")), *(pb.Call(render=render) for _ in range(18))]
    await stream.send((fast, 0, "Right"), calls=calls)
    await stream.until(3)
    assert stream.replies.keys() == {0, 18, 19}
    Waiting.opened.set()
    await stream.until(20)
    for number in (18, 19):
        failure = stream.replies[number]
        assert failure.limit == ("OVERLOADED", "large_replies") and failure.retry_after
    assert {stream.replies[number].data for number in range(2, 18)} == {b"gate"}
    (again,) = await stream.ask(calls=[pb.Call(render=render)])
    assert again.data == b"gate"


def start_of(response: pb.ResetResponse) -> pb.ResetResponse:
    """Return the part of a reply that a row of StartColumns can contain."""
    session = response.session
    told = pb.Session(seed=session.seed, dynamics_seed=session.dynamics_seed, observation=session.observation)
    return pb.ResetResponse(session=told, instructions=response.instructions)


async def ask_in_columns(stream: Stream, **columns: Sequence[Any]) -> list[Any]:
    """The replies to resets in the order of their rows: what rows can tell, or a Failure."""
    resets = pb.ResetColumns(call_ids=range(len(columns["session_ids"])), **columns)
    await stream.call.write(pb.StreamRequest(resets=resets, acknowledge=True))
    replies: dict[int, Any] = {}
    acknowledged = 0
    while len(replies) < len(resets.call_ids) or not acknowledged:
        response = await asyncio.wait_for(stream.call.read(), 60)
        acknowledged += response.acknowledged
        for reply in (*response.replies, *start_rows(response.starts)):
            replies[reply.call_id] = read_status(reply.error) if reply.HasField("error") else start_of(reply.reset)
    assert acknowledged == 1
    return [replies[row] for row in range(len(replies))]


@pytest.mark.parametrize("environment", ["walk-v1", "waiting-v1", "searched-v1", "anything-v1", "fragile-v1"])
async def test_resets_in_columns_equal_resets_by_call(client: Client, environment: str) -> None:
    """Resets have seeds or not, are repeated in either form, and their replies need several messages."""
    want = pb.Want(state_key=True)
    by_call, other, by_row = [await client.open(environment, seed=3, dynamics_seed=4, want=want) for _ in range(3)]
    calls = [await client.ask("Reset", session, epoch=1, seed=7) for session in (by_call, other)]
    stream, ids = Stream(client), [by_row.session_id, "none", by_call.session_id]
    first, unknown, again = await ask_in_columns(stream, session_ids=ids, epochs=[1] * 3, seeds=[7] * 3)
    assert (first, again) == (start_of(calls[1]), start_of(calls[0])) and unknown.reason == "UNKNOWN_SESSION"
    repeated = await client.ask("Reset", by_row, epoch=1, seed=7)
    assert start_of(repeated) == first and (repeated.session.epoch, repeated.limits) == (2, calls[0].limits)
    rows = {"session_ids": [by_row.session_id, other.session_id], "epochs": [2, 2]}
    drawn = await ask_in_columns(stream, **rows, dynamics_seeds=[5, 6])
    assert [reply.session.dynamics_seed for reply in drawn] == [5, 6]
    assert drawn[0].session.seed != drawn[1].session.seed
    assert await ask_in_columns(stream, **rows, dynamics_seeds=[5, 6]) == drawn
    late = await ask_in_columns(stream, **rows, dynamics_seeds=[6, 5])
    assert [failure.reason for failure in late] == ["OUT_OF_ORDER"] * 2
    ragged = await ask_in_columns(stream, session_ids=ids, epochs=[3] * 3, seeds=[1])
    assert [failure.fields for failure in ragged] == [["resets.seeds"]] * 3


async def test_a_reset_in_columns_that_fails_leaves_the_old_episode(
    client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    session = await client.open("walk-v1")
    await client.step(session, 0, "Right")

    def fail(*_: object) -> None:
        raise SystemExit("no start")

    monkeypatch.setattr(Walk, "reset", fail)
    (failure,) = await ask_in_columns(Stream(client), session_ids=[session.session_id], epochs=[1])
    assert failure.reason == "ENVIRONMENT_BUG" and failure.metadata["session"] == "intact"
    await client.step(session, 1, "Right")


async def test_many_starts_are_answered_in_parts_and_whole(client: Client) -> None:
    ids = [session.session_id for session in await client.group("walk-v1", 700)]
    replies = await ask_in_columns(Stream(client), session_ids=ids, epochs=[1] * 700)
    assert all(isinstance(reply, pb.ResetResponse) for reply in replies)


def test_a_large_response_is_split_and_acknowledges_once() -> None:
    texts = ["a" * 10, "b" * 20]
    answers = Answers()
    answers.add_starts([(row, f"at {row}", b"", row, row, texts[row % 2]) for row in range(40)])
    response = answers.message
    response.transitions.MergeFrom(pb.TransitionColumns(call_ids=[40], texts=["on"], rewards=[1], outcome_flags=[7]))
    response.replies.add(call_id=41)
    response.acknowledged = 1
    parts = list(split_response(response, response.ByteSize(), 200, lambda call_id, size: too_large(size, 200)))
    assert all(part.ByteSize() <= 200 for part in parts) and not any(part.acknowledged for part in parts[:-1])
    rows = [
        (call_id, part.starts.texts[row], part.starts.instructions[part.starts.instruction_places[row]])
        for part in parts
        for row, call_id in enumerate(part.starts.call_ids)
    ]
    assert rows == [(row, f"at {row}", texts[row % 2]) for row in range(40)]
    others = [(list(part.transitions.call_ids), len(part.replies)) for part in parts if not part.starts.call_ids]
    assert others == [([], 1), ([40], 0)] and parts[-1].acknowledged == 1


async def test_columns_that_do_not_fit_fail_row_by_row(client: Client) -> None:
    session = await client.open("walk-v1")
    request = columns((session, 0, "Right"), (session, 1, "Right"))
    del request.steps.epochs[1:]
    assert [failure.fields for failure in await Stream(client).ask(request=request)] == [["steps.epochs"]] * 2
    await client.step(session, 0, "Right")


async def test_a_timeout_answers_and_the_work_continues(client: Client) -> None:
    session = await client.open("waiting-v1")
    stream = Stream(client)
    step = step_request(session, 0, "gate")
    (failure,) = await stream.ask(calls=[pb.Call(timeout_ms=50, step=step)])
    assert (failure.code, failure.metadata["advice"]) == ("DEADLINE_EXCEEDED", "retry")
    Waiting.opened.set()
    assert text_of((await stream.ask(calls=[pb.Call(step=step)]))[0]) == "gate"


async def test_half_close_finishes_what_was_received(client: Client) -> None:
    session = await client.open("waiting-v1")
    stream = Stream(client)
    await stream.send((session, 0, "gate"))
    await stream.call.done_writing()
    await entered()
    Waiting.opened.set()
    await stream.until(1)
    assert await stream.call.read() is grpc.aio.EOF
    assert await stream.call.code() is grpc.StatusCode.OK


async def test_cancelling_a_stream_leaves_its_sessions_and_their_work(client: Client) -> None:
    session = await client.open("waiting-v1")
    stream = Stream(client)
    await stream.send((session, 0, "gate"))
    await entered()
    stream.call.cancel()
    await eventually(lambda: not client.server.metrics.streams)
    Waiting.opened.set()
    assert text_of(await client.step(session, 0, "gate")) == "gate"


async def test_calls_in_flight_are_bounded_in_a_stream_too(serve: Serve) -> None:
    client = await serve(limits=ServerLimits(max_calls_in_flight=2))
    sessions = [await client.open("waiting-v1") for _ in range(4)]
    stream = Stream(client)
    await stream.send(*((session, 0, "gate") for session in sessions))
    await stream.until(2)
    refused = list(stream.replies.values())
    assert all(failure.limit == ("OVERLOADED", "max_calls_in_flight") and failure.retry_after for failure in refused)
    Waiting.opened.set()
    await stream.until(4)
    assert sum(isinstance(reply, Failure) for reply in stream.replies.values()) == 2


@pytest.mark.parametrize("rows", [1, 700, 1500])
async def test_long_batches_are_answered_in_parts_and_whole(client: Client, rows: int) -> None:
    sessions = await client.group("walk-v1", rows)
    replies = await Stream(client).ask(*((session, 0, "Right") for session in sessions))
    assert all(isinstance(reply, pb.Transition) for reply in replies)


async def test_a_stream_that_ends_by_a_bug_of_the_server_says_so(
    client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("starpod.env_server.transports.stream.step_rows", None)
    stream = Stream(client)
    await stream.send((await client.open("walk-v1"), 0, "Right"))
    failure = await client.fails(stream.call.read())
    assert (failure.code, failure.reason) == ("INTERNAL", "SERVER_BUG")
