"""The recovery log: all that is needed to bring a session to its present state again, on another server.

An episode is its origin (how it came to be) and the turns since. Each turn is logged with what came back, as a state
key and a digest, so that a replay is checked step by step.
"""

from __future__ import annotations

from dataclasses import dataclass

from google.protobuf import struct_pb2

from starpod.client.errors import ReplayDiverged
from starpod.client.observation import Turn
from starpod.v1 import environment_pb2 as pb


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
    """One episode so far. Entry 0 of `keys` and `digests` is the first observation, entry i the reply to turn i.

    A digest of None is not checked: what the environment shows need not come out the same.
    """

    __slots__ = ("digests", "keys", "origin", "turns")

    def __init__(self, origin: Origin, key: bytes, digest: int | None) -> None:
        self.begin(origin, key, digest)

    def begin(self, origin: Origin, key: bytes, digest: int | None) -> None:
        """A new episode, or a new starting point of the present one: what was before is forgotten."""
        self.origin = origin
        self.turns: list[Turn] = []
        self.keys: list[bytes] = [key]
        self.digests: list[int | None] = [digest]

    def record(self, turn: Turn, key: bytes, digest: int) -> None:
        """One more turn, with the state key and the digest of its reply."""
        self.turns.append(turn)
        self.keys.append(key)
        self.digests.append(digest)

    def copy(self) -> History:
        """The same episode up to now; what happens later to either does not touch the other."""
        twin = History(self.origin, b"", 0)
        twin.turns, twin.keys, twin.digests = self.turns[:], self.keys[:], self.digests[:]
        return twin

    def check(self, step: int, key: bytes, digest: int) -> None:
        """Raises ReplayDiverged unless entry `step` had this state key (where both are known) and this digest."""
        expected = self.keys[step]
        if expected and key and expected != key:
            raise ReplayDiverged(step, expected, key, "another state")
        if self.digests[step] not in (None, digest):
            raise ReplayDiverged(step, expected, key, "another observation or reward")

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


def digest_observation(observation: pb.Observation, reward: float = 0.0) -> int:
    """Digest of a reply, for comparison within this process, where `hash` is stable and cheap. `hash((text, reward))`
    where the observation is one text. Pictures are left out: they come and go with what a single call wants.
    """
    parts = observation.parts
    texts: list[str | bytes] = []
    for part in parts:
        match part.WhichOneof("kind"):
            case "text":
                texts.append(part.text)
            case "json":
                texts.append(part.json)
            case "tensor":
                texts.append(part.tensor.data)
    return hash((texts[0] if len(texts) == 1 else tuple(texts), reward))
