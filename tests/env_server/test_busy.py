"""Pictures from a pool that others use: an overload, never a lost session, a half-done turn or a server that waits."""

import pytest

from starpod.env_server import Busy, Limits
from starpod.env_server.episode import Episode, TooLate, Want
from starpod.env_server.threads import THREAD_NAME
from starpod.v1 import environment_pb2 as pb
from tests.env_server.conftest import Client, Failure, Serve, text_of
from tests.env_server.test_stream import Stream, columns, read_status
from tests.env_server.troublesome import Crowded

HERE = ("crowded-v1", "crowded_thread-v1")


@pytest.fixture(autouse=True)
def nobody_draws() -> None:
    Crowded.taken, Crowded.closed = 0, False
    Crowded.drawn_on.clear()


def expect_overload(failure: Failure) -> None:
    assert (failure.code, failure.reason) == ("RESOURCE_EXHAUSTED", "OVERLOADED")
    assert (failure.metadata["limit"], failure.metadata["advice"]) == ("environment", "retry")
    assert (failure.message, failure.retry_after) == ("everybody draws", 0.25)


def picture_of(holder: pb.Session | pb.Transition) -> bytes:
    text, picture = holder.observation.parts
    assert text.text.startswith(picture.image.data.decode())
    return picture.image.data


@pytest.mark.parametrize("environment", HERE)
async def test_open_reset_and_render_can_be_tried_again(client: Client, environment: str) -> None:
    Crowded.taken = 2
    want = pb.Want(image=True)
    for _ in range(2):
        expect_overload(await client.fails(client.open(environment, seed=7, want=want, key="once")))
        assert (await client.stub.Describe(pb.DescribeRequest())).live_sessions == 0
    session = await client.open(environment, seed=7, want=want, key="once")
    assert picture_of(session) == b"700"
    render = pb.RenderRequest(session_id=session.session_id, mode="png")
    reset = pb.ResetRequest(session_id=session.session_id, epoch=1, seed=8)
    for call in (lambda: client.stub.Render(render), lambda: client.stub.Reset(reset)):
        Crowded.taken = 1
        expect_overload(await client.fails(call()))
        await call()
    assert (await client.stub.Render(render)).data == b"800"


@pytest.mark.parametrize("environment", [*HERE, "crowded_process-v1"])
async def test_a_turn_whose_picture_is_not_to_be_had_was_not_made(client: Client, environment: str) -> None:
    session = await client.open(environment, seed=2)
    want = pb.Want(image=True)
    request = pb.StepRequest(
        session_id=session.session_id, epoch=1, step_index=0, actions=[pb.Action(text="go")] * 2, want=want
    )
    Crowded.taken = 1  # in this process; the one of class `process` has its own
    expect_overload(await client.fails(client.stub.Step(request)))
    shown = await client.stub.Render(pb.RenderRequest(session_id=session.session_id, mode="text"))
    assert shown.data == b"200 of start 2"
    del request.actions[1]  # nothing was made, so other actions may follow
    made = (await client.stub.Step(request)).transition
    assert (picture_of(made), len(made.outcomes)) == (b"201", 1)
    assert (await client.stub.Step(request)).transition == made
    ended = await client.step(session, 1, "go")
    assert not ended.truncated  # the turn that was not made counts against no limit
    assert (await client.step(session, 2, "go")).end_reason == pb.END_REASON_MAX_TURNS


@pytest.mark.parametrize("environment", [*HERE, "undrawn_process-v1"])
async def test_pictures_that_cannot_be_drawn_here_are_refused_and_cost_nothing(
    client: Client, environment: str
) -> None:
    session = await client.open(environment, seed=1)
    Crowded.closed = True
    step = pb.StepRequest(
        session_id=session.session_id, epoch=1, actions=[pb.Action(text="go")], want=pb.Want(image=True)
    )
    for call in (
        client.stub.Step(step),
        client.stub.Render(pb.RenderRequest(session_id=session.session_id, mode="png")),
        client.stub.Open(pb.OpenRequest(environment_id=environment, want=pb.Want(image=True))),
    ):
        failure = await client.fails(call)
        assert (failure.reason, failure.metadata["capability"]) == ("UNSUPPORTED", "render")
        assert "no brush: install one" in failure.message
    assert (await client.stub.Describe(pb.DescribeRequest())).live_sessions == 1
    assert text_of(await client.step(session, 0, "go")) == "101 of start 1"


@pytest.mark.parametrize("environment", HERE)
async def test_a_step_that_has_to_wait_can_be_tried_again(client: Client, environment: str) -> None:
    session = await client.open(environment, seed=1)
    Crowded.taken = 1
    expect_overload(await client.fails(client.step(session, 0, "wait", "go")))
    assert text_of(await client.step(session, 0, "wait", "go")) == "102 of start 1"
    Crowded.taken = 2  # columns try once more by themselves
    stream = Stream(client)
    await stream.send(columns([(1, session, 1, ("wait",))]))
    await stream.until(1)
    if environment == "crowded_thread-v1":
        Crowded.taken = 0
    expect_overload(read_status(stream.replies[1]))
    assert text_of(await client.step(session, 1, "wait")) == "103 of start 1"


async def test_busy_in_mid_turn_is_a_bug_where_the_turn_cannot_be_undone(client: Client) -> None:
    session = await client.open("crowded-v1", seed=1)
    Crowded.taken = 1
    failure = await client.fails(client.step(session, 0, "go", "wait"))
    assert (failure.reason, failure.metadata["session"]) == ("ENVIRONMENT_BUG", "lost")
    assert "raise it before anything has changed" in failure.message
    threaded = await client.open("crowded_thread-v1", seed=1)
    Crowded.taken = 1
    expect_overload(await client.fails(client.step(threaded, 0, "go", "wait")))
    assert text_of(await client.step(threaded, 0, "go", "wait")) == "102 of start 1"


async def test_pictures_are_drawn_on_threads_in_unary_calls_and_in_columns(client: Client, serve: Serve) -> None:
    want = pb.Want(image=True)
    session = await client.open("crowded-v1", want=want)
    stream = Stream(client)
    await stream.send(columns([(1, session, 0, ("go",))]))
    await stream.until(1)
    assert picture_of(stream.replies[1].transition) == b"101"
    fork = pb.ForkRequest(session_id=session.session_id, epoch=1, step_index=1)
    (copy,) = (await client.stub.Fork(fork)).sessions
    taken = (await client.stub.Snapshot(pb.SnapshotRequest(session_id=session.session_id))).snapshot
    other = await serve()
    (restored,) = (await other.stub.Restore(pb.RestoreRequest(snapshot=taken, want=want))).sessions
    for server, each in ((client, copy), (other, restored)):
        stream = Stream(server)
        await stream.send(columns([(1, each, 1, ("go",))]))
        await stream.until(1)
        assert picture_of(stream.replies[1].transition) == b"102"
    await client.stub.Render(pb.RenderRequest(session_id=session.session_id, mode="png"))
    assert Crowded.drawn_on and all(name.startswith(THREAD_NAME) for name in Crowded.drawn_on)


@pytest.mark.parametrize("environment", [*HERE, "crowded_process-v1"])
async def test_the_seed_reaches_the_environment_and_its_copies(client: Client, environment: str) -> None:
    group = (await client.stub.Open(pb.OpenRequest(environment_id=environment, seed=2**63, count=2))).sessions
    assert {text_of(session) for session in group} == {f"{2**63 * 100} of start {2**63}"}
    session = group[0]
    reset = pb.ResetRequest(session_id=session.session_id, epoch=1, seed=5)
    assert text_of((await client.stub.Reset(reset)).session) == "500 of start 5"
    fork = pb.ForkRequest(session_id=session.session_id, epoch=2, step_index=0, randomness=pb.FORK_RANDOMNESS_RESEED)
    (copy,) = (await client.stub.Fork(fork)).sessions
    taken = (await client.stub.Snapshot(pb.SnapshotRequest(session_id=copy.session_id))).snapshot
    (restored,) = (await client.stub.Restore(pb.RestoreRequest(snapshot=taken))).sessions
    assert text_of(copy) == text_of(restored) == "500 of start 5"


def test_an_environment_that_is_busy_when_it_has_been_counted_is_wrong() -> None:
    """Even in a turn that played nothing: it counts against the limit of turns."""

    class BusyLooking(Crowded):
        def observe(self) -> str:
            raise Busy("nobody looks", retry_after=0.1)

    episode = Episode(BusyLooking(), Limits())
    episode.reset(0, 0)
    with pytest.raises(TooLate, match="nobody looks"):
        episode.turn(["no such action"], Want())
