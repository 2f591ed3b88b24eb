"""The log of a session: all that is needed to bring it to its present state again, and the comparison of a replay.

An episode is its origin (how it came to be) and the steps since. Each is logged with a digest of what came back, so
that a replay is compared step by step. Pure: no I/O.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass

from google.protobuf import struct_pb2
from google.protobuf.message import Message

from starpod.client.errors import ReplayDiverged
from starpod.client.observation import Actions, EndReason
from starpod.v1 import environment_pb2 as pb

Reply = tuple[bytes, int]
"""State key of a reply, and a digest of all the rest. Digests are comparable within this process, where `hash` is
stable and cheap."""


@dataclass(slots=True)
class Opened:
    """The episode began with Open, or with Reset of a session whose options are known.

    Not frozen: one is made for every episode, and freezing costs more than all the rest of it.
    """

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
    """The episode began with Restore. The snapshot holds options, limits and random streams.

    version: what the server restored it to; it may be newer than the snapshot's.
    """

    snapshot: pb.SessionSnapshot
    version: str
    want: pb.Want
    lease_seconds: float


@dataclass(frozen=True, slots=True)
class Restarted:
    """The episode began with a Reset of a restored session, whose options only its snapshot knows."""

    base: Restored
    reset: pb.ResetRequest


@dataclass(frozen=True, slots=True)
class Reseeded:
    """The episode began as a copy of another one, with a random stream of its own."""

    parent: History
    dynamics_seed: int


Origin = Opened | Restored | Restarted | Reseeded


class History:
    """One episode so far.

    actions: of each step. wants: by number of the step, counted from 1, where one wanted something of its own.
    keys, digests: of the replies. Entry 0 is the first observation, entry i the reply to step i. A digest of 0 is not
        compared: what the environment shows need not come out the same. (An array, because whatever is kept for a step
        as an object of its own costs more at the next reset, when it is cold, than it did at the step.)
    """

    __slots__ = ("actions", "digests", "keys", "origin", "wants")

    def __init__(self, origin: Origin, first: Reply | None) -> None:
        self.begin(origin, first)

    def begin(self, origin: Origin, first: Reply | None) -> None:
        """A new episode, or a new starting point of the present one: what was before is forgotten."""
        self.origin = origin
        self.actions: list[Actions] = []
        self.wants: dict[int, pb.Want] = {}
        key, digest = first or (b"", 0)
        self.keys = [key]
        self.digests = array("q", (digest,))

    def record(self, actions: Actions, reply: Reply, want: pb.Want | None = None) -> None:
        """One more step, with what came back."""
        self.actions.append(actions)
        self.keys.append(reply[0])
        self.digests.append(reply[1])
        if want is not None:
            self.wants[len(self.actions)] = want

    def copy(self) -> History:
        """The same episode up to now; what happens later to either does not touch the other."""
        copied = History(self.origin, None)
        copied.actions, copied.wants = self.actions[:], dict(self.wants)
        copied.keys, copied.digests = self.keys[:], self.digests[:]
        return copied

    def check(self, step: int, found: Reply) -> None:
        """Raises ReplayDiverged unless entry `step` was this reply. A state key is compared where both have one."""
        (key, digest), (found_key, found_digest) = (self.keys[step], self.digests[step]), found
        if key and found_key and key != found_key:
            raise ReplayDiverged(step, key, found_key, "another state")
        if digest not in (0, found_digest):
            raise ReplayDiverged(step, key, found_key, "another observation, reward, outcome or end")

    def refused(self, step: int, reason: str) -> ReplayDiverged:
        """The error of a replay whose step was refused, though it was taken at first."""
        return ReplayDiverged(step, self.keys[step], b"", f"the step was refused: {reason}")

    @property
    def start(self) -> Opened | Restored | Restarted:
        """How the episode began that the line of copies goes back to."""
        origin = self.origin
        while isinstance(origin, Reseeded):
            origin = origin.parent.origin
        return origin

    @property
    def root(self) -> Opened | Restored:
        """Where the line of copies and resets began: it knows the environment, its options and its version."""
        start = self.start
        return start.base if isinstance(start, Restarted) else start

    @property
    def environment(self) -> tuple[str, str]:
        """Id and version: a replay runs on exactly this version."""
        root = self.root
        if isinstance(root, Opened):
            return root.environment_id, root.version
        return root.snapshot.environment_id, root.version


# --- what is compared ------------------------------------------------------------------------------------------------


def first_reply(observation: pb.Observation, instructions: str = "") -> Reply:
    """The reply to Open, Reset, Restore or Fork."""
    return observation.state_key, hash((_content(observation), _details(observation), instructions))


def step_reply(transition: pb.Transition) -> Reply:
    """The reply to a step, all but its free-form `info`. One text, a reward, flags and an end have the digest of the
    row of columns that says the same."""
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
    reason, over = EndReason(transition.end_reason), (transition.terminated, transition.truncated)
    if reason or success is not None or any(over):
        digest = hash((digest, reason, success, *over))
    further = (
        tuple(sorted(transition.reward_parts.items())),
        tuple(sorted(transition.criteria.items())),
        _details(transition.observation),
    )
    if any(further):
        digest = hash((digest, further))
    return transition.observation.state_key, digest


def ended(digest: int, reason: EndReason, success: bool | None) -> int:
    """The digest of a row at which the episode ended. digest: of its text, reward, flags and shares."""
    return hash((digest, reason, success, reason == EndReason.TERMINAL, reason > EndReason.TERMINAL))


def _content(observation: pb.Observation) -> object:
    parts = observation.parts
    if len(parts) == 1 and parts[0].WhichOneof("kind") == "text":
        return parts[0].text
    return tuple(map(_bytes, parts))


def _details(observation: pb.Observation) -> tuple[object, ...]:
    """Valid actions, expert's action, score and agent, which most observations lack; empty without any."""
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
