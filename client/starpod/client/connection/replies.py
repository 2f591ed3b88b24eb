"""Validation of replies. A server may be broken, hostile or of another version, so each reply is checked first.

A reply that breaks the protocol raises ServerBug in the call that it answers; its rewards never reach a trainer.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import isfinite
from typing import Any

from google.protobuf import struct_pb2
from google.protobuf.message import Message

from starpod.client.versions import satisfies
from starpod.v1 import environment_pb2 as pb
from starpod.v1.values import DEEPEST_INFO, MAX_REWARD, EndReason


class BrokenReply(ValueError):
    """A reply breaks the protocol; the message says how."""


def check_reply(request: Message, response: Message) -> None:
    """Raise BrokenReply if a response does not fit its request. For steps there is `check_transition`."""
    match request, response:
        case pb.OpenRequest(), pb.OpenResponse():
            _expect_sessions(response.sessions, request.count or 1)
            if not satisfies(response.environment_version, request.version):
                raise BrokenReply(f"asked for version {request.version}, it opened {response.environment_version!r}")
            for name in ("seed", "dynamics_seed"):
                values = {getattr(session, name) for session in response.sessions}
                if request.HasField(name) and values != {getattr(request, name)}:
                    raise BrokenReply(f"asked for {name} {getattr(request, name)}, it opened {sorted(values)}")
        case pb.ForkRequest(), pb.ForkResponse():
            _expect_sessions(response.sessions, request.count or 1)
        case pb.RestoreRequest(), pb.RestoreResponse():
            _expect_sessions(response.sessions, 1)
        case pb.ResetRequest(), pb.ResetResponse():
            _expect_sessions([response.session], 1)
            if request.HasField("seed") and response.session.seed != request.seed:
                raise BrokenReply(f"asked for seed {request.seed}, it began {response.session.seed}")


def check_transition(transition: pb.Transition, actions: int) -> None:
    """Raise BrokenReply if the reply to a step with that number of actions breaks the protocol."""
    check_rewards([transition.reward])
    if transition.reward_parts:
        check_rewards(list(transition.reward_parts.values()))
    if len(transition.outcomes) != actions:
        raise BrokenReply(f"{len(transition.outcomes)} outcomes for {actions} sub-actions")
    check_rewards([outcome.reward for outcome in transition.outcomes])
    reason = int(transition.end_reason)
    if (transition.terminated, transition.truncated) != (reason == EndReason.TERMINAL, reason > EndReason.TERMINAL):
        raise BrokenReply(
            f"terminated {transition.terminated}, truncated {transition.truncated} and end_reason {reason}"
        )
    if transition.HasField("info"):
        _check_struct(transition.info)
    _check_observation(transition.observation)


def check_rewards(rewards: Sequence[float]) -> None:
    """Raise BrokenReply if a reward is not finite or its magnitude exceeds MAX_REWARD. This takes no Python loop."""
    if rewards and not (isfinite(sum(rewards)) and min(rewards) >= -MAX_REWARD and max(rewards) <= MAX_REWARD):
        bad_reward = next(reward for reward in rewards if not abs(reward) <= MAX_REWARD)
        raise BrokenReply(f"a reward of {bad_reward}; rewards are finite and at most {MAX_REWARD:g}")


def _expect_sessions(sessions: Sequence[pb.Session], count: int) -> None:
    ids = {session.session_id for session in sessions}
    if len(sessions) != count or len(ids) != count or "" in ids:
        raise BrokenReply(f"{len(ids)} sessions with different ids, asked for {count}")
    for session in sessions:
        _check_observation(session.observation)


def _check_observation(observation: pb.Observation) -> None:
    if observation.HasField("score") and not isfinite(observation.score):
        raise BrokenReply(f"a score of {observation.score}")


def _check_struct(info: struct_pb2.Struct) -> None:
    level: list[Any] = [info]
    for _ in range(DEEPEST_INFO):
        next_level: list[Any] = []
        for value in level:
            values = value.fields.values() if isinstance(value, struct_pb2.Struct) else value.values
            for item in values:
                kind = item.WhichOneof("kind")
                if kind == "number_value" and not isfinite(item.number_value):
                    raise BrokenReply(f"info holds {item.number_value}, which is not JSON")
                if kind in ("struct_value", "list_value"):
                    next_level.append(getattr(item, kind))
        if not next_level:
            return
        level = next_level
    raise BrokenReply(f"info is nested more than {DEEPEST_INFO} deep")
