"""What the agent sees and does, as plain Python values: actions, observations, transitions."""

from __future__ import annotations

import base64
import copy
import enum
import functools
import html
import json
import struct
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from google.protobuf import json_format

from starpod.client.arguments import MAX_COUNT, whole_number
from starpod.v1 import environment_pb2 as pb


@dataclass(frozen=True, slots=True)
class ToolCall:
    """An action that calls a tool by name."""

    name: str
    arguments: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class JSON:
    """A JSON value, as an action or a part of an observation (text is a plain str)."""

    value: Any


@dataclass(frozen=True, slots=True)
class Image:
    """An encoded image; `mime` is its media type, e.g. image/png."""

    data: bytes
    mime: str = "image/png"

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

Actions = tuple[Action, ...]
"""What a step sends: sub-actions, executed in order until one ends the episode."""

Flags = int | tuple[int, ...]
"""What became of the sub-actions of a step, 1 executed + 2 valid + 4 effective: of its only one, or of each."""

Shares = float | tuple[float, ...]
"""The reward of its only sub-action, or of each."""


@dataclass(frozen=True, slots=True)
class Want:
    """What observations carry beyond their own parts. What is not wanted is neither computed nor sent."""

    valid_actions: bool = False
    state_key: bool = False
    expert_action: bool = False
    score: bool = False
    image: bool = False

    def to_proto(self, *, state_key: bool = False) -> pb.Want:
        """The message; `state_key=True` asks for state keys whether wanted or not."""
        return pb.Want(
            valid_actions=self.valid_actions,
            state_key=self.state_key or state_key,
            expert_action=self.expert_action,
            score=self.score,
            image=self.image,
        )


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits of one episode. None keeps what the environment says; 0 lifts the limit, as in the contract."""

    max_turns: int | None = None
    max_actions_per_turn: int | None = None
    max_actions: int | None = None

    def __post_init__(self) -> None:
        for name in self.__slots__:
            if (value := getattr(self, name)) is not None:
                hint = "write a whole number; 0 lifts the limit, None keeps what the environment says"
                whole_number(name, value, 0, MAX_COUNT, hint)

    def __repr__(self) -> str:
        values = {name: getattr(self, name) for name in self.__slots__}
        shown = (f"{name}={'0 (no limit)' if value == 0 else value}" for name, value in values.items())
        return f"Limits({', '.join(shown)})"

    def to_proto(self) -> pb.LimitOverrides:
        return pb.LimitOverrides(
            max_turns=self.max_turns, max_actions_per_turn=self.max_actions_per_turn, max_actions=self.max_actions
        )

    @classmethod
    def from_proto(cls, limits: pb.Limits) -> Limits:
        return _limits(limits.max_turns, limits.max_actions_per_turn, limits.max_actions)


_limits = functools.lru_cache(maxsize=256)(Limits)


class EndReason(enum.IntEnum):
    """Why an episode is over; the numbers are the protocol's."""

    NONE = 0
    TERMINAL = 1
    MAX_TURNS = 2
    MAX_ACTIONS = 3
    ENVIRONMENT_LIMIT = 4


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of one sub-action.

    executed: False if it was never tried: after the end, beyond a limit, or not a name of the action space.
    valid: False if it made no sense to the environment. effective: False if it changed nothing.
    reward: its share of the turn's reward.
    """

    executed: bool
    valid: bool
    effective: bool
    reward: float


class Observation:
    """What the agent sees now: what is new since its last turn, never the transcript.

    parts: in the order in which they are to be read.
    state_key: a digest of the state without its history; b"" unless wanted.
    valid_actions, expert_action, score: None unless wanted and known.
    agent_id: whose turn it is; empty where there is one agent.
    """

    __slots__ = ("agent_id", "expert_action", "parts", "score", "state_key", "valid_actions")

    def __init__(
        self,
        parts: tuple[Part, ...],
        state_key: bytes = b"",
        valid_actions: tuple[Action, ...] | None = None,
        expert_action: Action | None = None,
        score: float | None = None,
        agent_id: str = "",
    ) -> None:
        self.parts = parts
        self.state_key = state_key
        self.valid_actions = valid_actions
        self.expert_action = expert_action
        self.score = score
        self.agent_id = agent_id

    @property
    def text(self) -> str:
        """The text parts, one after the other on lines of their own."""
        return "\n".join(part for part in self.parts if isinstance(part, str))

    @property
    def image(self) -> Image | None:
        """The first image, if there is one."""
        return next((part for part in self.parts if isinstance(part, Image)), None)

    def __repr__(self) -> str:
        shown = [*map(repr, self.parts)]
        for name in ("valid_actions", "expert_action", "score"):
            if (value := getattr(self, name)) is not None:
                shown.append(f"{name}={value!r}")
        if self.state_key:
            shown.append(f"state_key={self.state_key.hex()}")
        if self.agent_id:
            shown.append(f"agent_id={self.agent_id!r}")
        return f"Observation({', '.join(shown)})"

    def _repr_html_(self) -> str:
        """Texts and pictures, for notebooks."""
        return "".join(
            part._repr_html_()
            if isinstance(part, Image)
            else f"<pre>{html.escape(part if isinstance(part, str) else repr(part))}</pre>"
            for part in self.parts
        )


class Transition:
    """The result of one turn.

    reward: the sum over the sub-actions.
    actions: what was played.
    end_reason: why the episode is over, NONE while it is not.
    success: whether the task was solved; None while that is open or where the environment cannot say.

    Everything else is made when it is asked for, so that a trainer that reads texts and rewards pays for no more.
    """

    __slots__ = (
        "actions",
        "end_reason",
        "message",
        "reward",
        "row_flags",
        "row_key",
        "row_shares",
        "row_text",
        "success",
    )

    def __init__(
        self,
        row_text: str,
        reward: float,
        row_flags: Flags,
        row_shares: Shares,
        row_key: bytes,
        end_reason: EndReason,
        success: bool | None,
        message: pb.Transition | None,
        actions: Actions = (),
    ) -> None:
        """The first fields are those of a row of columns; `message` is None for it, and stands for them otherwise."""
        self.row_text = row_text
        self.reward = reward
        self.row_flags = row_flags
        self.row_shares = row_shares
        self.row_key = row_key
        self.end_reason = end_reason
        self.success = success
        self.message = message
        self.actions = actions

    @classmethod
    def from_proto(cls, message: pb.Transition, actions: Actions = (), *, show_key: bool = True) -> Transition:
        """A transition that came as a message of its own. `show_key=False` hides a key that only recovery asked for."""
        return cls(
            "",
            message.reward,
            (),
            (),
            message.observation.state_key if show_key else b"",
            EndReason(message.end_reason),
            message.success if message.HasField("success") else None,
            message,
            actions,
        )

    @property
    def terminated(self) -> bool:
        """The task itself ended: there is nothing to bootstrap from."""
        return self.end_reason == EndReason.TERMINAL

    @property
    def truncated(self) -> bool:
        """A limit cut the episode short."""
        return self.end_reason > EndReason.TERMINAL

    @property
    def done(self) -> bool:
        """Terminated or truncated."""
        return self.end_reason is not EndReason.NONE

    @property
    def observation(self) -> Observation:
        if self.message is None:
            return Observation((self.row_text,), self.row_key)
        return observation_from_proto(self.message.observation, self.row_key)

    @property
    def outcomes(self) -> tuple[Outcome, ...]:
        """One per sub-action of the turn, in its order."""
        if self.message is not None:
            return tuple(Outcome(o.executed, o.valid, o.effective, o.reward) for o in self.message.outcomes)
        flags, shares = self.row_flags, self.row_shares
        return tuple(
            Outcome(bool(flag & 1), bool(flag & 2), bool(flag & 4), share)
            for flag, share in zip(
                flags if isinstance(flags, tuple) else (flags,),
                shares if isinstance(shares, tuple) else (shares,),
                strict=True,
            )
        )

    @property
    def reward_parts(self) -> dict[str, float]:
        """Where the reward comes from, by name; empty where the environment does not say."""
        return dict(self.message.reward_parts) if self.message is not None else {}

    @property
    def criteria(self) -> dict[str, bool]:
        """A checklist: what held on this turn, by name."""
        return dict(self.message.criteria) if self.message is not None else {}

    @property
    def info(self) -> dict[str, Any]:
        """Side data, as the environment gave it. Whole numbers come as floats: JSON knows but one kind."""
        if self.message is None or not self.message.HasField("info"):
            return {}
        info: dict[str, Any] = json_format.MessageToDict(self.message.info)
        return info

    def __repr__(self) -> str:
        return f"Transition({self.observation!r}, {self._summary()})"

    def _repr_html_(self) -> str:
        """What the agent sees, and what the turn gave, for notebooks."""
        return f"{self.observation._repr_html_()}<p>{html.escape(self._summary())}</p>"

    def _summary(self) -> str:
        shown = [f"reward={self.reward}"]
        outcomes = self.outcomes
        actions = self.actions if len(self.actions) == len(outcomes) else range(len(outcomes))
        invalid = [repr(action) for action, outcome in zip(actions, outcomes, strict=True) if not outcome.valid]
        if invalid:
            shown.append(f"invalid: {', '.join(invalid)}")
        if self.done:
            shown.append(self.end_reason.name)
        if self.success is not None:
            shown.append(f"success={self.success}")
        return ", ".join(shown)


# --- conversions ---------------------------------------------------------------------------------------------------


def as_actions(actions: Action | Iterable[Action]) -> Actions:
    """One action or several as a tuple, which is logged: what the caller may change later is copied.

    Raises TypeError for what is no action.
    """
    if isinstance(actions, Action | Mapping | bytes) or not isinstance(actions, Iterable):
        return (_own(actions),)
    return tuple(map(_own, actions))


def _own(action: Any) -> Action:
    match action:
        case str():
            return action
        case ToolCall():
            return ToolCall(action.name, copy.deepcopy(dict(action.arguments)))
        case JSON():
            return JSON(copy.deepcopy(action.value))
        case np.ndarray():
            return action.copy()
    raise TypeError(f"An action is a str, ToolCall, JSON or numpy array, not {type(action).__name__}: {action!r}.")


def action_to_proto(action: Action | pb.Action) -> pb.Action:
    match action:
        case pb.Action():
            return action
        case str():
            return pb.Action(text=action)
        case ToolCall():
            return pb.Action(tool_call=pb.ToolCall(name=action.name, arguments_json=json.dumps(dict(action.arguments))))
        case JSON():
            return pb.Action(json=json.dumps(action.value))
        case _:
            return pb.Action(tensor=tensor_to_proto(action))


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
    """A dense array in C order, little-endian."""
    little = np.ascontiguousarray(array, dtype=array.dtype.newbyteorder("<"))
    return pb.Tensor(dtype=array.dtype.name, shape=array.shape, data=little.tobytes())


def tensor_from_proto(tensor: pb.Tensor) -> np.ndarray:
    """The array, read-only: it shares the message's bytes."""
    return np.frombuffer(tensor.data, np.dtype(tensor.dtype).newbyteorder("<")).reshape(tuple(tensor.shape))


def part_from_proto(part: pb.Part) -> Part:
    match part.WhichOneof("kind"):
        case "image":
            return Image(part.image.data, part.image.mime)
        case "json":
            return JSON(json.loads(part.json))
        case "tensor":
            return tensor_from_proto(part.tensor)
        case _:
            return part.text


def observation_from_proto(observation: pb.Observation, state_key: bytes) -> Observation:
    return Observation(
        tuple(map(part_from_proto, observation.parts)),
        state_key,
        tuple(map(action_from_proto, observation.valid_actions)) or None,
        action_from_proto(observation.expert_action) if observation.HasField("expert_action") else None,
        observation.score if observation.HasField("score") else None,
        observation.agent_id,
    )
