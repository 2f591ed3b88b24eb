"""Snapshots that were cut, changed, swapped or made up: refused, or restored to what they are; never run."""

from __future__ import annotations

import hashlib
import os
import pickle
import random
from pathlib import Path
from typing import Any

import grpc
import msgpack
import pytest

from starpod.env_server.episodes.state import decode, encode
from starpod.env_server.sessions.seal import SealKeyError, SnapshotSeal
from starpod.v1 import environment_pb2 as pb
from tests.env_server.conftest import Serve
from tests.env_server.conftest import serve as serve
from tests.hostile.conftest import MEBIBYTE, Target, status_class


def snapshot_of(target: Target, environment: str = "walk-v1", turns: tuple[str, ...] = ("Left",)) -> pb.SessionSnapshot:
    session = target.open(environment)
    for index, text in enumerate(turns):
        step = pb.StepRequest(session_id=session.session_id, epoch=1, step_index=index, actions=[pb.Action(text=text)])
        target.stub.Step(step, metadata=target.metadata)
    reply = target.stub.Snapshot(pb.SnapshotRequest(session_id=session.session_id), metadata=target.metadata)
    target.close(session.session_id)
    return reply.snapshot


def altered(snapshot: pb.SessionSnapshot, **fields: str | bytes) -> pb.SessionSnapshot:
    fake = pb.SessionSnapshot()
    fake.CopyFrom(snapshot)
    for name, value in fields.items():
        setattr(fake, name, value)
    return fake


def forged(snapshot: pb.SessionSnapshot, state: bytes | None = None, **fields: str) -> pb.SessionSnapshot:
    """Return the snapshot with another state or other names, and a matching digest."""
    fake = altered(snapshot, state=snapshot.state if state is None else state, **fields)
    named = f"{fake.environment_id}\0{fake.environment_version}\0".encode()
    return altered(fake, digest=hashlib.sha256(named + fake.state).digest())


def restore(target: Target, snapshot: pb.SessionSnapshot) -> pb.Session:
    reply = target.stub.Restore(pb.RestoreRequest(snapshot=snapshot), metadata=target.metadata)
    session = reply.sessions[0]
    target.close(session.session_id)
    return session


def refusal(target: Target, snapshot: pb.SessionSnapshot) -> str:
    return target.fails("Restore", pb.RestoreRequest(snapshot=snapshot))


def test_cut_or_changed_anywhere(target: Target) -> None:
    snapshot = snapshot_of(target)
    with target.unharmed():
        for end in range(0, len(snapshot.state), 97):
            assert refusal(target, altered(snapshot, state=snapshot.state[:end])) == "BAD_ARGUMENT"
            assert refusal(target, forged(snapshot, snapshot.state[:end])) == "BAD_ARGUMENT"
        flipped = bytearray(snapshot.state)
        flipped[len(flipped) // 2] ^= 1
        assert refusal(target, altered(snapshot, state=bytes(flipped))) == "BAD_ARGUMENT"


def test_swapped_between_environments_and_versions(target: Target) -> None:
    walk, lake = snapshot_of(target), snapshot_of(target, "frozen_lake-v1", ("Up",))
    with target.unharmed():
        swapped = altered(walk, environment_id=lake.environment_id)
        assert refusal(target, swapped) == "BAD_ARGUMENT"  # the digest binds the name
        assert refusal(target, forged(walk, environment_id="frozen_lake-v1")) in (
            "BAD_ARGUMENT",
            "INCOMPATIBLE_SNAPSHOT",
        )
        # Its options are none, so that only the look at the episode tells that it is no walk.
        assert refusal(target, forged(lake, environment_id="walk-v1")) == "BAD_ARGUMENT"
        assert refusal(target, forged(walk, environment_id="nothing-v1")) == "UNKNOWN_ENVIRONMENT"
        for version in ("9.0.0", "", "1.1", "9" * 5000 + ".0.0", "\x1b[2J"):
            assert refusal(target, forged(walk, environment_version=version)) in (
                "INCOMPATIBLE_SNAPSHOT",
                "BAD_ARGUMENT",
            ), version


HOSTED = ("walk-v1", "frozen_lake-v1", "sokoban-v1", "countdown-v1", "sudoku-v1", "bandit-v1")


def test_states_of_other_environments_under_a_digest_that_fits(target: Target) -> None:
    """Half of the whole ones used to be an error of the server's (INTERNAL), and a tenth of the mixed ones."""
    snapshots = [snapshot_of(target, environment, turns=()) for environment in HOSTED]
    episodes = [decode(snapshot.state) for snapshot in snapshots]
    values = [value for episode in episodes for value in (*episode.values(), *episode["state"].values())]
    rng = random.Random(0)
    forgeries = []
    for snapshot, own in zip(snapshots, episodes, strict=True):
        for other in episodes:
            # Whole, and with its own options, limits and seeds, so that only the environment's state is strange.
            forgeries += [
                (snapshot, episode)
                for episode in (other, {**own, "state": other["state"]}, {**other, "state": own["state"]})
            ]
    for _ in range(600):
        own, other = rng.randrange(len(episodes)), rng.choice(episodes)
        episode = {**episodes[own], "state": dict(rng.choice((episodes[own], other))["state"])}
        changed = rng.choice((episode, episode["state"]))
        for name in rng.sample(sorted(changed), k=min(len(changed), rng.randrange(1, 4))):
            changed[name] = rng.choice(values)
        forgeries.append((snapshots[own], episode))
    with target.unharmed():
        refused = sum(not is_restored(target, forged(snapshot, encode(episode))) for snapshot, episode in forgeries)
    assert refused > len(forgeries) / 3


def test_a_forged_size_of_a_grid_is_not_counted_up_to(target: Target) -> None:
    """Numbers beyond all bounds used to stop the server while it drew the grid."""
    snapshot = snapshot_of(target, "sudoku-v1", turns=())
    state = {**decode(snapshot.state)["state"], "size": 2**62}
    with target.unharmed():
        assert is_restored(target, forged(snapshot, changed_episode(snapshot, state=state)))


def is_restored(target: Target, snapshot: pb.SessionSnapshot) -> bool:
    """Return whether the snapshot is restored. Otherwise it must be refused as an invalid argument."""
    request = pb.RestoreRequest(snapshot=snapshot)
    try:
        reply = target.stub.Restore(request, metadata=target.metadata, timeout=60)
    except grpc.RpcError as error:
        assert status_class(error) == "BAD_ARGUMENT", (error.details(), decode(snapshot.state))
        return False
    target.close(*(session.session_id for session in reply.sessions))
    return True


def test_a_snapshot_restores_sessions_of_the_caller_only(target: Target) -> None:
    """A snapshot does not name its owner, and restores sessions of the caller only."""
    session = restore(target, snapshot_of(target))
    assert session.session_id not in (target.witness.session_id, "")


class Exploit:
    """Would write a file if anything unpickled it."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.system, (f"touch {self.path}",)


def changed_episode(snapshot: pb.SessionSnapshot, **changes: object) -> bytes:
    return encode({**decode(snapshot.state), **changes})


def nested(levels: int) -> bytes:
    state = b"\x90"
    for _ in range(levels):
        state = b"\x91\xc9" + len(state).to_bytes(4, "big") + b"\x01" + state
    return state


def test_a_state_of_code_is_not_run(target: Target, tmp_path: Path) -> None:
    snapshot, trace = snapshot_of(target), tmp_path / "was-here"
    code = pickle.dumps(Exploit(trace))
    with target.unharmed():
        for state in (code, msgpack.packb(code), msgpack.packb(msgpack.ExtType(9, code)), encode({"state": code})):
            assert refusal(target, forged(snapshot, state)) == "BAD_ARGUMENT"
    assert not trace.exists()


def test_states_made_to_hurt_the_decoder(target: Target) -> None:
    """Nesting used to overflow the C stack: 1.4 kB killed the server."""
    snapshot = snapshot_of(target)
    bombs = [
        nested(200),
        nested(3000),
        b"\x91" * 100_000 + b"\xc0",
        b"\xdd\xff\xff\xff\xff",
        b"\xdf\xff\xff\xff\xff",
        b"\xc6\xff\xff\xff\xff",
        b"\xc9\xff\xff\xff\xff\x05",
        msgpack.packb(msgpack.ExtType(4, b"9" * 100_000)),
        msgpack.packb(msgpack.ExtType(5, msgpack.packb(["V8", [2**62], b""]))),
        msgpack.packb(msgpack.ExtType(6, msgpack.packb([3, b"\0" * 4 * 10**5, None]))),
        b"",
        b"\xc1",
    ]
    with target.unharmed():
        for bomb in bombs:
            assert refusal(target, forged(snapshot, bomb)) == "BAD_ARGUMENT"


def test_a_state_as_large_as_can_be_sent(target: Target) -> None:
    """Nearly 4 MiB of empty containers are some hundred MiB while they are looked at, and nothing afterwards."""
    snapshot = snapshot_of(target)
    bomb = b"\xdd" + (3_900_000).to_bytes(4, "big") + b"\x80" * 3_900_000
    with target.unharmed(memory=512 * MEBIBYTE):
        assert refusal(target, forged(snapshot, bomb)) == "BAD_ARGUMENT"


@pytest.mark.parametrize(
    "change",
    [
        {"turns": 2**32 - 1},
        {"turns": -1},
        {"turns": 1.5},
        {"turns": True},
        {"actions": "many"},
        {"seed": 2**64},
        {"dynamics_seed": -1},
        {"end_reason": 99},
        {"limits": [1]},
        {"limits": [2**32, 0, 0]},
        {"limits": {}},
        {"options": {"start": 10**9}},
        {"options": {"unknown": 1}},
        {"state": 5},
        {"state": {"step": 1}},
        {"state": {"observe": "not a method"}},
        {"state": {"options": None}},
        {"state": {"spec": None}},
        {"state": {1: 2}},
    ],
    ids=str,
)
def test_episodes_that_no_server_wrote(target: Target, change: dict[str, Any]) -> None:
    snapshot = snapshot_of(target)
    with target.unharmed():
        assert refusal(target, forged(snapshot, changed_episode(snapshot, **change))) == "BAD_ARGUMENT"


def test_an_episode_that_is_no_episode_of_its_environment_harms_its_holder_alone(target: Target) -> None:
    """The failure is reported as a bug of the environment."""
    snapshot = snapshot_of(target)
    with target.unharmed():
        broken = changed_episode(snapshot, state={"place": "nowhere", "_dynamics": "none"})
        request = pb.RestoreRequest(snapshot=forged(snapshot, broken))
        try:
            session = target.stub.Restore(request, metadata=target.metadata).sessions[0]
        except Exception:
            assert target.fails("Restore", request) == "BAD_ARGUMENT"
        else:
            step = pb.StepRequest(
                session_id=session.session_id, epoch=1, step_index=1, actions=[pb.Action(text="Left")]
            )
            assert target.fails("Step", step) == "ENVIRONMENT_BUG"


def test_a_process_reads_its_own_snapshot(target: Target) -> None:
    """The server's own process does not load the state of a class that runs in another process."""
    snapshot = snapshot_of(target, "villain-v1", ("status",))
    with target.unharmed():
        restored = restore(target, snapshot)
        assert (restored.step_index, restored.seed) == (1, 1)
        assert restored.observation.parts[0].text == "1 crimes"
        assert refusal(target, forged(snapshot, changed_episode(snapshot, state={"step": 1}))) == "BAD_ARGUMENT"
        assert refusal(target, forged(snapshot, nested(3000))) == "BAD_ARGUMENT"
        is_restored(target, forged(snapshot, snapshot_of(target, "frozen_lake-v1", turns=()).state))


# --- sealed ------------------------------------------------------------------------------------------------------

KEYS = ("first key 0123456789012345678901234567", "second key 012345678901234567890123456")


async def test_a_sealed_snapshot_is_restored_by_any_replica_and_made_by_no_tenant(serve: Serve, tmp_path: Path) -> None:
    """The keys are being rotated: the second replica seals with a key that the first also opens."""
    (tmp_path / "one").write_text(f"# in use\n{KEYS[0]}\n{KEYS[1]}\n")
    (tmp_path / "two").write_text(f"{KEYS[1]}\n{KEYS[0]}\n")
    one, two = [await serve(snapshot_key_file=tmp_path / name) for name in ("one", "two")]
    first, second = [await client.snapshot(await client.open("walk-v1")) for client in (one, two)]
    for client, snapshot in ((one, first), (two, first), (one, second)):
        assert len((await client.ask("Restore", snapshot=snapshot)).sessions) == 1
    unsealed = await (plain := await serve()).snapshot(await plain.open("walk-v1"))
    flipped = [bytearray(first.state) for _ in range(5)]
    for state, place in zip(flipped, (0, 5, 20, 60, -1), strict=True):
        state[place] ^= 1
    for snapshot in (
        unsealed,
        forged(first, environment_version="1.0.0"),
        forged(first, first.state[:30]),
        *(forged(first, bytes(state)) for state in flipped),
    ):
        assert (await one.fails(one.ask("Restore", snapshot=snapshot))).reason == "BAD_ARGUMENT"


def test_seals(tmp_path: Path) -> None:
    for name, lines in {"old": KEYS[:1], "both": KEYS[::-1], "new": KEYS[1:]}.items():
        (tmp_path / name).write_text("\n".join(lines))
    old, both, new = (SnapshotSeal(tmp_path / name) for name in ("old", "both", "new"))
    state = encode({"a": 1})
    sealed = old.seal("walk-v1", "1.0.0", state)
    assert both.unseal("walk-v1", "1.0.0", sealed) == state
    assert old.unseal("walk-v1", "1.0.0", sealed) == state
    assert (
        SnapshotSeal().unseal("walk-v1", "1.0.0", sealed) == SnapshotSeal().unseal("walk-v1", "1.0.0", state) == state
    )
    for seal, id, version, data in (
        (new, "walk-v1", "1.0.0", sealed),
        (old, "walk-v1", "1.0.0", both.seal("walk-v1", "1.0.0", state)),
        (old, "walk-v2", "1.0.0", sealed),
        (old, "walk-v1", "1.0.1", sealed),
        (old, "walk-v1", "1.0.0", state),
        (old, "walk-v1", "1.0.0", sealed[:-1]),
        (old, "walk-v1", "1.0.0", b""),
    ):
        with pytest.raises(Exception, match="was not written by a server"):
            seal.unseal(id, version, data)


@pytest.mark.parametrize(
    ("content", "problem"), [("", "must hold a key"), ("short", "at least 32"), (None, "cannot read")]
)
def test_key_files_that_cannot_be_used(tmp_path: Path, content: str | None, problem: str) -> None:
    if content is not None:
        (tmp_path / "keys").write_text(content)
    with pytest.raises(SealKeyError, match=problem):
        SnapshotSeal(tmp_path / "keys")
