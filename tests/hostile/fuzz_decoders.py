"""Feeds the decoders bytes that coverage leads to new places. Needs atheris.

    python -m tests.hostile.fuzz_decoders [-max_total_time=60] [-runs=N] [CORPUS_FOLDER]

What reads bytes of others: requests and batches from clients, snapshots, replies of environment processes. Each input
goes to the decoder that its first byte picks. A decoder may refuse with the errors of its contract and nothing else;
anything more ends the run with the input that caused it (libFuzzer's usual files, in the working folder).
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable

import atheris

with atheris.instrument_imports(include=["starpod.env_server", "msgpack"]):
    from google.protobuf.message import DecodeError

    from starpod.env_server.episodes import convert, state
    from starpod.env_server.episodes.errors import CallError
    from starpod.env_server.episodes.live_episode import LiveEpisode, SavedEpisode
    from starpod.env_server.episodes.state import StateError
    from starpod.env_server.processes.wire import BadProcessReply, unpack
    from starpod.env_server.registry import parse_version_range
    from starpod.env_server.sessions.columns import StepRows
    from starpod.env_server.sessions.requests import parse_options
    from starpod.v1 import environment_pb2 as pb
    from tests.env_server.troublesome import Walk


def read_step(data: bytes) -> None:
    """A turn whose actions are read, if they can be, and written again."""
    request = pb.StepRequest.FromString(data)
    actions = convert.actions_from(request.actions)
    again = [convert.action_to(action) for action in actions]
    assert [convert.action_to(action) for action in convert.actions_from(again)] == again


def read_opening(data: bytes) -> None:
    request = pb.OpenRequest.FromString(data)
    parse_options(Walk, convert.options_from(request.options))
    with contextlib.suppress(ValueError):
        parse_version_range(request.version)


def read_batch(data: bytes) -> None:
    """Columns are refused, or have as many rows in each as there are ids."""
    rows = StepRows(pb.StreamRequest.FromString(data).steps)
    for column in (rows.session_ids, rows.epochs, rows.indices, rows.actions):
        assert len(column) == len(rows)


def read_state(data: bytes) -> None:
    """What is read can be written, and is then the same."""
    value = state.decode(data)
    with contextlib.suppress(StateError):  # odd keys and depths are read that are not written
        written = state.encode(value)
        assert state.encode(state.decode(written)) == written


def read_snapshot(data: bytes) -> None:
    saved = SavedEpisode.read(Walk, data)
    assert 0 <= saved.turns < 2**31
    LiveEpisode.load(Walk, data)


def read_reply(data: bytes) -> None:
    kind, value, _ = unpack(data)
    assert isinstance(kind, str)
    assert isinstance(value, str | bytes | None)


DECODERS: tuple[Callable[[bytes], None], ...] = (
    *(read_step, read_opening, read_batch, read_state, read_snapshot, read_reply),
)


def test_one_input(data: bytes) -> None:
    if data:
        with contextlib.suppress(DecodeError, CallError, StateError, BadProcessReply):
            DECODERS[data[0] % len(DECODERS)](data[1:])


def seeds() -> list[bytes]:
    """One good input for each decoder."""
    step = pb.StepRequest(session_id="s", epoch=1, actions=[pb.Action(text="x"), pb.Action(json='{"a": [1, null]}')])
    step.actions.add().tensor.CopyFrom(pb.Tensor(dtype="int8", shape=[2], data=b"\1\2"))
    opening = pb.OpenRequest(environment_id="walk-v1", version=">=1.0.0,<2.0.0")
    opening.options["start"] = 1
    columns = pb.StepColumns(
        call_ids=[1, 2], session_ids=["a", "b"], epochs=[1, 1], step_indices=[0, 0], action_counts=[1, 0], actions=["x"]
    )
    value = {"a": (1, {2}, frozenset([3]), 2**70, 1j), (1, 2): [None, 1.5, b"x"]}
    episode = {"options": {}, "limits": [1, 2, 3], "seed": 1, "dynamics_seed": 2, "turns": 0, "actions": 0}
    inputs = (
        step.SerializeToString(),
        opening.SerializeToString(),
        pb.StreamRequest(steps=columns).SerializeToString(),
    )
    inputs += (state.encode(value), state.encode({**episode, "end_reason": 0, "state": {"place": 1.0}}))
    inputs += (b'e["bug", "text", "KeyError"]',)
    return [bytes([place]) + data for place, data in enumerate(inputs)]


def main() -> None:
    import tempfile
    from pathlib import Path

    with tempfile.TemporaryDirectory() as folder:
        for place, data in enumerate(seeds()):
            Path(folder, str(place)).write_bytes(data)
        # The corpus of the caller comes first: new inputs are written there.
        given = [word for word in sys.argv[1:] if not word.startswith("-")]
        options = [word for word in sys.argv[1:] if word.startswith("-")]
        atheris.Setup([sys.argv[0], "-max_len=4096", *options, *given, folder], test_one_input)
        atheris.Fuzz()


if __name__ == "__main__":
    main()
