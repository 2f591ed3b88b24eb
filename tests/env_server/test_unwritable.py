"""Environments that give what no message can hold, or break in mid-step: their own session pays, and nothing else."""

import pytest

from starpod.env_server.config import ServerLimits
from starpod.v1 import environment_pb2 as pb
from tests.env_server.conftest import Client, Failure, Serve, read_status, step_request, text_of
from tests.env_server.test_stream import Stream, columns

EVERYWHERE = ("unruly-v1", "unruly_thread-v1", "unruly_process-v1")


def expect_bug(failure: Failure, session: str) -> None:
    assert (failure.code, failure.reason, failure.metadata["session"]) == ("INTERNAL", "ENVIRONMENT_BUG", session)


async def live_sessions(client: Client) -> int:
    return (await client.stub.Describe(pb.DescribeRequest())).live_sessions


@pytest.mark.parametrize("environment", EVERYWHERE)
@pytest.mark.parametrize("action", ["info", "text"])
async def test_a_transition_that_cannot_be_written_costs_its_own_session(
    client: Client, environment: str, action: str
) -> None:
    by_call, by_row, *good = [await client.open(environment) for _ in range(4)]
    expect_bug(await client.fails(client.step(by_call, 0, action)), "lost")
    assert (await client.fails(client.step(by_call, 0, action))).reason == "SESSION_LOST"
    stream = Stream(client)
    request = columns([(1, good[0], 0, ("fine",)), (2, by_row, 0, (action,)), (3, good[1], 0, ("fine",))])
    request.calls.append(pb.Call(call_id=4, renew=pb.RenewRequest()))
    await stream.send(request)
    await stream.until(4)
    expect_bug(read_status(stream.replies[2]), "lost")
    for call_id in (1, 3):
        reply = stream.replies[call_id]
        assert text_of(reply.transition if isinstance(reply, pb.StepResponse) else reply) == "played 1"
    await stream.send(columns([(5, by_row, 1, ("fine",)), (6, good[0], 1, ("fine",))]))
    await stream.until(6)
    assert read_status(stream.replies[5]).reason == "SESSION_LOST"
    assert await live_sessions(client) == 4


async def test_a_step_that_broke_is_not_played_again_by_its_repeat_in_the_same_batch(client: Client) -> None:
    session = await client.open("unruly-v1")
    stream = Stream(client)
    await stream.send(columns([(1, session, 0, ("raise",)), (2, session, 0, ("raise",))]))
    await stream.until(2)
    expect_bug(read_status(stream.replies[1]), "lost")
    assert read_status(stream.replies[2]).reason == "SESSION_LOST"


async def test_a_step_that_broke_is_told_even_where_no_call_may_be_in_flight(serve: Serve) -> None:
    client = await serve(limits=ServerLimits(max_calls_in_flight=1))
    slow, session = await client.open("waiting-v1"), await client.open("unruly-v1")
    stream = Stream(client)
    request = columns([(2, session, 0, ("raise",))])
    request.calls.append(pb.Call(call_id=1, step=step_request(slow, 0, "200")))
    await stream.send(request)
    await stream.until(2)
    expect_bug(read_status(stream.replies[2]), "lost")
    reset = pb.ResetRequest(session_id=session.session_id, epoch=1)
    assert (await client.fails(client.stub.Reset(reset))).reason == "SESSION_LOST"


@pytest.mark.parametrize("environment", EVERYWHERE)
@pytest.mark.parametrize("option", ["text", "instructions"])
async def test_a_start_that_cannot_be_written_changes_nothing(client: Client, environment: str, option: str) -> None:
    session = await client.open(environment)
    await client.step(session, 0, "fine")
    reset = pb.ResetRequest(session_id=session.session_id, epoch=1, seed=1, options={option: True})
    for _ in range(2):
        expect_bug(await client.fails(client.stub.Reset(reset)), "intact")
    assert text_of(await client.step(session, 1, "fine")) == "played 2"
    expect_bug(await client.fails(client.open(environment, count=3, options={option: True})), "intact")
    assert await live_sessions(client) == 1


async def test_text_of_numpy_is_text(client: Client) -> None:
    session = await client.open("unruly-v1", options={"numpy": True})
    assert text_of(session) == text_of(await client.step(session, 0, "fine")) == "north"
    stream = Stream(client)
    await stream.send(columns([(1, session, 1, ("fine",))]))
    await stream.until(1)
    assert text_of(stream.replies[1].transition) == "north"


async def test_a_stream_that_ends_by_a_bug_of_the_server_says_so(
    client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("starpod.env_server.stream.step_rows", None)
    stream = Stream(client)
    await stream.send(columns([(1, await client.open("walk-v1"), 0, ("Right",))]))
    failure = await client.fails(stream.call.read())
    assert (failure.code, failure.reason) == ("INTERNAL", "SERVER_BUG")
