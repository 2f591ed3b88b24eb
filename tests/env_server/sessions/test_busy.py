"""Pictures from a pool that others use: an overload, never a lost session, a half-done turn or a server that waits."""

from typing import Any

import pytest

from starpod.env_server import Busy, Limits
from starpod.env_server.episodes.live_episode import LiveEpisode, TooLate, Want
from starpod.env_server.processes.threads import THREAD_NAME
from starpod.v1 import environment_pb2 as pb
from tests.env_server.conftest import Client, Failure, Serve, Stream, text_of
from tests.env_server.troublesome import Crowded

HERE = ("crowded-v1", "crowded_thread-v1")
PICTURE = pb.Want(image=True)


@pytest.fixture(autouse=True)
def nobody_draws() -> None:
    Crowded.taken, Crowded.closed = 0, False
    Crowded.drawn_on.clear()


def go(client: Client, session: pb.Session, turn: int = 0, count: int = 1) -> Any:
    """Steps, and shows a picture of it."""
    return client.ask("Step", session, epoch=1, step_index=turn, actions=[pb.Action(text="go")] * count, want=PICTURE)


def expect_overload(failure: Failure) -> None:
    assert (failure.code, *failure.limit) == ("RESOURCE_EXHAUSTED", "OVERLOADED", "environment")
    assert (failure.metadata["advice"], failure.message, failure.retry_after) == ("retry", "everybody draws", 0.25)


def picture_of(holder: pb.Session | pb.Transition) -> bytes:
    text, picture = holder.observation.parts
    assert text.text.startswith(picture.image.data.decode())
    return picture.image.data


@pytest.mark.parametrize("environment", HERE)
async def test_open_reset_and_render_can_be_tried_again(client: Client, environment: str) -> None:
    Crowded.taken = 2
    for _ in range(2):
        expect_overload(await client.fails(client.open(environment, seed=7, want=PICTURE, key="once")))
        assert await client.live() == 0
    session = await client.open(environment, seed=7, want=PICTURE, key="once")
    assert picture_of(session) == b"700"
    for method, fields in (("Render", {"mode": "png"}), ("Reset", {"epoch": 1, "seed": 8})):
        Crowded.taken = 1
        expect_overload(await client.fails(client.ask(method, session, **fields)))
        await client.ask(method, session, **fields)
    assert (await client.ask("Render", session, mode="png")).data == b"800"


@pytest.mark.parametrize("environment", [*HERE, "crowded_process-v1"])
async def test_a_turn_whose_picture_is_not_to_be_had_was_not_made(client: Client, environment: str) -> None:
    session = await client.open(environment, seed=2)
    Crowded.taken = 1  # in this process; the one of class `process` has its own
    expect_overload(await client.fails(go(client, session, count=2)))
    assert (await client.ask("Render", session)).data == b"200 of start 2"
    made = (await go(client, session)).transition  # nothing was made, so other actions may follow
    assert (picture_of(made), len(made.outcomes)) == (b"201", 1)
    assert (await go(client, session)).transition == made
    assert not (await client.step(session, 1, "go")).truncated  # what was not made counts against no limit
    assert (await client.step(session, 2, "go")).end_reason == pb.END_REASON_MAX_TURNS


@pytest.mark.parametrize("environment", [*HERE, "undrawn_process-v1"])
async def test_pictures_that_cannot_be_drawn_here_are_refused_and_cost_nothing(
    client: Client, environment: str
) -> None:
    session = await client.open(environment, seed=1)
    Crowded.closed = True
    for call in (
        go(client, session),
        client.ask("Render", session, mode="png"),
        client.open(environment, want=PICTURE),
    ):
        failure = await client.fails(call)
        assert (failure.reason, failure.metadata["capability"]) == ("UNSUPPORTED", "render")
        assert "no brush: install one" in failure.message
    assert await client.live() == 1
    assert text_of(await client.step(session, 0, "go")) == "101 of start 1"


@pytest.mark.parametrize("environment", HERE)
async def test_a_step_that_has_to_wait_can_be_tried_again(client: Client, environment: str) -> None:
    session = await client.open(environment, seed=1)
    Crowded.taken = 1
    expect_overload(await client.fails(client.step(session, 0, "wait", "go")))
    assert text_of(await client.step(session, 0, "wait", "go")) == "102 of start 1"
    Crowded.taken = 1 + (environment == "crowded-v1")  # columns try once more by themselves
    expect_overload(*await Stream(client).ask((session, 1, "wait")))
    assert text_of(await client.step(session, 1, "wait")) == "103 of start 1"


async def test_busy_in_mid_turn_is_a_bug_where_the_turn_cannot_be_undone(client: Client) -> None:
    inline, threaded = [await client.open(environment, seed=1) for environment in HERE]
    Crowded.taken = 1
    failure = await client.fails(client.step(inline, 0, "go", "wait"))
    assert (failure.reason, failure.metadata["session"]) == ("ENVIRONMENT_BUG", "lost")
    assert "raise it before any change" in failure.message
    Crowded.taken = 1
    expect_overload(await client.fails(client.step(threaded, 0, "go", "wait")))
    assert text_of(await client.step(threaded, 0, "go", "wait")) == "102 of start 1"


async def test_pictures_are_drawn_on_threads_in_unary_calls_and_in_columns(client: Client, serve: Serve) -> None:
    session = await client.open("crowded-v1", want=PICTURE)
    (turn,) = await Stream(client).ask((session, 0, "go"))
    assert picture_of(turn) == b"101"
    (copy,) = await client.fork(session, 1)
    other = await serve()
    (restored,) = (await other.ask("Restore", snapshot=await client.snapshot(session), want=PICTURE)).sessions
    for server, each in ((client, copy), (other, restored)):
        (turn,) = await Stream(server).ask((each, 1, "go"))
        assert picture_of(turn) == b"102"
    await client.ask("Render", session, mode="png")
    assert Crowded.drawn_on and all(name.startswith(THREAD_NAME) for name in Crowded.drawn_on)


@pytest.mark.parametrize("environment", [*HERE, "crowded_process-v1"])
async def test_the_seed_reaches_the_environment_and_its_copies(client: Client, environment: str) -> None:
    session, other = await client.group(environment, 2, seed=2**63)
    assert text_of(session) == text_of(other) == f"{2**63 * 100} of start {2**63}"
    reset = (await client.ask("Reset", session, epoch=1, seed=5)).session
    (copy,) = await client.fork(session, epoch=2, randomness=pb.FORK_RANDOMNESS_RESEED)
    (restored,) = (await client.ask("Restore", snapshot=await client.snapshot(copy))).sessions
    assert text_of(reset) == text_of(copy) == text_of(restored) == "500 of start 5"


def test_an_environment_that_is_busy_when_it_has_been_counted_is_wrong() -> None:
    """Even in a turn that played nothing: it counts against the limit of turns."""

    class BusyLooking(Crowded):
        def observe(self) -> str:
            raise Busy("nobody looks", retry_after=0.1)

    episode = LiveEpisode(BusyLooking(), Limits())
    episode.reset(0, 0)
    with pytest.raises(TooLate, match="nobody looks"):
        episode.turn(["no such action"], Want())
