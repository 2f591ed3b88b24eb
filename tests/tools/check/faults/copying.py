"""Wrong servers: faults of Fork, Snapshot and Restore."""

from abc import abstractmethod

from starpod.v1 import environment_pb2 as pb
from tests.tools.check.faults.faulty import Faulty
from tests.tools.check.reference_server import ReferenceService, Seat


class _SpoilsCopies(ReferenceService):
    """Does something to each copy that Fork made."""

    @abstractmethod
    def spoil(self, original: Seat, twin: Seat) -> None: ...

    async def fork_anew(self, request: pb.ForkRequest) -> pb.ForkResponse:
        reply = await super().fork_anew(request)
        for session in reply.sessions:
            self.spoil(self.seats[request.session_id], self.seats[session.session_id])
        return reply


class ForksShareState(_SpoilsCopies, Faulty, reported="F-02 F-03 F-05"):
    """A copy has the original's state, not one of its own."""

    def spoil(self, original: Seat, twin: Seat) -> None:
        twin.walk = original.walk


class ForksRestartLuck(_SpoilsCopies, Faulty, reported="F-02 F-03"):
    """A copy starts the random stream again."""

    def spoil(self, original: Seat, twin: Seat) -> None:
        twin.walk.draws = 0


class ReseedsAtRandom(Faulty, reported="F-05"):
    """RESEED reports the given seed and uses another."""

    reseeded = 0

    def reseed(self, twin: Seat, dynamics_seed: int) -> None:
        super().reseed(twin, dynamics_seed)
        self.reseeded += 1
        twin.walk.luck += self.reseeded


class ForksWithoutLimits(_SpoilsCopies, Faulty, reported="F-12"):
    """A copy has the environment's own limits."""

    def spoil(self, original: Seat, twin: Seat) -> None:
        twin.limits = self.spec.limits


class ForksForAges(_SpoilsCopies, Faulty, reported="F-12"):
    """A copy has the longest lease there is."""

    def spoil(self, original: Seat, twin: Seat) -> None:
        twin.lease = self.limits.max_lease_seconds


class CopiesWithoutLimit(Faulty, reported="F-13 N-12"):
    """max_group is checked only by Open."""

    def admit(self, count: int) -> int:
        return super().admit(min(count, self.limits.max_group)) and max(1, count)

    async def open_anew(self, request: pb.OpenRequest) -> pb.OpenResponse:
        super().admit(request.count)
        return await super().open_anew(request)


class IgnoresSeedsOfKeep(Faulty, reported="F-14"):
    """dynamics_seeds without RESEED are dropped in silence."""

    async def fork_anew(self, request: pb.ForkRequest) -> pb.ForkResponse:
        if request.randomness != pb.FORK_RANDOMNESS_RESEED:
            del request.dynamics_seeds[:]
        return await super().fork_anew(request)


class SnapshotsForgetLuck(Faulty, reported="N-02 N-07 N-10"):
    """The place in the random stream is not part of a snapshot."""

    async def snapshot(self, request: pb.SnapshotRequest) -> pb.SnapshotResponse:
        walk = self.find(request.session_id).walk
        draws, walk.draws = walk.draws, 0
        try:
            return await super().snapshot(request)
        finally:
            walk.draws = draws


class TrustsDigests(Faulty, reported="N-04"):
    """Restore does not check the digest."""

    def check_digest(self, snapshot: pb.SessionSnapshot) -> None:
        return
