"""The blocking facade, from one thread and from many."""

import asyncio
import gc
import inspect
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc
import pytest

from starpod.client import (
    EpisodeOver,
    Fleet,
    Limits,
    Session,
    SyncFleet,
    SyncSession,
    Transition,
    Want,
)
from starpod.v1 import environment_pb2 as pb
from starpod.v1.environment_pb2_grpc import EnvironmentServiceStub
from tests.support import ServerProcess

LIMITS = Limits(max_turns=0, max_actions=0)


@pytest.fixture
def fleet(server: ServerProcess) -> Iterator[SyncFleet]:
    with SyncFleet(server.address) as fleet:
        yield fleet


def test_the_calls_of_a_session(fleet: SyncFleet) -> None:
    assert "frozen_lake-v1" in {spec.id for spec in fleet.describe()}
    (session,) = fleet.open("frozen_lake-v1", seed=1, limits=LIMITS, want=Want(state_key=True))
    first = session.observation.text
    session.step(["Left", "Up"])
    (copy,) = session.fork()
    restored = fleet.restore(session.snapshot())
    moves = [each.step("Right").observation.text for each in (session, copy, restored)]
    assert len(set(moves)) == 1
    assert session.render("png").startswith(b"\x89PNG")  # type: ignore[arg-type]
    assert session.reset(seed=1).text == first
    assert session.seed == 1 and session.id != copy.id != restored.id
    session.close()
    with pytest.raises(RuntimeError, match="closed"):
        session.step("Left")


@pytest.mark.parametrize(
    "making", ["SyncFleet(address).open('bandit-v1', seed=1)[0]", "StarpodEnv(address, 'bandit-v1')"]
)
def test_a_program_that_ends_without_closing_its_fleet_leaves_no_session(server: ServerProcess, making: str) -> None:
    program = f"""
import sys
from starpod.client import SyncFleet
from starpod.client.gymnasium import StarpodEnv
address = sys.argv[1]
made = {making}
print(getattr(made, "_session", made).id)
"""
    command = [sys.executable, "-c", program, server.address]
    session_id = subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()
    assert_closed(server, session_id)


def assert_closed(server: ServerProcess, session_id: str) -> None:
    with grpc.insecure_channel(server.address) as channel, pytest.raises(grpc.RpcError) as refusal:
        EnvironmentServiceStub(channel).Render(pb.RenderRequest(session_id=session_id))
    assert refusal.value.code() is grpc.StatusCode.NOT_FOUND


def test_a_fleet_that_is_dropped_is_closed_after_its_last_session(server: ServerProcess) -> None:
    fleet = SyncFleet(server.address)
    (session,) = fleet.open("bandit-v1", seed=1)
    thread, session_id = fleet._thread, session.id
    del fleet
    gc.collect()
    session.step("Phoenix")
    del session
    gc.collect()
    thread.join(60)
    assert not thread.is_alive()
    assert_closed(server, session_id)


def test_many_at_once(fleet: SyncFleet) -> None:
    sessions = fleet.open("frozen_lake-v1", seed=1, count=8, limits=LIMITS)
    transitions = fleet.step_many(sessions, ["Left"] * 8)
    assert len(transitions) == 8
    observations = fleet.reset_many(sessions, list(range(8)))
    assert [session.seed for session in sessions] == list(range(8))
    assert [observation.text for observation in observations] == [session.observation.text for session in sessions]
    (ended,) = fleet.open("bandit-v1", seed=1, limits=Limits(max_turns=1))
    ended.step("Phoenix")
    results = fleet.step_many([sessions[0], ended], ["Left", "Phoenix"], return_exceptions=True)
    assert [type(result) for result in results] == [Transition, EpisodeOver]
    assert len(fleet.reset_many(sessions)) == 8
    fleet.close_sessions(sessions)


@pytest.mark.parametrize(("blocking", "waiting"), [(SyncFleet, Fleet), (SyncSession, Session)])
def test_calls_take_what_their_originals_take(blocking: type, waiting: type) -> None:
    def taken(kind: type, name: str) -> list[tuple[Any, ...]]:
        parameters = inspect.signature(getattr(kind, name)).parameters.values()
        return [(each.name, each.kind, each.default) for each in parameters]

    calls = [name for name, value in vars(blocking).items() if inspect.isfunction(value) and hasattr(waiting, name)]
    names = [name for name in calls if not name.startswith("_")]
    assert len(names) >= 6
    for name in names:
        assert taken(blocking, name) == taken(waiting, name), name


def test_the_facts_of_a_fleet(fleet: SyncFleet, server: ServerProcess) -> None:
    """A property of Fleet is one of SyncFleet."""
    facts = [name for name, value in vars(Fleet).items() if isinstance(value, property)]
    assert {"replicas", "sessions", "recoveries"} <= set(facts)
    (session,) = fleet.open("frozen_lake-v1", seed=1)
    assert all(hasattr(fleet, name) for name in facts)
    assert [replica.address for replica in fleet.replicas] == [server.address]
    assert ([each.id for each in fleet.sessions], fleet.recoveries) == ([session.id], 0)


def test_many_threads(fleet: SyncFleet) -> None:
    def play(seed: int) -> list[str]:
        (session,) = fleet.open("sokoban-v1", seed=seed, limits=LIMITS)
        texts = []
        for action in ["Up", "Left", "Down", "Right"] * 5:
            if not session.done:
                texts.append(session.step(action).observation.text)
        return texts

    with ThreadPoolExecutor(16) as pool:
        together = list(pool.map(play, range(16)))
    assert together == [play(seed) for seed in range(16)]


def test_use_after_the_end_and_inside_the_loop(server: ServerProcess) -> None:
    with SyncFleet(server.address) as fleet:

        async def inside() -> None:
            fleet.describe()

        with pytest.raises(RuntimeError, match="use Fleet there"):
            fleet.run(inside())
    fleet.close()
    with pytest.raises(RuntimeError, match="closed"):
        fleet.describe()


async def test_a_blocking_fleet_beside_a_running_loop(server: ServerProcess) -> None:
    def use() -> int:
        with SyncFleet(server.address) as fleet:
            return len(fleet.describe())

    assert await asyncio.to_thread(use) == use()
