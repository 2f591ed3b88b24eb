"""Conversion between environments' Python values and the protocol's messages."""

from __future__ import annotations

import functools
import json
from collections.abc import Iterable, Mapping, Sequence
from math import isfinite
from typing import Any, NoReturn

import numpy as np
from google.protobuf import struct_pb2

from starpod.env_server.authoring.environment import BadResult, Concurrency, Environment, Limits, Outcome, TensorSpec
from starpod.env_server.episodes.errors import bad_argument
from starpod.env_server.episodes.live_episode import UNKNOWN_NAME, ObservedState, TurnResult, Want
from starpod.env_server.episodes.results import expect_text
from starpod.v1 import environment_pb2 as pb
from starpod.v1.values import JSON, Action, Image, Part, ToolCall, action_to_proto, tensor_to_proto

_DTYPES = frozenset("bool int8 int16 int32 int64 uint8 uint16 uint32 uint64 float16 float32 float64".split())

EXACT = 2**53
"""Doubles represent all integers up to this number exactly, but no odd integer above it."""
INEXACT = "is a whole number that would be rounded, because options are doubles: numbers below 2^53 and text are exact"
_DEEPEST_JSON = 100
"""Maximum nesting of a Struct that protobuf parses."""


# --- requests ----------------------------------------------------------------------------------------------------


def actions_from(messages: Sequence[pb.Action | str]) -> list[Action]:
    """Return a Step's sub-actions, which the environment may keep and change. Raises BAD_ARGUMENT."""
    return [
        message if isinstance(message, str) else _action_from(message, f"actions[{index}]")
        for index, message in enumerate(messages)
    ]


def _action_from(message: pb.Action, path: str) -> Action:
    match message.WhichOneof("kind"):
        case "text":
            return message.text
        case "tool_call":
            arguments = _json_from(message.tool_call.arguments_json or "{}", f"{path}.tool_call.arguments_json")
            if not isinstance(arguments, dict):
                raise bad_argument(f"{path}.tool_call.arguments_json", "must be a JSON object")
            return ToolCall(message.tool_call.name, arguments)
        case "json":
            return JSON(_json_from(message.json, f"{path}.json"))
        case "tensor":
            return _tensor_from(message.tensor, f"{path}.tensor")
    raise bad_argument(path, "has no kind set: set text, tool_call, json or tensor")


def _json_from(text: str, path: str) -> Any:
    try:
        value = json.loads(text, parse_constant=_no_constant)
    except (ValueError, RecursionError) as error:
        raise bad_argument(path, f"is not JSON: {error}") from error
    _check_json(value, path)
    return value


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a JSON value")


def _check_json(root: Any, path: str) -> None:
    """Refuse JSON that Python reads but that cannot be sent: deep nesting, infinite numbers, unpaired surrogates."""
    level, depth = [root], 0
    while level:
        next_level: list[Any] = []
        for value in level:
            match value:
                case str() if not value.isascii():
                    _check_text(value, path)
                case float() if not isfinite(value):
                    raise bad_argument(path, "holds a number too large for a double")
                case list():
                    next_level += value
                case dict():
                    next_level += value
                    next_level += value.values()
        level, depth = next_level, depth + 1
        if depth > _DEEPEST_JSON:
            raise bad_argument(path, f"is nested more than {_DEEPEST_JSON} deep")


def _check_text(text: str, path: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise bad_argument(path, "holds half of a surrogate pair") from error


def _tensor_from(message: pb.Tensor, path: str) -> np.ndarray[Any, Any]:
    if message.dtype not in _DTYPES:
        raise bad_argument(f"{path}.dtype", f"is {message.dtype!r}; use one of {', '.join(sorted(_DTYPES))}")
    dtype = np.dtype(message.dtype).newbyteorder("<")
    shape = tuple(message.shape)
    byte_count = dtype.itemsize
    for length in shape:
        if length < 0:
            raise bad_argument(f"{path}.shape", "has a negative length")
        byte_count *= length
    if byte_count != len(message.data):
        raise bad_argument(f"{path}.data", f"has {len(message.data)} bytes; dtype and shape make {byte_count}")
    try:
        return np.frombuffer(message.data, dtype=dtype).reshape(shape).copy()
    except ValueError as error:
        raise bad_argument(f"{path}.shape", str(error)) from error


def options_from(message: struct_pb2.Struct) -> dict[str, Any]:
    """Return options as Python values. Whole numbers below 2^53 become int, because a Struct has only doubles."""
    return {name: _value_from(value) for name, value in message.fields.items()}


def _value_from(value: struct_pb2.Value) -> Any:
    match value.WhichOneof("kind"):
        case "number_value":
            number = value.number_value
            return int(number) if number.is_integer() and abs(number) < EXACT else number
        case "string_value":
            return value.string_value
        case "bool_value":
            return value.bool_value
        case "struct_value":
            return options_from(value.struct_value)
        case "list_value":
            return [_value_from(item) for item in value.list_value.values]
    return None


@functools.lru_cache(maxsize=64)
def _want(valid_actions: bool, state_key: bool, expert_action: bool, score: bool, image: bool) -> Want:
    return Want(valid_actions, state_key, expert_action, score, image)


def want_from(message: pb.Want) -> Want:
    return _want(message.valid_actions, message.state_key, message.expert_action, message.score, message.image)


def limits_from(overrides: pb.LimitOverrides, current: Limits) -> Limits:
    """Return the current limits with the given fields replaced."""
    if not overrides.ByteSize():
        return current
    return Limits(
        overrides.max_turns if overrides.HasField("max_turns") else current.max_turns,
        overrides.max_actions_per_turn if overrides.HasField("max_actions_per_turn") else current.max_actions_per_turn,
        overrides.max_actions if overrides.HasField("max_actions") else current.max_actions,
    )


# --- replies -----------------------------------------------------------------------------------------------------


def action_to(action: Any) -> pb.Action:
    """Return an action as a message. Raises TypeError for other values, and for arrays whose dtype cannot be sent."""
    if isinstance(action, np.ndarray | np.generic):
        return pb.Action(tensor=_tensor_to(np.asarray(action)))
    return action_to_proto(action)


def _tensor_to(array: np.ndarray[Any, Any]) -> pb.Tensor:
    if array.dtype.name not in _DTYPES:
        raise TypeError(f"a tensor of {array.dtype} cannot be sent; use one of {', '.join(sorted(_DTYPES))}")
    return tensor_to_proto(array)


def part_to(part: Part) -> pb.Part:
    match part:
        case str():
            return pb.Part(text=part)
        case Image():
            return pb.Part(image=pb.Image(mime=part.mime, data=part.data))
        case JSON():
            return pb.Part(json=json.dumps(part.value))
        case np.ndarray():
            return pb.Part(tensor=_tensor_to(part))
    raise TypeError(f"a part of an observation is str, Image, JSON or a NumPy array, not {type(part).__name__}")


def fill_observation(message: pb.Observation, observation: ObservedState) -> None:
    """Write an observation into an empty message. Creating a message and copying it would take three times as long."""
    parts, state_key, extras = observation
    method: str = "observe"
    result: Any = parts
    try:
        if isinstance(parts, str):
            message.parts.add().text = parts
        else:
            message.parts.extend(map(part_to, parts))
        if state_key:
            method, result = "state_key", state_key
            message.state_key = state_key
        if extras is not None:
            if extras.valid_actions is not None:
                method, result = "valid_actions", extras.valid_actions
                message.valid_actions.extend([action_to(action) for action in extras.valid_actions])
            if extras.expert_action is not None:
                method, result = "expert_action", extras.expert_action
                message.expert_action.CopyFrom(action_to(extras.expert_action))
            if extras.score is not None:
                message.score = extras.score
            if extras.agent_id:
                method, result = "agent_id", extras.agent_id
                message.agent_id = extras.agent_id
    except (TypeError, ValueError) as error:
        raise BadResult.unsendable(method, result, error) from error


def copy_observation(message: pb.Observation, observation: pb.Observation | ObservedState) -> None:
    """Write an observation, which may be a message already, into an empty message."""
    if isinstance(observation, ObservedState):
        fill_observation(message, observation)
    else:
        message.CopyFrom(observation)


def observation_to(observation: ObservedState) -> pb.Observation:
    message = pb.Observation()
    fill_observation(message, observation)
    return message


def _fill_outcome(message: pb.Outcome, outcome: Outcome | None) -> None:
    if outcome is None:
        message.valid = True
        return
    message.executed = outcome is not UNKNOWN_NAME
    message.valid = outcome.valid
    message.effective = outcome.effective
    message.reward = outcome.reward


def outcome_flags(outcome: Outcome | None) -> int:
    """Return an outcome's flags in the encoding of TransitionColumns."""
    if outcome is None:
        return 2
    return (outcome is not UNKNOWN_NAME) + 2 * outcome.valid + 4 * outcome.effective


def fill_transition(message: pb.Transition, transition: TurnResult | pb.Transition) -> None:
    """Write a transition into an empty message. A transition from another process is already a message; copy it."""
    if not isinstance(transition, TurnResult):
        message.CopyFrom(transition)
        return
    fill_observation(message.observation, transition.observation)
    message.reward = transition.reward
    try:
        _fill_result(message, transition)
    except (TypeError, ValueError) as error:
        raise BadResult.unsendable("step", transition.details or transition.outcomes, error) from error


def _fill_result(message: pb.Transition, transition: TurnResult) -> None:
    """Write what `step` returned."""
    for outcome in transition.outcomes:
        _fill_outcome(message.outcomes.add(), outcome)
    if transition.end_reason:
        message.end_reason = transition.end_reason.value  # type: ignore[assignment]
        message.terminated = transition.terminated
        message.truncated = transition.truncated
    if transition.success is not None:
        message.success = transition.success
    if transition.details is not None:
        parts, criteria, info = transition.details
        message.reward_parts.update(parts or {})
        message.criteria.update(criteria or {})
        if info:
            message.info.CopyFrom(struct_to(info))


def transition_to(transition: TurnResult) -> pb.Transition:
    message = pb.Transition()
    fill_transition(message, transition)
    return message


def struct_to(values: Mapping[str, Any]) -> struct_pb2.Struct:
    """Return JSON-like values as a Struct. NumPy scalars and arrays become numbers and lists.

    Whole numbers from 2^53 on become text, as ProtoJSON spells them.
    """
    struct = struct_pb2.Struct()
    struct.update(_plain(dict(values)))
    return struct


def _plain(value: Any) -> Any:
    match value:
        case None | bool() | str():
            return value
        case int() if abs(value) >= EXACT:
            return str(value)
        case int() | float():
            return float(value)
        case np.generic() | np.ndarray():
            return _plain(value.tolist())
        case Mapping():
            return {str(key): _plain(item) for key, item in value.items()}
        case Iterable():
            return [_plain(item) for item in value]
    raise TypeError(f"info holds a {type(value).__name__}; only JSON-like values can be sent")


def fill_limits(message: pb.Limits, limits: Limits) -> None:
    """Write limits into an empty message."""
    message.max_turns = limits.max_turns
    message.max_actions_per_turn = limits.max_actions_per_turn
    message.max_actions = limits.max_actions


def limits_to(limits: Limits) -> pb.Limits:
    message = pb.Limits()
    fill_limits(message, limits)
    return message


_CONCURRENCY = {
    Concurrency.INLINE: pb.CONCURRENCY_CLASS_INLINE,
    Concurrency.THREAD: pb.CONCURRENCY_CLASS_THREAD,
    Concurrency.PROCESS: pb.CONCURRENCY_CLASS_PROCESS,
    Concurrency.CONTAINER: pb.CONCURRENCY_CLASS_CONTAINER,
}


def _tensor_spec_to(spec: TensorSpec) -> pb.TensorSpec:
    return pb.TensorSpec(dtype=spec.dtype, shape=spec.shape, minimum=spec.minimum, maximum=spec.maximum)


@functools.cache
def spec_to(environment: type[Environment]) -> pb.EnvironmentSpec:
    """Return the description of an environment class that Describe sends."""
    spec = environment.spec
    default = environment.__new__(environment)
    default.options = environment.Options()

    def overrides(method: str) -> bool:
        return getattr(environment, method) is not getattr(Environment, method)

    return pb.EnvironmentSpec(
        id=spec.id,
        version=spec.version,
        title=spec.title,
        instructions=expect_text("instructions", default.instructions()),
        action_space=pb.ActionSpace(
            names=spec.actions,
            grammar=spec.grammar,
            tools=[
                pb.Tool(
                    name=tool.name,
                    description=tool.description,
                    parameters_schema_json=json.dumps(dict(tool.parameters)),
                )
                for tool in spec.tools
            ],
            tensor=_tensor_spec_to(spec.tensor) if spec.tensor else None,
        ),
        options_schema_json=json.dumps(environment.Options.model_json_schema()),
        observation_modes=spec.observation_modes,
        render_modes=spec.render_modes,
        limits=limits_to(spec.limits),
        capabilities=pb.EnvironmentCapabilities(
            fork=spec.fork,
            snapshot=spec.snapshot,
            deterministic=spec.deterministic,
            expert_action=overrides("expert_action"),
            score=overrides("score"),
            valid_actions=bool(spec.actions) or overrides("valid_actions"),
            state_key=True,
            fully_observed=spec.fully_observed,
        ),
        concurrency=_CONCURRENCY[spec.concurrency],
        restores_versions=spec.restores,
    )
