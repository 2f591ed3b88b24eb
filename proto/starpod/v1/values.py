"""Actions and parts of observations as plain Python values, which clients and servers share."""

from __future__ import annotations

import base64
import enum
import html
import json
import struct
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from starpod.v1 import environment_pb2 as pb


@dataclass(frozen=True, slots=True)
class ToolCall:
    """An action that calls a tool by name."""

    name: str
    """Name of the tool."""
    arguments: Mapping[str, Any] = field(default_factory=dict)
    """Arguments of the call by name, as JSON values."""


@dataclass(frozen=True, slots=True)
class JSON:
    """A JSON value as an action or as a part of an observation. Plain text is a str instead."""

    value: Any
    """None, a bool, number or str, or lists and dictionaries of them."""


@dataclass(frozen=True, slots=True)
class Image:
    """An encoded image."""

    data: bytes
    """The encoded bytes."""
    mime: str = "image/png"
    """The media type."""

    def __repr__(self) -> str:
        if self.data[:8] == b"\x89PNG\r\n\x1a\n" and len(self.data) >= 24:
            width, height = struct.unpack(">II", self.data[16:24])
            return f"Image({self.mime}, {width}x{height}, {len(self.data)} bytes)"
        return f"Image({self.mime}, {len(self.data)} bytes)"

    def _repr_html_(self) -> str:
        data = base64.b64encode(self.data).decode()
        return f'<img src="data:{html.escape(self.mime)};base64,{data}">'


Action = str | ToolCall | JSON | np.ndarray
"""One sub-action of a turn."""

Part = str | Image | JSON | np.ndarray
"""One piece of an observation."""


DEEPEST_INFO = 25
"""Maximum nesting of `info`. Protobuf parses at most 100 nested messages, and each level of a Struct takes three."""

MAX_REWARD = 1e12
"""Maximum magnitude of a reward. Trainers use float32, whose range must hold sums of squared rewards."""


class EndReason(enum.IntEnum):
    """Reason for which an episode ended, with the protocol's numbers."""

    NONE = 0
    """The episode is running."""
    TERMINAL = 1
    """The task ended: it was solved or lost."""
    MAX_TURNS = 2
    """The limit on turns was reached."""
    MAX_ACTIONS = 3
    """The limit on sub-actions was reached."""
    ENVIRONMENT_LIMIT = 4
    """A limit of the environment itself was reached."""


@dataclass(frozen=True, slots=True)
class Want:
    """Optional fields of observations. The server only computes and sends fields that are True."""

    valid_actions: bool = False
    """The actions that the environment accepts in this state."""
    state_key: bool = False
    """A digest of the state without its history: equal states have equal keys."""
    expert_action: bool = False
    """The action that the environment's expert would take."""
    score: bool = False
    """The environment's own score of the state, from 0 to 1."""
    image: bool = False
    """A picture of the state, as a PNG."""
    text_only: bool = field(init=False, repr=False, compare=False)
    """Whether at most the state key is wanted, which is the common case."""

    def __post_init__(self) -> None:
        text_only = not (self.valid_actions or self.expert_action or self.score or self.image)
        object.__setattr__(self, "text_only", text_only)

    def to_proto(self, *, state_key: bool = False) -> pb.Want:
        """Convert to a message. `state_key=True` requests state keys even if the caller does not want them."""
        return pb.Want(
            valid_actions=self.valid_actions,
            state_key=self.state_key or state_key,
            expert_action=self.expert_action,
            score=self.score,
            image=self.image,
        )


def action_text(action: Action) -> str:
    """Return an action as a person types it: a tool call is the tool's name and its arguments as JSON."""
    match action:
        case str():
            return action
        case ToolCall():
            return f"{action.name} {json.dumps(dict(action.arguments))}"
        case JSON():
            return json.dumps(action.value)
    return f"{action.dtype} tensor of shape {list(action.shape)}"


def action_to_proto(action: Action | pb.Action) -> pb.Action:
    """Return the message of an action. Raises TypeError for what is none."""
    match action:
        case pb.Action():
            return action
        case str():
            return pb.Action(text=action)
        case ToolCall():
            return pb.Action(tool_call=pb.ToolCall(name=action.name, arguments_json=json.dumps(dict(action.arguments))))
        case JSON():
            return pb.Action(json=json.dumps(action.value))
        case np.ndarray():
            return pb.Action(tensor=tensor_to_proto(action))
    raise TypeError(f"an action is str, ToolCall, JSON or a NumPy array, not {type(action).__name__}")


def action_from_proto(action: pb.Action) -> Action:
    match action.WhichOneof("kind"):
        case "tool_call":
            arguments = action.tool_call.arguments_json
            return ToolCall(action.tool_call.name, json.loads(arguments) if arguments else {})
        case "json":
            return JSON(json.loads(action.json))
        case "tensor":
            return tensor_from_proto(action.tensor)
        case _:
            return action.text


def tensor_to_proto(array: np.ndarray) -> pb.Tensor:
    """Encode an array in C order, little-endian."""
    little_endian = np.ascontiguousarray(array, dtype=array.dtype.newbyteorder("<"))
    return pb.Tensor(dtype=array.dtype.name, shape=array.shape, data=little_endian.tobytes())


def tensor_from_proto(tensor: pb.Tensor) -> np.ndarray:
    """Return a read-only array that shares the message's bytes."""
    return np.frombuffer(tensor.data, np.dtype(tensor.dtype).newbyteorder("<")).reshape(tuple(tensor.shape))
