"""Wrong servers: each breaks the reference server in one way, and names the requirements that it breaks by it."""

from __future__ import annotations

import asyncio
import copy
from collections.abc import AsyncIterator
from contextvars import ContextVar
from typing import Any, ClassVar

from starpod.v1 import environment_pb2 as pb
from tests.client.check.reference_server import ReferenceService, Seat
from tests.client.check.refused import Refused
from tests.client.check.walk import NAMES

IN_HURRY = ContextVar("IN_HURRY", default=False)


class Faulty(ReferenceService):
    """reported: requirements that the check must find broken. perhaps: others that timing may break as well."""

    reported: ClassVar[tuple[str, ...]]
    perhaps: ClassVar[tuple[str, ...]] = ()


# --- Open ---------------------------------------------------------------------------------------------------------


class CutsSeeds(Faulty):
    """Seeds are kept in 32 bits."""

    reported = ("C-08",)
    perhaps = ("C-09",)

    async def open_anew(self, request: pb.OpenRequest) -> pb.OpenResponse:
        if request.HasField("seed"):
            request.seed &= 0xFFFFFFFF
        return await super().open_anew(request)


class GroupsShareLuck(Faulty):
    """Every member of a group gets the same dynamics seed."""

    reported = ("C-11",)

    def derive(self, seed: int, member: int) -> int:
        return super().derive(seed, 0)


class CountsSessions(Faulty):
    """The initial state depends on how many sessions there were before: not deterministic."""

    reported = ("C-79",)
    perhaps = ("C-63",)
    opened = 0

    def start(self, options: dict[str, Any], seed: int, dynamics_seed: int) -> Any:
        walk = super().start(options, seed, dynamics_seed)
        self.opened += 1
        walk.position = self.opened % (walk.length - 1)
        return walk


class SaltsByProcess(Faulty):
    """The initial state depends on the process, as with a salted hash."""

    reported = ("C-80",)
    processes = 0

    def __init__(self) -> None:
        super().__init__()
        self.salt = SaltsByProcess.processes = SaltsByProcess.processes + 1

    def start(self, options: dict[str, Any], seed: int, dynamics_seed: int) -> Any:
        walk = super().start(options, seed, dynamics_seed)
        walk.position = self.salt % 3
        return walk


class RacesOnKeys(Faulty):
    """The key is remembered only once the sessions exist, so calls at the same time all create some."""

    reported = ("C-14", "F-08", "N-08")
    perhaps = ("C-82",)

    async def once(self, request: Any, create: Any) -> Any:
        if request.key and request.key not in self.keys and len(request.key.encode()) <= 128:
            reply = asyncio.ensure_future(create())
            await asyncio.sleep(0.3)
            await reply
            self.keys[request.key] = (
                type(request).__name__.encode() + request.SerializeToString(deterministic=True),
                reply,
            )
            return reply.result()
        return await super().once(request, create)


class IgnoresOptions(Faulty):
    """Unknown options are dropped in silence."""

    reported = ("C-19", "C-56", "C-89")

    def read_options(self, struct: Any) -> dict[str, Any]:
        for name in set(struct.fields) - {"length", "slip"}:
            del struct.fields[name]
        return super().read_options(struct)


class GuessesOptions(Faulty):
    """An option of a wrong type is replaced by its default."""

    reported = ("C-20",)

    def read_options(self, struct: Any) -> dict[str, Any]:
        for name in ("length", "slip"):
            if name in struct.fields and not struct.fields[name].HasField("number_value"):
                del struct.fields[name]
        return super().read_options(struct)


# --- Step and Reset -----------------------------------------------------------------------------------------------


class PlaysRepeats(Faulty):
    """A repeated Step gets the cached reply, but the turn is played again all the same."""

    reported = ("C-32", "C-33", "S-08")
    perhaps = ("C-81", "S-07", "S-09")

    def cached(self, seat: Seat, request: pb.StepRequest) -> pb.StepResponse | None:
        known = super().cached(seat, request)
        if known is not None:
            for action in request.actions:
                seat.walk.step(action.text)
        return known


class AnswersOtherActions(Faulty):
    """The last index has the last reply, whatever the actions."""

    reported = ("C-34",)

    def cached(self, seat: Seat, request: pb.StepRequest) -> pb.StepResponse | None:
        at_last = seat.last is not None and (request.epoch, request.step_index) == (seat.epoch, seat.index - 1)
        return seat.last[1] if seat.last and at_last else None


class CutsIndices(Faulty):
    """Indices are kept in eight bits."""

    reported = ("C-35",)

    async def step(self, request: pb.StepRequest) -> pb.StepResponse:
        request.step_index &= 0xFF
        return await super().step(request)


class ForgetsEpochs(Faulty):
    """A Step of an older epoch is played in the present episode."""

    reported = ("C-37",)

    async def step(self, request: pb.StepRequest) -> pb.StepResponse:
        seat = self.seats.get(request.session_id)
        if seat and request.epoch < seat.epoch:
            request.epoch = seat.epoch
        return await super().step(request)


class AbandonsWork(Faulty):
    """A Step whose caller has gone stops half-way: the state has moved, the index has not."""

    reported = ("C-81",)

    async def _unary(self, context: Any, work: Any) -> Any:
        IN_HURRY.set(context.time_remaining() < 1.0)
        try:
            return await work  # not shielded: cancelled with the call
        except Refused as error:
            return await super()._unary(context, _raise(error))

    async def step(self, request: pb.StepRequest) -> pb.StepResponse:
        seat = self.find(request.session_id)
        walk = copy.copy(seat.walk)
        next_call = (request.epoch, request.step_index) == (seat.epoch, seat.index)
        if IN_HURRY.get() and next_call and not seat.over:
            for action in request.actions:
                seat.walk.step(action.text)
            await asyncio.sleep(0.6)
            seat.walk = walk
        return await super().step(request)


async def _raise(error: Refused) -> None:
    raise error


class GoesOnAfterTheEnd(Faulty):
    """A Step after the end of the episode is played."""

    reported = ("C-47", "C-89")

    async def step(self, request: pb.StepRequest) -> pb.StepResponse:
        seat = self.seats.get(request.session_id)
        if seat and seat.over and request.step_index == seat.index:
            seat.over = False
        return await super().step(request)


class FailsOnBadActions(Faulty):
    """An action that the environment does not know is an error."""

    reported = ("C-48", "S-12")

    def check_actions(self, actions: Any) -> None:
        super().check_actions(actions)
        for place, action in enumerate(actions):
            if action.HasField("text") and action.text.lower() not in NAMES:
                raise Refused("BAD_ARGUMENT", f"there are {NAMES}", f"actions[{place}]")


class EndsTwice(Faulty):
    """The end of the task also counts as truncated."""

    reported = ("C-46",)

    def end(self, seat: Seat, transition: pb.Transition) -> None:
        super().end(seat, transition)
        transition.truncated |= transition.terminated


# --- observations and frames --------------------------------------------------------------------------------------


class KeysOfHistory(Faulty):
    """The state key counts turns."""

    reported = ("C-63",)

    def __init__(self) -> None:
        super().__init__()
        self.turns: dict[str, int] = {}

    def tell(self, seat: Seat) -> pb.Session:
        self.turns[seat.id] = seat.index
        return super().tell(seat)

    def play(self, seat: Seat, request: pb.StepRequest) -> pb.Transition:
        self.turns[seat.id] += 1
        return super().play(seat, request)

    def state_key(self, seat: Seat) -> bytes:
        return super().state_key(seat) + bytes([self.turns[seat.id]])


class ScoresAboveOne(Faulty):
    """The score is not in [0, 1]."""

    reported = ("C-65",)

    def score(self, seat: Seat) -> float:
        return 3.0 * super().score(seat)


class DrawsWithLuck(Faulty):
    """Render takes a number from the random stream of the transitions."""

    reported = ("C-69",)

    async def render(self, request: pb.RenderRequest) -> pb.RenderResponse:
        reply = await super().render(request)
        self.seats[request.session_id].walk.draws += 1
        return reply


class HangsOnRender(Faulty):
    """Render of HTML never ends."""

    reported = ("C-67", "C-69")

    async def render(self, request: pb.RenderRequest) -> pb.RenderResponse:
        if request.mode == "html":
            await asyncio.sleep(3600)
        return await super().render(request)


# --- leases and connections ---------------------------------------------------------------------------------------


class NeverReaps(Faulty):
    """Sessions outlive their leases."""

    reported = ("C-73",)

    def seat(self, seat: Seat) -> pb.Session:
        seat.lease = 3600.0
        return super().seat(seat)


class RenewsNothing(Faulty):
    """The lease counts from the start of the session."""

    reported = ("C-74",)

    def touch(self, seat: Seat) -> None:
        return


# --- errors and companions ----------------------------------------------------------------------------------------


class HidesThePlace(Faulty):
    """OUT_OF_ORDER does not tell what was expected."""

    reported = ("C-38",)

    def out_of_order(self, seat: Seat, reason: str = "OUT_OF_ORDER") -> Refused:
        return Refused(reason, "no")


class SendsBareErrors(Faulty):
    """Errors without google.rpc details."""

    reported = ("C-38", "C-89", "C-90", "C-91", "C-92")

    async def _unary(self, context: Any, work: Any) -> Any:
        async def stripped() -> Any:
            try:
                return await work
            except Refused as error:
                del error.status.details[:]
                raise

        return await super()._unary(context, stripped())


class HasNoHealth(Faulty):
    """grpc.health.v1 is not served."""

    reported = ("C-93",)
    health = False


class HasNoReflection(Faulty):
    """Server reflection is not served."""

    reported = ("C-94",)
    reflection = False


class TimesBackwards(Faulty):
    """The server-timing trailer tells more for the environment than for the whole call."""

    reported = ("C-97",)

    async def _unary(self, context: Any, work: Any) -> Any:
        context.set_trailing_metadata((("server-timing", "environment;dur=2.5, queue;dur=0, total;dur=1.5"),))
        return await super()._unary(context, work)


# --- Stream -------------------------------------------------------------------------------------------------------


class ReversesBatches(Faulty):
    """The calls of a message are begun last to first."""

    reported = ("S-02", "S-03")

    async def Stream(self, requests: Any, context: Any) -> AsyncIterator[pb.StreamResponse]:  # noqa: N802 - gRPC's name
        async def reversed_calls() -> AsyncIterator[pb.StreamRequest]:
            async for message in requests:
                yield pb.StreamRequest(calls=reversed(message.calls), steps=message.steps)

        async for reply in super().Stream(reversed_calls(), context):
            yield reply


class EndsStreamOnErrors(Faulty):
    """One bad call ends the Stream."""

    reported = ("S-04", "S-05", "S-10", "S-13", "S-14")
    perhaps = ("S-09",)

    async def reply(self, call: pb.Call) -> pb.Reply:
        reply = await super().reply(call)
        return pb.Reply() if reply.HasField("error") else reply

    async def Stream(self, requests: Any, context: Any) -> AsyncIterator[pb.StreamResponse]:  # noqa: N802 - gRPC's name
        async for response in super().Stream(requests, context):
            if any(not reply.WhichOneof("response") for reply in response.replies):
                return
            yield response


class DropsOnHalfClose(Faulty):
    """The Stream ends as soon as the client half-closes."""

    reported = ("S-06", "S-14")

    async def Stream(self, requests: Any, context: Any) -> AsyncIterator[pb.StreamResponse]:  # noqa: N802 - gRPC's name
        ended = False

        async def watched() -> AsyncIterator[pb.StreamRequest]:
            nonlocal ended
            async for message in requests:
                yield message
            ended = True

        async for response in super().Stream(watched(), context):
            await asyncio.sleep(0.02)
            if ended:
                return
            yield response


class KillsWithTheStream(Faulty):
    """Sessions used on a Stream are closed when it is cancelled."""

    reported = ("S-07",)

    async def Stream(self, requests: Any, context: Any) -> AsyncIterator[pb.StreamResponse]:  # noqa: N802 - gRPC's name
        used: set[str] = set()

        async def watched() -> AsyncIterator[pb.StreamRequest]:
            async for message in requests:
                used.update(call.step.session_id for call in message.calls if call.HasField("step"))
                yield message

        try:
            async for response in super().Stream(watched(), context):
                yield response
        except asyncio.CancelledError:
            for session_id in used:
                self.seats.pop(session_id, None)
            raise


class TimesMeans(Faulty):
    """The timing of a message has the total of one call beside the environment's time of many."""

    reported = ("S-15",)

    def pack(self, reply: pb.Reply, columns: bool) -> pb.StreamResponse:
        response = super().pack(reply, columns)
        response.timing.environment_ms, response.timing.total_ms = 0.3, 0.2
        return response


class LosesFlags(Faulty):
    """Columns tell of every sub-action that it was effective."""

    reported = ("S-12",)

    def pack(self, reply: pb.Reply, columns: bool) -> pb.StreamResponse:
        response = super().pack(reply, columns)
        flags = [flags | 4 for flags in response.transitions.outcome_flags]
        response.transitions.outcome_flags[:] = flags
        return response


# --- Fork, Snapshot and Restore -----------------------------------------------------------------------------------


class ForksShareState(Faulty):
    """A copy has the original's state, not one of its own."""

    reported = ("F-02", "F-03", "F-05")

    async def fork_anew(self, request: pb.ForkRequest) -> pb.ForkResponse:
        reply = await super().fork_anew(request)
        for session in reply.sessions:
            self.seats[session.session_id].walk = self.seats[request.session_id].walk
        return reply


class ForksRestartLuck(Faulty):
    """A copy starts the random stream again."""

    reported = ("F-02", "F-03")

    async def fork_anew(self, request: pb.ForkRequest) -> pb.ForkResponse:
        reply = await super().fork_anew(request)
        for session in reply.sessions:
            self.seats[session.session_id].walk.draws = 0
        return reply


class ReseedsAtRandom(Faulty):
    """RESEED tells the given seed and uses another."""

    reported = ("F-05",)
    reseeded = 0

    def reseed(self, twin: Seat, dynamics_seed: int) -> None:
        super().reseed(twin, dynamics_seed)
        self.reseeded += 1
        twin.walk.luck += self.reseeded


class SnapshotsForgetLuck(Faulty):
    """The place in the random stream is not part of a snapshot."""

    reported = ("N-02", "N-07", "N-10")

    async def snapshot(self, request: pb.SnapshotRequest) -> pb.SnapshotResponse:
        walk = self.find(request.session_id).walk
        draws, walk.draws = walk.draws, 0
        try:
            return await super().snapshot(request)
        finally:
            walk.draws = draws


class TrustsDigests(Faulty):
    """Restore does not check the digest."""

    reported = ("N-04",)

    def check_digest(self, snapshot: pb.SessionSnapshot) -> None:
        return


FAULTS: tuple[type[Faulty], ...] = tuple(Faulty.__subclasses__())
