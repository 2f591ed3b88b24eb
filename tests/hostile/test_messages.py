"""Messages as large as they may be, and larger, at a server process with the default limits."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import grpc
import pytest

from starpod.client import Fleet, TooLarge
from starpod.v1 import environment_pb2 as pb
from tests.hostile.attacks import Attacker, attacked_server
from tests.hostile.conftest import MEBIBYTE, VILLAIN
from tests.support import ServerProcess

DEFAULT = 20 * MEBIBYTE


HEAVY = f"""
from starpod.env_server import Environment, EnvironmentSpec, Outcome
class Heavy(Environment):
    spec = EnvironmentSpec(id="heavy-v1", version="1.0.0", title="A large state", actions=("stay",))
    def reset(self, rng): self.ballast = bytes({15 * MEBIBYTE})
    def step(self, action): return Outcome()
    def render(self, mode="text"): return str(len(self.ballast))
"""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    module = tmp_path_factory.mktemp("environments") / "heavy.py"
    module.write_text(HEAVY)
    with attacked_server("--environment-module", str(module)) as server:
        yield server


def test_a_fleet_says_what_to_raise_and_sends_nothing(server: ServerProcess) -> None:
    async def step() -> None:
        async with Fleet(server.address, token=VILLAIN) as fleet:
            (session,) = await fleet.open("anything-v1")
            with pytest.raises(TooLarge, match=rf"takes {DEFAULT} in one message.*--max-message-bytes"):
                await session.step("x" * DEFAULT)
            await session.step("x")

    asyncio.run(step())


def test_batches_are_split(server: ServerProcess) -> None:
    async def step() -> None:
        async with Fleet(server.address, token=VILLAIN) as fleet:
            sessions = await fleet.open("anything-v1", count=1024)
            texts = [f"{place:05}" * 10_000 for place in range(1024)]  # 50 MiB in all
            transitions = await fleet.step_many(sessions, texts)
            assert [each.observation.text[-5:] for each in transitions] == [each[-5:] for each in texts]

    asyncio.run(step())


def test_what_is_larger_is_refused_before_it_is_read(server: ServerProcess) -> None:
    attacker = Attacker(server.address)
    session = attacker.open()
    step = pb.StepRequest(session_id=session.session_id, epoch=1, actions=[pb.Action(text="x" * DEFAULT)])
    with pytest.raises(grpc.RpcError) as caught:
        attacker.stub.Step(step, metadata=attacker.metadata)
    assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert f"larger than max ({step.ByteSize()} vs. {DEFAULT})" in caught.value.details()


def test_snapshots_as_large_as_they_may_be_are_restored(server: ServerProcess) -> None:
    client = Attacker(server.address)
    session = client.open("heavy-v1")
    taken = client.stub.Snapshot(pb.SnapshotRequest(session_id=session.session_id), metadata=client.metadata)
    assert len(taken.snapshot.state) > 15 * MEBIBYTE
    restored = client.stub.Restore(pb.RestoreRequest(snapshot=taken.snapshot), metadata=client.metadata)
    assert restored.sessions[0].observation.parts[0].text == str(15 * MEBIBYTE)
