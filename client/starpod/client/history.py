"""The log of a session: all that is needed to bring it to its present state again, and the comparison of a replay.

An episode is its origin (how it came to be) and the steps since. Each is logged with what came back, field by field, so
that a replay is compared step by step. Pure: no I/O.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import zip_longest

from google.protobuf import struct_pb2
from google.protobuf.message import Message

from starpod.client.errors import ReplayDiverged
from starpod.client.observation import Actions, EndReason
from starpod.v1 import environment_pb2 as pb

Reply = tuple[object, ...]
"""What a call gave, field by field as FIELDS names them: numbers as they are, digests of what may be long. Trailing
fields that are empty are left out. Digests are comparable within this process, where `hash` is stable and cheap."""

FIELDS = (
    "state key",
    "observation",
    "reward",
    "outcomes (executed, valid, effective)",
    "rewards of the sub-actions",
    "end of the episode",
    "reward parts",
    "criteria",
    "valid actions",
    "expert action",
    "score",
    "agent",
    "instructions",
)
_READABLE = ("reward", "rewards of the sub-actions", "score")


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
    replies: entry 0 is the first observation, entry i the reply to step i. None is not compared: what the environment
        shows need not come out the same.
    """

    __slots__ = ("actions", "origin", "replies", "wants")

    def __init__(self, origin: Origin, first: Reply | None) -> None:
        self.begin(origin, first)

    def begin(self, origin: Origin, first: Reply | None) -> None:
        """A new episode, or a new starting point of the present one: what was before is forgotten."""
        self.origin = origin
        self.actions: list[Actions] = []
        self.replies: list[Reply | None] = [first]
        self.wants: dict[int, pb.Want] = {}

    def record(self, actions: Actions, reply: Reply, want: pb.Want | None = None) -> None:
        """One more step, with what came back."""
        self.actions.append(actions)
        self.replies.append(reply)
        if want is not None:
            self.wants[len(self.actions)] = want

    def copy(self) -> History:
        """The same episode up to now; what happens later to either does not touch the other."""
        copied = History(self.origin, None)
        copied.actions, copied.replies, copied.wants = self.actions[:], self.replies[:], dict(self.wants)
        return copied

    def check(self, step: int, found: Reply) -> None:
        """Raises ReplayDiverged unless entry `step` was this reply. A state key is compared where both have one."""
        expected = self.replies[step]
        if expected is None or expected == found:
            return
        for name, before, now in zip_longest(FIELDS, expected, found):
            if before == now or (name == "state key" and not (before and now)):
                continue
            what = f"another {name}: {before} became {now}" if name in _READABLE else f"another {name}"
            raise ReplayDiverged(step, _key(expected), _key(found), what)

    def refused(self, step: int, reason: str) -> ReplayDiverged:
        """The error of a replay whose step was refused, though it was taken at first."""
        return ReplayDiverged(step, _key(self.replies[step]), b"", f"the step was refused: {reason}")

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


def _key(reply: Reply | None) -> bytes:
    key = reply[0] if reply else b""
    assert isinstance(key, bytes)
    return key


# --- what is compared ------------------------------------------------------------------------------------------------


def first_reply(observation: pb.Observation, instructions: str = "") -> Reply:
    """What Open, Reset, Restore or Fork gave."""
    return _trim((*_observed(observation), *[None] * 6, *_details(observation), instructions))


def step_reply(transition: pb.Transition) -> Reply:
    """What a step gave, all but the free-form `info`. For one text, a reward and flags it is the same as for the row
    of columns that says the same: `(key, hash(text), reward, flags, shares)`, and the end where there is one."""
    outcomes = transition.outcomes
    flags = tuple(outcome.executed + 2 * outcome.valid + 4 * outcome.effective for outcome in outcomes)
    shares = tuple(outcome.reward for outcome in outcomes)
    reason = EndReason(transition.end_reason)
    success = transition.success if transition.HasField("success") else None
    over = transition.terminated, transition.truncated
    return _trim(
        (
            *_observed(transition.observation),
            transition.reward,
            flags[0] if len(flags) == 1 else flags,
            shares[0] if len(shares) == 1 else shares,
            (reason, success, *over) if reason or success is not None or any(over) else None,
            _digest(sorted(transition.reward_parts.items())),
            _digest(sorted(transition.criteria.items())),
            *_details(transition.observation),
        )
    )


def ended(reply: Reply, reason: EndReason, success: bool | None) -> Reply:
    """The reply of a row at which the episode ended."""
    return *reply, (reason, success, reason == EndReason.TERMINAL, reason > EndReason.TERMINAL)


def _observed(observation: pb.Observation) -> tuple[bytes, int]:
    parts = observation.parts
    if len(parts) == 1 and parts[0].WhichOneof("kind") == "text":
        return observation.state_key, hash(parts[0].text)
    return observation.state_key, hash(tuple(map(_bytes, parts)))


def _details(observation: pb.Observation) -> tuple[object, ...]:
    """What most observations lack."""
    valid_actions = observation.valid_actions
    return (
        _digest(map(_bytes, valid_actions)) if valid_actions else None,
        hash(_bytes(observation.expert_action)) if observation.HasField("expert_action") else None,
        observation.score if observation.HasField("score") else None,
        observation.agent_id or None,
    )


def _digest(items: Iterable[object]) -> int | None:
    found = tuple(items)
    return hash(found) if found else None


def _bytes(message: Message) -> bytes:
    return message.SerializeToString(deterministic=True)


def _trim(fields: tuple[object, ...]) -> Reply:
    """Without the empty fields at the end, down to those that a row of columns has."""
    count = len(fields)
    while count > 5 and fields[count - 1] in (None, ""):
        count -= 1
    return fields[:count]
