"""Snapshot and Restore."""

from __future__ import annotations

import asyncio
import hashlib

from starpod.check.expectations import expect, expect_informed, expect_same
from starpod.check.handle import Handle
from starpod.check.probe import Probe, new_key
from starpod.check.requirement import must
from starpod.v1 import environment_pb2 as pb


@must(
    "N-01",
    "A snapshot names environment and version, and has the SHA-256 of both and the state, the epoch and the "
    "step_index.",
)
async def check_digest(probe: Probe) -> None:
    handle = await probe.seeded()
    await handle.step()
    reply = await _snapshot(probe, handle)
    snapshot = reply.snapshot
    identity = (snapshot.environment_id, snapshot.environment_version)
    expect(identity == (probe.spec.id, probe.spec.version), f"{(probe.spec.id, probe.spec.version)}", identity)
    fix = "hash environment_id, NUL, environment_version, NUL, state"
    expect(snapshot.digest == _digest(snapshot), f"digest {_digest(snapshot).hex()}", snapshot.digest.hex(), fix)
    position = (reply.epoch, reply.step_index)
    expect(position == (handle.epoch, handle.index), f"(epoch, step_index) = {(handle.epoch, handle.index)}", position)


@must(
    "N-02",
    "A restored session has epoch 1, the snapshot's step_index and observation, and continues as the original "
    "would, even if that is closed.",
)
async def check_restored_sessions(probe: Probe) -> None:
    handle, _ = await probe.play_first_turns()
    snapshot = (await _snapshot(probe, handle)).snapshot
    await probe.connection.call(pb.CloseRequest(session_ids=[handle.id]))
    copy = (await _restore(probe, snapshot))[0]
    await _expect_continued(probe, handle, copy)


@must("N-03", "Snapshot changes nothing.")
async def check_no_side_effects(probe: Probe) -> None:
    probe.target.script()
    handle = await probe.seeded()
    await probe.expect_script(
        handle, "the episode with a snapshot before every Step", before=lambda _: _snapshot(probe, handle)
    )


@must("N-04", "A snapshot whose digest does not fit its state is INVALID_ARGUMENT.")
async def check_tampered_snapshot(probe: Probe) -> None:
    handle = await probe.seeded()
    await handle.step()
    original = (await _snapshot(probe, handle)).snapshot
    cut, forged = pb.SessionSnapshot(), pb.SessionSnapshot()
    for copy in (cut, forged):
        copy.CopyFrom(original)
    cut.state = original.state[:-1]
    forged.digest = original.digest[:-1] + bytes([original.digest[-1] ^ 1])
    for what, snapshot in (("a snapshot without its last byte", cut), ("a digest with one bit flipped", forged)):
        await probe.expect_refusal(what, pb.RestoreRequest(snapshot=snapshot), "INVALID_ARGUMENT")
    await probe.expect_refusal("a Restore without a snapshot", pb.RestoreRequest(), "INVALID_ARGUMENT", "NOT_FOUND")


@must(
    "N-05",
    "A state that the environment did not write, under a digest that fits, is refused and harms nothing.",
)
async def check_foreign_state(probe: Probe) -> None:
    handle = await probe.seeded()
    await handle.step()
    original = (await _snapshot(probe, handle)).snapshot
    for state in (b"", b"not a state", original.state[: len(original.state) // 2]):
        snapshot = pb.SessionSnapshot(environment_id=probe.spec.id, environment_version=probe.spec.version, state=state)
        snapshot.digest = _digest(snapshot)
        request = pb.RestoreRequest(snapshot=snapshot)
        codes = ("INVALID_ARGUMENT", "FAILED_PRECONDITION")
        await probe.expect_refusal(f"a forged state of {len(state)} bytes", request, *codes)
    await handle.step()


@must(
    "N-06",
    "Restore of a version that no hosted version restores is FAILED_PRECONDITION, with snapshot_version and "
    "available in the metadata; of an unknown environment NOT_FOUND.",
)
async def check_incompatible_version(probe: Probe) -> None:
    snapshot = (await _snapshot(probe, await probe.seeded())).snapshot
    snapshot.environment_version = "999.0.0"
    snapshot.digest = _digest(snapshot)
    request = pb.RestoreRequest(snapshot=snapshot)
    refusal = await probe.expect_refusal("a snapshot of version 999.0.0", request, "FAILED_PRECONDITION")
    expect_informed(refusal, "INCOMPATIBLE_SNAPSHOT", "the refusal of a snapshot of version 999.0.0")
    metadata, version = refusal.metadata, probe.spec.version
    expect(metadata.get("snapshot_version") == "999.0.0", "metadata snapshot_version 999.0.0", metadata)
    expect(version in metadata.get("available", "").split(","), f"{version} in `available`", metadata)
    snapshot.environment_id = "no_such_environment-v1"
    snapshot.digest = _digest(snapshot)
    await probe.expect_refusal(
        "a snapshot of an unknown environment", pb.RestoreRequest(snapshot=snapshot), "NOT_FOUND"
    )


@must(
    "N-07",
    "Restore makes `count` copies (0 means 1) in member order; each continues as the original would, unaffected by "
    "the others.",
)
async def check_group(probe: Probe) -> None:
    handle, _ = await probe.play_first_turns()
    copies = await _restore(probe, (await _snapshot(probe, handle)).snapshot, count=3)
    expect(len({copy.id for copy in copies}) == 3, "three copies with different ids", len(copies))
    members = [copy.session.member for copy in copies]
    expect(members == [0, 1, 2], "members 0, 1, 2 in this order", members)
    for copy in copies:
        await _expect_continued(probe, handle, copy)


@must(
    "N-08",
    "Restore again with the same key returns the same sessions, also at the same time; another request under "
    "it is FAILED_PRECONDITION.",
)
async def check_repeated_key(probe: Probe) -> None:
    snapshot = (await _snapshot(probe, await probe.seeded())).snapshot
    request = pb.RestoreRequest(snapshot=snapshot, key=new_key())
    replies = list(await asyncio.gather(*(probe.create(request) for _ in range(4))))
    replies.append(await probe.create(request))
    ids = {reply.sessions[0].session_id for reply in replies}
    expect(len(ids) == 1, "one session from five Restores with one key", len(ids))
    request.count = 2
    await probe.expect_refusal("another Restore under the same key", request, "FAILED_PRECONDITION")
    open_request = probe.open_request(key=request.key)
    await probe.expect_refusal("an Open under a Restore's key", open_request, "FAILED_PRECONDITION")


@must("N-09", "Restore keeps the limits of the session and how much of them is used up.")
async def check_limits_kept(probe: Probe) -> None:
    limits = pb.LimitOverrides(max_turns=2, max_actions=0, max_actions_per_turn=5)
    handle = await probe.seeded(limits=limits)
    await handle.step()
    snapshot = (await _snapshot(probe, handle)).snapshot
    reply: pb.RestoreResponse = await probe.create(pb.RestoreRequest(snapshot=snapshot))
    maxima = (reply.limits.max_turns, reply.limits.max_actions_per_turn)
    expect(maxima == (2, 5), "max_turns 2 and max_actions_per_turn 5 in RestoreResponse.limits", maxima)
    transition = await Handle(probe.connection, reply.sessions[0]).step()
    fix = "put the counters into the state"
    expect(transition.truncated, "the end at the second turn of the episode", "no end", fix)


@must(
    "N-10",
    "A snapshot can be restored in another process that hosts the same version.",
)
async def check_other_process(probe: Probe) -> None:
    handle, _ = await probe.play_first_turns()
    connection = await probe.other_process()
    snapshot = (await _snapshot(probe, handle)).snapshot
    reply: pb.RestoreResponse = await probe.create(
        pb.RestoreRequest(snapshot=snapshot, want=probe.target.want), connection
    )
    await _expect_continued(probe, handle, Handle(connection, reply.sessions[0]))


@must("N-11", "Snapshot of an environment that does not declare it is UNIMPLEMENTED.", absent=True)
async def check_undeclared_capability(probe: Probe) -> None:
    handle = await probe.seeded()
    await probe.expect_refusal("Snapshot", pb.SnapshotRequest(session_id=handle.id), "UNIMPLEMENTED")


@must("N-12", "A count above max_group is INVALID_ARGUMENT and restores nothing.")
async def check_huge_group(probe: Probe) -> None:
    count = probe.target.beyond_max_group()
    snapshot = (await _snapshot(probe, await probe.seeded())).snapshot
    await probe.expect_refusal(
        f"a Restore of {count}", pb.RestoreRequest(snapshot=snapshot, count=count), "INVALID_ARGUMENT"
    )


async def _snapshot(probe: Probe, handle: Handle) -> pb.SnapshotResponse:
    reply: pb.SnapshotResponse = await probe.connection.call(pb.SnapshotRequest(session_id=handle.id))
    return reply


async def _restore(probe: Probe, snapshot: pb.SessionSnapshot, count: int = 0) -> list[Handle]:
    target = probe.target
    request = pb.RestoreRequest(snapshot=snapshot, count=count, lease_seconds=target.lease, want=target.want)
    reply: pb.RestoreResponse = await probe.create(request)
    expect(len(reply.sessions) == max(1, count), f"{max(1, count)} sessions", len(reply.sessions))
    return [Handle(probe.connection, session) for session in reply.sessions]


async def _expect_continued(probe: Probe, original: Handle, copy: Handle) -> None:
    position = (copy.epoch, copy.index)
    expect(position == (1, original.index), f"(epoch, step_index) = {(1, original.index)}", position)
    observation = probe.target.script().transitions[original.index - 1].observation
    expect_same(observation, copy.session.observation, "the present observation from Restore")
    fix = "put everything that the episode depends on into the state, including its random stream"
    await probe.expect_script(copy, "the rest of the episode after Restore", fix)


def _digest(snapshot: pb.SessionSnapshot) -> bytes:
    prefix = f"{snapshot.environment_id}\0{snapshot.environment_version}\0".encode()
    return hashlib.sha256(prefix + snapshot.state).digest()
