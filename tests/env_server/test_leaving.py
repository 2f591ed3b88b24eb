"""An environment that calls sys.exit, or lets a StopIteration out, costs its own session alone."""

import pytest

from starpod.v1 import environment_pb2 as pb
from tests.env_server.conftest import Client
from tests.env_server.test_stream import Stream, columns, read_status

HERE = ("leaving-v1", "leaving_thread-v1")
ENDINGS = [("exit", "SystemExit", "3"), ("stop", "StopIteration", "no more")]


@pytest.mark.parametrize("environment", HERE)
@pytest.mark.parametrize(("action", "exception", "message"), ENDINGS)
async def test_what_would_end_more_than_a_step_is_a_bug_of_the_environment(
    client: Client, environment: str, action: str, exception: str, message: str
) -> None:
    unary, streamed = await client.open(environment), await client.open(environment)
    stream = Stream(client)
    await stream.send(columns([(1, streamed, 0, (action,))]))
    await stream.until(1)
    for failure in (await client.fails(client.step(unary, 0, action)), read_status(stream.replies[1])):
        assert (failure.reason, failure.metadata["exception"]) == ("ENVIRONMENT_BUG", exception)
        assert failure.metadata["session"] == "lost"
        assert f"{environment}: Step raised {exception}: {message}" in failure.message
    assert (await client.step(await client.open("walk-v1"), 0, "Right")).outcomes[0].valid


@pytest.mark.parametrize("environment", HERE)
async def test_a_state_that_ends_the_process_is_a_bad_one(client: Client, environment: str) -> None:
    session = await client.open(environment)
    snapshot = (await client.stub.Snapshot(pb.SnapshotRequest(session_id=session.session_id))).snapshot
    failure = await client.fails(client.stub.Restore(pb.RestoreRequest(snapshot=snapshot)))
    assert (failure.reason, failure.fields) == ("BAD_ARGUMENT", ["snapshot.state"])
    assert "SystemExit(4)" in failure.message
    assert (await client.step(await client.open("walk-v1"), 0, "Right")).outcomes[0].valid
