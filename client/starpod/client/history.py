"""The log of a session, from which its state can be rebuilt, and the comparison of a replay with it.

An episode is logged like an `EpisodePath`: its origin (the call that began it) and the steps and reseedings since. Each
step is logged with a digest of its reply, so that a replay can be compared step by step. This module does no I/O.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass

from google.protobuf import struct_pb2
from google.protobuf.message import Message

from starpod.client.errors import ReplayDiverged
from starpod.client.observation import Actions
from starpod.v1 import environment_pb2 as pb
from starpod.v1.values import EndReason

Reply = tuple[bytes, int]
"""State key of a reply, and a digest of its other fields. The digest is made with `hash`, which is fast but only
comparable within one process."""


@dataclass(slots=True)
class Opened:
    """Origin of an episode that began with Open, or with Reset of a session whose options are known."""

    # Not frozen: one is made per episode, and a frozen dataclass takes four times as long to make.

    environment_id: str
    version: str
    options: struct_pb2.Struct | None
    seed: int
    dynamics_seed: int
    limits: pb.Limits
    want: pb.Want
    lease_seconds: float


@dataclass(frozen=True, slots=True)
class Restored:
    """Origin of an episode that began with Restore. The snapshot holds options, limits and random states."""

    snapshot: pb.SessionSnapshot
    version: str
    """Version that the server restored it with; it may be newer than the snapshot's."""
    want: pb.Want
    lease_seconds: float
    reset: pb.ResetRequest | None = None
    """The Reset that began the episode after Restore, if there was one: only the snapshot has the session's options."""


Origin = Opened | Restored


class History:
    """The log of one episode so far.

    Attributes:
        origin: the call that began the episode.
        actions: the actions of each step.
        wants: the `want` of each step that had one, by step number from 1.
        reseedings: dynamics seeds that forks gave the episode, by the number of steps before the fork.
        keys: state keys of the replies. Entry 0 is of the first observation, entry i of the reply to step i.
        digests: digests of the replies, with the same indices; 0 is not compared. They are an array,
            because freeing one Python object per step would make the next reset slow.
    """

    __slots__ = ("actions", "digests", "keys", "origin", "reseedings", "wants")

    def __init__(self, origin: Origin, first: Reply | None) -> None:
        self.begin(origin, first)

    def begin(self, origin: Origin, first: Reply | None) -> None:
        """Begin the log of a new episode, or restart the log of the current episode from a snapshot."""
        self.origin = origin
        self.actions: list[Actions] = []
        self.wants: dict[int, pb.Want] = {}
        self.reseedings: dict[int, int] = {}
        key, digest = first or (b"", 0)
        self.keys = [key]
        self.digests = array("q", (digest,))

    def record(self, actions: Actions, reply: Reply, want: pb.Want | None = None) -> None:
        """Log a step and its reply.

        Args:
            want: optional fields that the step requested for itself; None if it used the session's.
        """
        self.actions.append(actions)
        self.keys.append(reply[0])
        self.digests.append(reply[1])
        if want is not None:
            self.wants[len(self.actions)] = want

    def reseed(self, dynamics_seed: int) -> None:
        """Log a fork that gave the episode a new dynamics seed."""
        self.reseedings[len(self.actions)] = dynamics_seed

    def copy(self) -> History:
        """Return an independent copy of the log."""
        history = History(self.origin, None)
        history.actions, history.wants, history.reseedings = self.actions[:], dict(self.wants), dict(self.reseedings)
        history.keys, history.digests = self.keys[:], self.digests[:]
        return history

    def check(self, step: int, reply: Reply) -> None:
        """Raise ReplayDiverged unless a replayed step has the logged reply. State keys are compared if both have one.

        Args:
            step: index of the step; 0 is the reply that began the episode.
        """
        (key, digest), (replayed_key, replayed_digest) = (self.keys[step], self.digests[step]), reply
        if key and replayed_key and key != replayed_key:
            raise ReplayDiverged(step, key, replayed_key, "another state")
        if digest not in (0, replayed_digest):
            raise ReplayDiverged(step, key, replayed_key, "another observation, reward, outcome or end")

    def refused(self, step: int, reason: str) -> ReplayDiverged:
        """Return the error for a replay in which the server refused a step of the original episode."""
        return ReplayDiverged(step, self.keys[step], b"", f"the step was refused: {reason}")

    @property
    def environment(self) -> tuple[str, str]:
        """Id and version of the environment. A replay needs exactly this version."""
        origin = self.origin
        source = origin if isinstance(origin, Opened) else origin.snapshot
        return source.environment_id, origin.version


# --- digests of replies ----------------------------------------------------------------------------------------------


def first_reply(observation: pb.Observation, instructions: str = "") -> Reply:
    """Return key and digest of the reply to Open, Reset, Restore or Fork."""
    return observation.state_key, hash((_content(observation), _details(observation), instructions))


def first_row(text: str, state_key: bytes, instructions: str) -> Reply:
    """Return what `first_reply` returns, for a row of columns. state_key: empty if it was not requested."""
    return state_key, hash((text, (), instructions))


def step_reply(transition: pb.Transition) -> Reply:
    """Return key and digest of the reply to a step, without its free-form `info`.

    A reply that could also travel as a row of columns has the digest that `deliver` computes for that row.
    """
    flags = tuple(outcome.executed + 2 * outcome.valid + 4 * outcome.effective for outcome in transition.outcomes)
    shares = tuple(outcome.reward for outcome in transition.outcomes)
    digest = hash(
        (
            _content(transition.observation),
            transition.reward,
            flags[0] if len(flags) == 1 else flags,
            shares[0] if len(shares) == 1 else shares,
        )
    )
    success = transition.success if transition.HasField("success") else None
    reason, end_flags = EndReason(transition.end_reason), (transition.terminated, transition.truncated)
    if reason or success is not None or any(end_flags):
        digest = hash((digest, reason, success, *end_flags))
    extra_fields = (
        tuple(sorted(transition.reward_parts.items())),
        tuple(sorted(transition.criteria.items())),
        _details(transition.observation),
    )
    if any(extra_fields):
        digest = hash((digest, extra_fields))
    return transition.observation.state_key, digest


def digest_end(digest: int, reason: EndReason, success: bool | None) -> int:
    """Return the digest of a row that ended the episode.

    Args:
        digest: digest of the row's text, reward, flags and shares.
        success: whether the goal was reached; None if the environment does not say.
    """
    return hash((digest, reason, success, reason == EndReason.TERMINAL, reason > EndReason.TERMINAL))


def _content(observation: pb.Observation) -> object:
    parts = observation.parts
    if len(parts) == 1 and parts[0].WhichOneof("kind") == "text":
        return parts[0].text
    return tuple(map(_bytes, parts))


def _details(observation: pb.Observation) -> tuple[object, ...]:
    """Return the optional fields (valid actions, expert action, score, agent), or () if all of them are absent."""
    valid_actions, agent = observation.valid_actions, observation.agent_id
    has_expert, has_score = observation.HasField("expert_action"), observation.HasField("score")
    if not (valid_actions or agent or has_expert or has_score):
        return ()
    return (
        tuple(map(_bytes, valid_actions)),
        _bytes(observation.expert_action) if has_expert else None,
        observation.score if has_score else None,
        agent,
    )


def _bytes(message: Message) -> bytes:
    return message.SerializeToString(deterministic=True)
