"""Decoders of bytes from others: they read an input, or refuse it with an error of their contract."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence

import pytest
from google.protobuf.message import DecodeError
from hypothesis import given, settings
from hypothesis import strategies as st

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
    """Check that a decoded state can be encoded and decoded to the same state."""
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


STEP = pb.StepRequest(session_id="s", epoch=1, actions=[pb.Action(text="x"), pb.Action(json='{"a": [1, null]}')])
STEP.actions.add().tensor.CopyFrom(pb.Tensor(dtype="int8", shape=[2], data=b"\1\2"))
OPENING = pb.OpenRequest(environment_id="walk-v1", version=">=1.0.0,<2.0.0")
OPENING.options["start"] = 1
COLUMNS = pb.StepColumns(
    call_ids=[1, 2], session_ids=["a", "b"], epochs=[1, 1], step_indices=[0, 0], action_counts=[1, 0], actions=["x"]
)
VALUE = {"a": (1, {2}, frozenset([3]), 2**70, 1j), (1, 2): [None, 1.5, b"x"]}
EPISODE = {"options": {}, "limits": [1, 2, 3], "seed": 1, "dynamics_seed": 2, "turns": 0, "actions": 0, "end_reason": 0}


@pytest.mark.parametrize(
    ("decode", "good"),
    [
        (read_step, STEP.SerializeToString()),
        (read_opening, OPENING.SerializeToString()),
        (read_batch, pb.StreamRequest(steps=COLUMNS).SerializeToString()),
        (read_state, state.encode(VALUE)),
        (read_snapshot, state.encode({**EPISODE, "state": {"place": 1.0}})),
        (read_reply, b'e["bug", "text", "KeyError"]'),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
@settings(max_examples=200, deadline=None)
@given(edits=st.lists(st.tuples(st.integers(0, 300), st.integers(0, 4), st.binary(max_size=6)), max_size=5))
def test_decoders_refuse_what_they_cannot_read(
    decode: Callable[[bytes], None], good: bytes, edits: Sequence[tuple[int, int, bytes]]
) -> None:
    data = good
    for place, cut, more in edits:
        data = data[:place] + more + data[place + cut :]
    with contextlib.suppress(DecodeError, CallError, StateError, BadProcessReply):
        decode(data)
