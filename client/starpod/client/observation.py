"""Actions, observations and transitions as plain Python values, and their conversion from and to messages."""

from __future__ import annotations

import copy
import functools
import html
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from google.protobuf import json_format

from starpod.client.arguments import MAX_COUNT, whole_number
from starpod.v1 import environment_pb2 as pb
from starpod.v1.values import JSON, Action, EndReason, Image, Part, ToolCall, action_from_proto, tensor_from_proto
from starpod.v1.values import Want as Want

Actions = tuple[Action, ...]
"""The sub-actions of one step, executed in order until one ends the episode."""

Flags = int | tuple[int, ...]
"""Outcome of a step's only sub-action as a bit mask (1 executed, 2 valid, 4 effective), or a tuple with one
mask per sub-action."""

Shares = float | tuple[float, ...]
"""Reward of a step's only sub-action, or a tuple with one reward per sub-action."""


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits of one episode. None keeps the environment's limit; 0 means no limit."""

    max_turns: int | None = None
    """Maximum number of turns of an episode."""
    max_actions_per_turn: int | None = None
    """Maximum number of sub-actions executed in one turn; further ones are dropped."""
    max_actions: int | None = None
    """Maximum number of sub-actions of an episode."""

    def __post_init__(self) -> None:
        for name in self.__slots__:
            if (value := getattr(self, name)) is not None:
                hint = "write a whole number; 0 lifts the limit, None keeps the environment's limit"
                whole_number(name, value, 0, MAX_COUNT, hint)

    def __repr__(self) -> str:
        values = {name: getattr(self, name) for name in self.__slots__}
        fields = (f"{name}={'0 (no limit)' if value == 0 else value}" for name, value in values.items())
        return f"Limits({', '.join(fields)})"

    def to_proto(self) -> pb.LimitOverrides:
        """Convert to a message."""
        return pb.LimitOverrides(
            max_turns=self.max_turns, max_actions_per_turn=self.max_actions_per_turn, max_actions=self.max_actions
        )

    @classmethod
    def from_proto(cls, limits: pb.Limits) -> Limits:
        """Convert from a message."""
        return _limits(limits.max_turns, limits.max_actions_per_turn, limits.max_actions)


_limits = functools.lru_cache(maxsize=256)(Limits)


@dataclass(frozen=True, slots=True)
class Outcome:
    """The outcome of one sub-action."""

    executed: bool
    """False if the episode was over, a limit was reached, or the sub-action is not in the action space."""
    valid: bool
    """False if the environment could not interpret the sub-action."""
    effective: bool
    """False if the sub-action changed nothing."""
    reward: float
    """The sub-action's share of the turn's reward."""


class Observation:
    """An observation: what is new for the agent since its last turn. Earlier turns are not repeated.

    Attributes:
        parts: texts, images, JSON values and arrays, in reading order.
        state_key: digest of the state without its history; b"" unless wanted.
        valid_actions: actions that the environment would accept; None unless wanted and known.
        expert_action: what the environment's expert would do; None unless wanted and known.
        score: the environment's own score of the state; None unless wanted and known.
        agent_id: the agent whose turn it is; "" in environments for a single agent.
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
        """The text parts, joined by line breaks."""
        return "\n".join(part for part in self.parts if isinstance(part, str))

    @property
    def image(self) -> Image | None:
        """The first image, or None."""
        return next((part for part in self.parts if isinstance(part, Image)), None)

    def __repr__(self) -> str:
        fields = [*map(repr, self.parts)]
        for name in ("valid_actions", "expert_action", "score"):
            if (value := getattr(self, name)) is not None:
                fields.append(f"{name}={value!r}")
        if self.state_key:
            fields.append(f"state_key={self.state_key.hex()}")
        if self.agent_id:
            fields.append(f"agent_id={self.agent_id!r}")
        return f"Observation({', '.join(fields)})"

    def _repr_html_(self) -> str:
        return "".join(
            part._repr_html_()
            if isinstance(part, Image)
            else f"<pre>{html.escape(part if isinstance(part, str) else repr(part))}</pre>"
            for part in self.parts
        )


class Transition:
    """The result of one turn.

    The properties are computed on access, because a trainer may read only texts and rewards.

    Attributes:
        reward: the sum over the sub-actions.
        actions: the actions that were played.
        end_reason: why the episode is over; NONE while it is running.
        success: whether the task was solved; None while that is undecided or if the environment cannot tell.
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
        """Make a transition from a row of columns (`message` is None) or a message (`row_` arguments are empty)."""
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
        """Make a transition from a message.

        Args:
            show_key: False hides a state key that only recovery requested.
        """
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
        """Whether the task itself ended the episode, so that no value should be bootstrapped."""
        return self.end_reason == EndReason.TERMINAL

    @property
    def truncated(self) -> bool:
        """Whether a limit ended the episode."""
        return self.end_reason > EndReason.TERMINAL

    @property
    def done(self) -> bool:
        """Whether the episode is over: terminated or truncated."""
        return self.end_reason is not EndReason.NONE

    @property
    def observation(self) -> Observation:
        """The observation after the turn."""
        if self.message is None:
            return Observation((self.row_text,), self.row_key)
        return observation_from_proto(self.message.observation, self.row_key)

    @property
    def outcomes(self) -> tuple[Outcome, ...]:
        """The outcome of each sub-action, in order."""
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
        """Components of the reward by name; empty if the environment does not report them."""
        return dict(self.message.reward_parts) if self.message is not None else {}

    @property
    def criteria(self) -> dict[str, bool]:
        """Checklist of this turn: whether each named criterion was met."""
        return dict(self.message.criteria) if self.message is not None else {}

    @property
    def info(self) -> dict[str, Any]:
        """Diagnostic data from the environment. All numbers are floats, as in google.protobuf.Struct."""
        if self.message is None or not self.message.HasField("info"):
            return {}
        info: dict[str, Any] = json_format.MessageToDict(self.message.info)
        return info

    def __repr__(self) -> str:
        return f"Transition({self.observation!r}, {self._summary()})"

    def _repr_html_(self) -> str:
        return f"{self.observation._repr_html_()}<p>{html.escape(self._summary())}</p>"

    def _summary(self) -> str:
        parts = [f"reward={self.reward}"]
        outcomes = self.outcomes
        actions = self.actions if len(self.actions) == len(outcomes) else range(len(outcomes))
        invalid = [repr(action) for action, outcome in zip(actions, outcomes, strict=True) if not outcome.valid]
        if invalid:
            parts.append(f"invalid: {', '.join(invalid)}")
        if self.done:
            parts.append(self.end_reason.name)
        if self.success is not None:
            parts.append(f"success={self.success}")
        return ", ".join(parts)


# --- conversions ---------------------------------------------------------------------------------------------------


def as_actions(actions: Action | Iterable[Action]) -> Actions:
    """Return actions as a tuple. Mutable ones are copied, because the tuple is logged for replays. Raises TypeError."""
    if isinstance(actions, Action | Mapping | bytes) or not isinstance(actions, Iterable):
        return (_copy_action(actions),)
    return tuple(map(_copy_action, actions))


def _copy_action(action: Any) -> Action:
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
