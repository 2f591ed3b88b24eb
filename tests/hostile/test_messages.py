"""Messages as large as they may be, and larger, at a server process with the default limits."""

from __future__ import annotations

import asyncio

import grpc
import pytest

from starpod.client import Fleet, TooLarge
from starpod.v1 import environment_pb2 as pb
from tests.hostile.attacks import Attacker
from tests.hostile.conftest import MEBIBYTE, VILLAIN
from tests.support import ServerProcess

DEFAULT = 20 * MEBIBYTE


def test_a_fleet_says_what_to_raise_and_sends_nothing(attacked: ServerProcess) -> None:
    async def step() -> None:
        async with Fleet(attacked.address, token=VILLAIN) as fleet:
            (session,) = await fleet.open("anything-v1")
            with pytest.raises(TooLarge, match=rf"takes {DEFAULT} in one message.*--max-message-bytes"):
                await session.step("x" * DEFAULT)
            await session.step("x")

    asyncio.run(step())


def test_batches_are_split(attacked: ServerProcess) -> None:
    async def step() -> None:
        async with Fleet(attacked.address, token=VILLAIN) as fleet:
            sessions = await fleet.open("anything-v1", count=1024)
            texts = [f"{place:05}" * 10_000 for place in range(1024)]  # 50 MiB in all
            transitions = await fleet.step_many(sessions, texts)
            assert [each.observation.text[-5:] for each in transitions] == [each[-5:] for each in texts]

    asyncio.run(step())


def test_what_is_larger_is_refused_before_it_is_read(attacked: ServerProcess) -> None:
    attacker = Attacker(attacked.address)
    step = attacker.step(text="x" * DEFAULT)
    with pytest.raises(grpc.RpcError) as caught:
        attacker.stub.Step(step, metadata=attacker.metadata)
    assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert f"larger than max ({step.ByteSize()} vs. {DEFAULT})" in caught.value.details()


def test_snapshots_as_large_as_they_may_be_are_restored(attacked: ServerProcess) -> None:
    client = Attacker(attacked.address)
    request = pb.SnapshotRequest(session_id=client.open("heavy-v1"))
    taken = client.stub.Snapshot(request, metadata=client.metadata)
    assert len(taken.snapshot.state) > 15 * MEBIBYTE
    restored = client.stub.Restore(pb.RestoreRequest(snapshot=taken.snapshot), metadata=client.metadata)
    assert restored.sessions[0].observation.parts[0].text == str(15 * MEBIBYTE)
