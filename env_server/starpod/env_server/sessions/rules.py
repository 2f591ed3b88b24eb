"""Rules of the contract that need no server: options, order, repeats, digests."""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Sequence
from typing import Any

from google.protobuf.message import Message
from pydantic import ValidationError

from starpod.env_server.environment import Environment, EnvironmentOptions
from starpod.env_server.episode import Transition
from starpod.env_server.errors import MAX_VIOLATIONS, CallError
from starpod.env_server.sessions.session import Session
from starpod.v1 import environment_pb2 as pb

SHORT_TEXT = 1_024
"""Characters of a turn's actions that are kept as they are; of longer ones a digest."""


def parse_options(environment: type[Environment], values: dict[str, Any]) -> EnvironmentOptions:
    """The options of an environment. Raises BAD_ARGUMENT that names each wrong one and, for unknown ones, the known."""
    if not values:
        return _default_options(environment)
    try:
        return environment.Options.model_validate(values)
    except ValidationError as error:
        known = ", ".join(environment.Options.model_fields) or "none"
        violations = []
        problems = error.errors(include_url=False, include_input=False, include_context=False)
        more = len(problems) - MAX_VIOLATIONS
        for problem in problems[:MAX_VIOLATIONS]:
            path = "options." + ".".join(map(str, problem["loc"])) if problem["loc"] else "options"
            text = problem["msg"]
            if problem["type"] == "extra_forbidden":
                text = f"is not an option of {environment.spec.id}; it has: {known}"
            violations.append((path, text))
    message = "; ".join(f"{path}: {text}" for path, text in violations)
    if more > 0:
        message = f"{message}; and {more} more"
    raise CallError("BAD_ARGUMENT", message, violations=violations)


@functools.cache
def _default_options(environment: type[Environment]) -> EnvironmentOptions:
    return environment.Options()


def describe_session(message: pb.Session, session: Session, observation: pb.Observation) -> None:
    """Writes into an empty message."""
    message.session_id = session.id
    message.epoch = session.epoch
    message.step_index = session.next_index
    message.seed = session.seed
    message.dynamics_seed = session.dynamics_seed
    message.member = session.member
    message.observation.CopyFrom(observation)


def digest_actions(actions: Sequence[pb.Action | str]) -> tuple[str, ...] | bytes:
    """What a turn is recognised by when it is sent again: short texts by themselves, all else by a digest.

    Of the request, not of what the environment was given: an environment may change that.
    """
    texts = [
        action if isinstance(action, str) else action.text
        for action in actions
        if isinstance(action, str) or action.WhichOneof("kind") == "text"
    ]
    if len(texts) < len(actions):
        whole: Message = pb.StepRequest(actions=actions)  # type: ignore[arg-type]
    elif sum(map(len, texts)) <= SHORT_TEXT:
        return tuple(texts)
    else:
        whole = pb.StepColumns(actions=texts)
    return hashlib.blake2b(whole.SerializeToString(), digest_size=16).digest()


def replay_reply(
    session: Session, epoch: int, index: int, actions: Sequence[pb.Action | str]
) -> Transition | pb.Transition:
    """The last reply again, if this is the last step again. Raises OUT_OF_ORDER otherwise."""
    reply = session.last_reply
    if (
        epoch == session.epoch
        and index == session.next_index - 1
        and reply is not None
        and digest_actions(actions) == session.last_request
    ):
        return reply if isinstance(reply, Transition) else pb.Transition.FromString(reply)
    raise out_of_order(session, epoch, index)


def out_of_order(session: Session, epoch: int, index: int) -> CallError:
    """OUT_OF_ORDER, or EPISODE_OVER where only that stands against the call; with what was expected."""
    expected = {"expected_epoch": str(session.epoch), "expected_step_index": str(session.next_index)}
    if (epoch, index) == (session.epoch, session.next_index):
        return CallError("EPISODE_OVER", "the episode is over; reset the session first", expected)
    if (epoch, index) == (session.epoch, session.next_index - 1):
        problem = f"step {index} was already made with other actions"
    else:
        problem = f"got epoch {epoch}, step {index}"
    return CallError("OUT_OF_ORDER", f"{problem}; expected epoch {session.epoch}, step {session.next_index}", expected)


def unsupported(environment: type[Environment], capability: str, problem: str) -> CallError:
    spec = environment.spec
    return CallError("UNSUPPORTED", f"{spec.id} {spec.version} {problem}", {"capability": capability})


def digest_snapshot(environment_id: str, version: str, state: bytes) -> bytes:
    """SHA-256 as the protocol defines it."""
    return hashlib.sha256(b"\0".join((environment_id.encode(), version.encode(), state))).digest()
