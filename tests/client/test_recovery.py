"""Recovered sessions have the same turns, options, limits and random state as before."""

import asyncio
import random
from collections.abc import Callable
from typing import Any

import grpc
import pytest

from starpod.client import JSON, BadArgument, Fleet, Limits, ReplayDiverged, Session, SessionLost, Unreachable, Want
from starpod.client.pool import closing
from starpod.v1 import environment_pb2 as pb
from starpod.v1.environment_pb2_grpc import EnvironmentServiceStub
from tests.client.fake_server import FakeServer, overloaded, session_lost
from tests.client.test_fleet import seen, undisturbed
from tests.support import ServerProcess
from tests.tools.check.refused import Refused
from tests.waiting import eventually

TURNS = ["left", "right", "left", "right"]


# --- resets that fail ------------------------------------------------------------------------------------------------


async def test_a_refused_reset_of_a_lost_session_leaves_the_episode_where_it_was(
    fake: FakeServer, session: Session
) -> None:
    played = [seen(await session.step(turn)) for turn in TURNS[:2]]
    fake.sessions.clear()
    with pytest.raises(BadArgument, match="did you mean length"):
        await session.reset(options={"lenght": 9})
    assert session.step_index == 2
    played.append(seen(await session.step(TURNS[2])))
    fake.sessions.clear()
    played.append(seen(await session.step(TURNS[3])))
    assert played == await undisturbed(3, TURNS)


async def test_so_does_one_that_was_refused_on_another_server() -> None:
    async with (
        FakeServer() as one,
        FakeServer() as two,
        Fleet([one.address, two.address], grace=0.05, health_seconds=0.05) as fleet,
    ):
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
        await eventually(lambda: len(two.sessions) <= 1)  # the one in which the reset was tried is closed


async def test_what_could_not_be_closed_is_closed_later() -> None:
    def before(kind: str, request: Any) -> None:
        if kind == "close" and server.calls["close"] <= 2:
            raise Refused("ENVIRONMENT_BUG", "it would not be closed")

    async with FakeServer() as server, Fleet(server.address, health_seconds=0.05) as fleet:
        server.before = before
        (session,) = await fleet.open("walk-v1", seed=3)
        await session.step("left")
        server.sessions.clear()
        server.noise = 1  # so that what is rebuilt comes out differently, and is given up
        with pytest.raises(ReplayDiverged):
            await session.step("right")
        assert len(server.sessions) == 1
        await eventually(lambda: not server.sessions)


# --- replays that come out differently ------------------------------------------------------------------------------


def tensor(dtype: str, *shape: int) -> pb.Part:
    return pb.Part(tensor=pb.Tensor(dtype=dtype, shape=shape, data=bytes(8)))


def end(transition: pb.Transition) -> None:
    transition.terminated, transition.end_reason, transition.success = True, pb.END_REASON_TERMINAL, True


ALTERED: dict[str, Callable[[pb.Transition], object]] = {
    "observation": lambda t: t.observation.parts[0].CopyFrom(pb.Part(text="elsewhere")),
    "observation (a picture)": lambda t: t.observation.parts.add(image=pb.Image(mime="image/png", data=b"x")),
    "observation (another part)": lambda t: t.observation.parts.append(tensor("float32", 2)),
    "reward": lambda t: setattr(t, "reward", t.reward + 1),
    "outcomes": lambda t: setattr(t.outcomes[0], "valid", not t.outcomes[0].valid),
    "outcomes (effective)": lambda t: setattr(t.outcomes[0], "effective", not t.outcomes[0].effective),
    "rewards of the sub-actions": lambda t: setattr(t.outcomes[0], "reward", t.outcomes[0].reward + 1),
    "reward parts": lambda t: t.reward_parts.update(goal=t.reward),
    "criteria": lambda t: t.criteria.update(tidy=True),
    "valid actions": lambda t: t.observation.valid_actions.add(text="left"),
    "expert action": lambda t: t.observation.expert_action.CopyFrom(pb.Action(text="left")),
    "score": lambda t: setattr(t.observation, "score", 0.0),
    "agent": lambda t: setattr(t.observation, "agent_id", "b"),
    "end of the episode": end,
    "end of the episode (success)": lambda t: setattr(t, "success", False),
}


@pytest.mark.parametrize("columns", [True, False])
@pytest.mark.parametrize("field", ALTERED)
async def test_a_replay_that_differs_in_any_field_has_diverged(field: str, columns: bool) -> None:
    async with FakeServer(columns=columns) as server, Fleet(server.address) as fleet:
        (session,) = await fleet.open("walk-v1", seed=3)
        await session.step("left")
        await session.step(["right", "left"])
        server.alter = ALTERED[field]
        server.sessions.clear()
        with pytest.raises(ReplayDiverged, match="another observation, reward, outcome or end") as diverged:
            await session.step("left")
        assert diverged.value.step == 1
        await eventually(lambda: not server.sessions)


@pytest.mark.parametrize(("before", "after"), [(("float32", 2), ("int32", 2)), (("int32", 2), ("int32", 1, 2))])
async def test_a_tensor_of_another_kind_is_another_observation(
    fake: FakeServer, session: Session, before: Any, after: Any
) -> None:
    fake.answers_in_columns = False
    fake.alter = lambda t: t.observation.parts.append(tensor(*before))
    await session.step(JSON(1))
    fake.alter = lambda t: t.observation.parts.append(tensor(*after))
    fake.sessions.clear()
    with pytest.raises(ReplayDiverged, match="another observation"):
        await session.step("left")


async def test_other_instructions_are_another_episode(fake: FakeServer, session: Session) -> None:
    await session.step("left")
    fake.instructions = "Run."
    fake.sessions.clear()
    with pytest.raises(ReplayDiverged, match="another observation") as diverged:
        await session.step("left")
    assert diverged.value.step == 0


async def test_an_episode_that_ends_early_in_the_replay_has_diverged(fake: FakeServer, session: Session) -> None:
    """This includes a reply that does not report the end, after which the next step is refused."""

    def before(kind: str, request: Any) -> None:
        if kind == "step" and request is not None and request.step_index == 1:
            raise Refused("EPISODE_OVER", "the episode is over")

    for _ in range(2):
        await session.step("left")
    fake.before = before
    fake.sessions.clear()
    with pytest.raises(ReplayDiverged, match="the step was refused: the episode is over") as diverged:
        await session.step("left")
    assert diverged.value.step == 2


def everything(transition: pb.Transition) -> None:
    for name, alter in ALTERED.items():
        if not name.startswith("end"):
            alter(transition)
    transition.info.update({"draw": random.random()})


async def test_a_replay_that_shows_all_of_it_again_is_the_same_whatever_its_info() -> None:
    async with FakeServer(columns=False) as server, Fleet(server.address) as fleet:
        server.alter = everything
        (session,) = await fleet.open("walk-v1", seed=3)
        for turn in TURNS[:3]:
            await session.step(turn)
        server.sessions.clear()
        assert (await session.step(TURNS[3])).info
        assert session.recoveries == 1


async def test_what_one_step_alone_wanted_is_wanted_in_the_replay(server: ServerProcess) -> None:
    async with Fleet(server.address) as fleet:
        (session,) = await fleet.open("frozen_lake-v1", seed=3, limits=Limits(max_turns=0, max_actions=0))
        pictured = await session.step("Left", want=Want(image=True, valid_actions=True))
        assert pictured.observation.image is not None
        await session.step("Up")
        await end_session(server.address, session.id)
        lost = session.id
        await session.step("Left")
        assert session.recoveries == 1 and session.id != lost


async def end_session(address: str, session_id: str) -> None:
    async with grpc.aio.insecure_channel(address) as channel:
        await EnvironmentServiceStub(channel).Close(pb.CloseRequest(session_ids=[session_id]))


@pytest.mark.parametrize(("call", "opens"), [("open", 3), ("step", 2)])  # the step has lost its session once before
async def test_a_start_that_always_loses_its_session_is_not_tried_for_ever(
    fake: FakeServer, fleet: Fleet, session: Session, call: str, opens: int
) -> None:
    def before(kind: str, request: Any) -> None:
        if kind == "open":
            raise session_lost()

    fake.before = before
    fake.sessions.clear()
    with pytest.raises(SessionLost):
        await (fleet.open("walk-v1", seed=4) if call == "open" else session.step("left"))
    assert fake.calls["open"] == 1 + opens


# --- sessions that are closed while their server is away --------------------------------------------------------------


@pytest.mark.parametrize("lost", [True, False])
async def test_sessions_closed_while_their_server_is_away_are_closed_when_it_is_back(
    lost: bool, caplog: pytest.LogCaptureFixture
) -> None:
    def messages() -> list[str]:
        return [record.getMessage() for record in caplog.records if record.name == "starpod.client"]

    async with FakeServer() as server, Fleet(server.address, health_seconds=0.05, grace=0.0 if lost else 60) as fleet:
        sessions = await fleet.open("walk-v1", seed=3, count=40)
        await server.stop()
        await eventually(lambda: not fleet.replicas[0].ready and fleet.replicas[0].lost is lost)
        await fleet.close_sessions(sessions[:20])
        await server.start(int(server.address.rpartition(":")[2]))
        await eventually(lambda: len(server.sessions) == 20)
        await fleet.step_many(sessions[20:], ["left"] * 20)
        await eventually(lambda: len(server.sessions) == 20 and not fleet.replicas[0].closer.unclosed)
        # The log names a server whose sessions are recovered, once, and tells its return.
        told = ["does not answer: recovering its 40 sessions", "is back"] if lost else []
        assert messages() == [f"the server at {server.address} {text}" for text in told]
        await server.restart()
        await fleet.step_many(sessions[20:], ["left"] * 20)
        assert [text.rpartition(" its ")[2] for text in messages()[len(told) :]] == [
            "20 sessions",
            f"the server at {server.address} is back",
        ]


async def test_sessions_waiting_to_be_closed_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(closing, "MOST_UNCLOSED", 8)
    async with FakeServer() as server, Fleet(server.address) as fleet:
        sessions = await fleet.open("walk-v1", seed=3, count=20)
        await server.stop()
        await eventually(lambda: not fleet.replicas[0].ready)
        await asyncio.gather(*(session.close() for session in sessions))
        assert len(fleet.replicas[0].closer.unclosed) == 8


# --- full servers ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("deterministic", [True, False])
async def test_what_a_full_server_does_not_take_back_comes_back_on_another(deterministic: bool) -> None:
    refused: list[str] = []

    def before(kind: str, request: Any) -> None:
        if kind in ("open", "restore"):
            refused.append(kind)
            raise overloaded()

    async with (
        FakeServer(deterministic=deterministic) as one,
        FakeServer(deterministic=deterministic) as two,
        Fleet([one.address, two.address], patience=60) as fleet,
    ):
        (session,) = await fleet.open("walk-v1", seed=3)
        others = await fleet.open("walk-v1", seed=3, count=4)
        home, other = (one, two) if session.address == one.address else (two, one)
        await session.step("left")
        home.before = before
        home.sessions.clear()
        await session.step("left")
        assert {session.address, *(each.address for each in others)} == {other.address}
        assert len(refused) == 1  # the other one is asked at once, not when the full one may have room again


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
        await eventually(lambda: server.calls["snapshot"] >= 2)
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
            raise Refused("TOO_LARGE", "too large a snapshot")

    async with FakeServer(deterministic=False) as server, Fleet(server.address) as fleet:
        server.before = before
        (session,) = await fleet.open("walk-v1", seed=3)
        await session.reset(seed=4)
        await session.step("left")
        assert server.calls["snapshot"] == snapshots + 1
        assert "will not be recovered: too large a snapshot" in caplog.text
        server.sessions.clear()
        with pytest.raises(SessionLost, match="no snapshot to continue from"):
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
