"""Wrong servers: faults of leases, connections, errors and companions."""

from typing import Any

from google.rpc import error_details_pb2

from starpod.v1 import environment_pb2 as pb
from tests.tools.check.faults.faulty import Faulty
from tests.tools.check.reference_server import Seat
from tests.tools.check.refused import Refused


class NeverReaps(Faulty, reported="C-73 F-12"):
    """Sessions outlive their leases."""

    def seat(self, seat: Seat) -> pb.Session:
        seat.lease = 3600.0
        return super().seat(seat)


class StepsDoNotRenew(Faulty, reported="C-74"):
    """Only Renew and Render renew a lease."""

    renewing = False

    def touch(self, seat: Seat) -> None:
        if self.renewing:
            super().touch(seat)

    async def renew(self, request: pb.RenewRequest) -> pb.RenewResponse:
        self.renewing = True
        try:
            return await super().renew(request)
        finally:
            self.renewing = False

    async def render(self, request: pb.RenderRequest) -> pb.RenderResponse:
        reply = await super().render(request)
        super().touch(self.seats[request.session_id])
        return reply


class RenewsNothing(Faulty, reported="C-74"):
    """The lease counts from the start of the session."""

    def touch(self, seat: Seat) -> None:
        return


class HidesThePlace(Faulty, reported="C-38"):
    """OUT_OF_ORDER does not tell what was expected."""

    def out_of_order(self, seat: Seat, reason: str = "OUT_OF_ORDER") -> Refused:
        return Refused(reason, "no")


class SendsBareErrors(Faulty, reported="C-38 C-89 C-90 C-91 C-92 N-06"):
    """Errors without google.rpc details."""

    def explain(self, error: Refused) -> None:
        del error.status.details[:]


class HidesSomeReasons(Faulty, reported="C-89 C-92 N-06"):
    """UNSUPPORTED, INCOMPATIBLE_SNAPSHOT and OVERLOADED give no advice."""

    def explain(self, error: Refused) -> None:
        for detail in error.status.details:
            info = error_details_pb2.ErrorInfo()
            if detail.Unpack(info) and info.reason in ("UNSUPPORTED", "INCOMPATIBLE_SNAPSHOT", "OVERLOADED"):
                del info.metadata["advice"]
                detail.Pack(info)


class TrustsTraces(Faulty, reported="C-96"):
    """A malformed traceparent makes a Step one without actions."""

    async def Step(self, request: Any, context: Any) -> Any:  # noqa: N802 - gRPC's name
        if dict(context.invocation_metadata()).get("traceparent") == "nonsense":
            del request.actions[:]
        return await super()._unary(context, self.step(request))


class HasNoHealth(Faulty, reported="C-93"):
    """grpc.health.v1 is not served."""

    health = False


class HasNoReflection(Faulty, reported="C-94"):
    """Server reflection is not served."""

    reflection = False


class TimesBackwards(Faulty, reported="C-97"):
    """The server-timing trailer reports more time for the environment than for the whole call."""

    async def _unary(self, context: Any, work: Any) -> Any:
        context.set_trailing_metadata((("server-timing", "environment;dur=2.5, queue;dur=0, total;dur=1.5"),))
        return await super()._unary(context, work)
