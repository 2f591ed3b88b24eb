"""Wrong servers: each breaks the reference server in one way, and names the requirements that it breaks by it."""

from __future__ import annotations

import asyncio
import copy
import secrets
from abc import abstractmethod
from collections.abc import AsyncIterator
from contextvars import ContextVar
from typing import Any, ClassVar

import grpc
from google.protobuf import struct_pb2
from google.rpc import error_details_pb2

from starpod.v1 import environment_pb2 as pb
from tests.tools.check.reference_server import ReferenceService, Seat, put_back
from tests.tools.check.refused import Refused
from tests.tools.check.walk import NAMES, SCHEMA

PROPERTIES: dict[str, Any] = SCHEMA["properties"]  # type: ignore[assignment]
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
            await asyncio.sleep(1.0)
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


class IgnoresRanges(Faulty):
    """Options beyond their bounds are moved to them in silence."""

    reported = ("C-20",)

    def read_options(self, struct: Any) -> dict[str, Any]:
        for name, value in struct.fields.items():
            if name in PROPERTIES and value.HasField("number_value"):
                rule = PROPERTIES[name]
                value.number_value = min(max(value.number_value, rule["minimum"]), rule["maximum"])
        return super().read_options(struct)


class RoundsOptions(Faulty):
    """A fraction is cut to the whole number below it."""

    reported = ("C-20",)

    def read_options(self, struct: Any) -> dict[str, Any]:
        if "length" in struct.fields and struct.fields["length"].HasField("number_value"):
            struct.fields["length"].number_value //= 1
        return super().read_options(struct)


class UsesUpKeys(Faulty):
    """A call that failed is remembered under its key."""

    reported = ("C-24",)

    async def once(self, request: Any, create: Any) -> Any:
        known = self.keys.get(request.key)
        try:
            return await super().once(request, create)
        except Refused as error:
            if request.key and known is None and error.status.details:
                failed = asyncio.get_running_loop().create_future()
                failed.set_exception(error)
                self.keys[request.key] = (b"failed", failed)
            raise


class KeepsKeysByKind(Faulty):
    """A key of a Fork is free for an Open."""

    reported = ("F-08", "N-08")

    async def once(self, request: Any, create: Any) -> Any:
        if request.key and len(request.key.encode()) <= 128:
            known = copy.copy(request)
            known.key = type(request).__name__ + request.key[:100]
            return await super().once(known, create)
        return await super().once(request, create)


class WrapsMembers(Faulty):
    """Members are numbered with 32 bits, and then from 0 again."""

    reported = ("C-25",)

    def members(self, request: Any) -> Any:
        count = self.admit(request.count)
        return [(request.first_member + number) % 2**32 for number in range(count)]


class PoisonsKeys(Faulty):
    """An Open whose caller leaves is abandoned, and its key for ever with it."""

    reported = ("C-82",)
    perhaps = ("C-14",)

    async def Open(self, request: Any, context: Any) -> Any:  # noqa: N802 - gRPC's name
        if not request.key:
            await asyncio.sleep(0.05)
            return await super()._unary(context, self.open(request))
        if request.key not in self.keys:
            self.keys[request.key] = (b"abandoned", asyncio.get_running_loop().create_future())
            await asyncio.sleep(1.0)
            del self.keys[request.key]
        return await super()._unary(context, self.open(request))


# --- Step and Reset -----------------------------------------------------------------------------------------------


class BreaksLater(Faulty):
    """The seventh turn of an episode is an error."""

    reported = ("C-30",)
    perhaps = ("C-42", "C-46", "C-65", "C-66")

    def play(self, seat: Seat, request: pb.StepRequest) -> pb.Transition:
        if seat.index == 6:
            raise Refused("UNSUPPORTED", "too late", capability="turns")
        return super().play(seat, request)


class UnseededLater(Faulty):
    """From the second move on the luck is drawn from nowhere."""

    reported = ("C-79",)
    perhaps = ("C-42",)

    def play(self, seat: Seat, request: pb.StepRequest) -> pb.Transition:
        before = seat.walk.draws
        transition = super().play(seat, request)
        if seat.walk.draws > before > 0 and not seat.over:
            seat.walk.position = secrets.randbelow(seat.walk.length - 1)
            transition.observation.CopyFrom(self.observe(seat, seat.want))
        return transition


class RunsOn(Faulty):
    """The sub-actions after the one that ends the episode are executed."""

    reported = ("C-42",)

    def play(self, seat: Seat, request: pb.StepRequest) -> pb.Transition:
        transition = super().play(seat, request)
        if transition.terminated:
            for outcome in transition.outcomes:
                outcome.executed = True
        return transition


class PlaysRepeats(Faulty):
    """A repeated Step gets the cached reply, but the turn is played again all the same."""

    reported = ("C-32", "C-33", "S-08")
    perhaps = ("C-81", "S-07", "S-09", "C-42")

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


class ForgetsOptions(Faulty):
    """A Reset without options takes the defaults."""

    reported = ("C-57",)

    async def reset(self, request: pb.ResetRequest) -> pb.ResetResponse:
        seat = self.find(request.session_id)
        if request.epoch == seat.epoch and not request.HasField("options"):
            seat.options = self.read_options(struct_pb2.Struct())
        return await super().reset(request)


class TellsTurnsFirst(Faulty):
    """MAX_TURNS is told where MAX_ACTIONS is met as well."""

    reported = ("C-58",)

    def end(self, seat: Seat, transition: pb.Transition) -> None:
        super().end(seat, transition)
        if transition.truncated and 0 < seat.limits.max_turns <= seat.index + 1:
            transition.end_reason = pb.END_REASON_MAX_TURNS


class SolvesByLimits(Faulty):
    """An episode that a limit cut short counts as solved."""

    reported = ("C-59",)

    def end(self, seat: Seat, transition: pb.Transition) -> None:
        super().end(seat, transition)
        if transition.truncated:
            transition.success = True


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


class KeysOfLuck(Faulty):
    """The state key depends on the random stream."""

    reported = ("C-10", "C-12", "C-63")

    def state_key(self, seat: Seat) -> bytes:
        return super().state_key(seat) + seat.walk.luck.to_bytes(8, "big")


class AdvisesAfterTheEnd(Faulty):
    """valid_actions and expert_action are told after the end, too."""

    reported = ("C-60",)

    def observe(self, seat: Seat, want: pb.Want) -> pb.Observation:
        over, seat.over = seat.over, False
        try:
            return super().observe(seat, want)
        finally:
            seat.over = over


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

    reported = ("C-73", "F-12")

    def seat(self, seat: Seat) -> pb.Session:
        seat.lease = 3600.0
        return super().seat(seat)


class StepsDoNotRenew(Faulty):
    """Only Renew and Render renew a lease."""

    reported = ("C-74",)
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

    reported = ("C-38", "C-89", "C-90", "C-91", "C-92", "N-06")

    async def _unary(self, context: Any, work: Any) -> Any:
        async def stripped() -> Any:
            try:
                return await work
            except Refused as error:
                del error.status.details[:]
                raise

        return await super()._unary(context, stripped())


class HidesSomeReasons(Faulty):
    """UNSUPPORTED, INCOMPATIBLE_SNAPSHOT and OVERLOADED give no advice."""

    reported = ("C-89", "C-92", "N-06")

    async def _unary(self, context: Any, work: Any) -> Any:
        async def stripped() -> Any:
            try:
                return await work
            except Refused as error:
                for detail in error.status.details:
                    info = error_details_pb2.ErrorInfo()
                    if detail.Unpack(info) and info.reason in ("UNSUPPORTED", "INCOMPATIBLE_SNAPSHOT", "OVERLOADED"):
                        del info.metadata["advice"]
                        detail.Pack(info)
                raise

        return await super()._unary(context, stripped())


class TrustsTraces(Faulty):
    """A malformed traceparent makes a Step one without actions."""

    reported = ("C-96",)

    async def Step(self, request: Any, context: Any) -> Any:  # noqa: N802 - gRPC's name
        if dict(context.invocation_metadata()).get("traceparent") == "nonsense":
            del request.actions[:]
        return await super()._unary(context, self.step(request))


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


class StreamsNoCopies(Faulty):
    """Fork, Snapshot and Restore are served as unary calls alone."""

    reported = ("S-01",)

    async def reply(self, call: pb.Call) -> pb.Reply:
        if call.WhichOneof("request") in ("fork", "snapshot", "restore"):
            return pb.Reply(call_id=call.call_id, error=Refused("UNSUPPORTED", "no", capability="stream").status)
        return await super().reply(call)


class AbandonsLateCalls(Faulty):
    """A call on a Stream past its timeout stops half-way: the state has moved, the index has not."""

    reported = ("S-09",)

    async def reply(self, call: pb.Call) -> pb.Reply:
        if call.timeout_ms and call.HasField("step"):
            walk = self.find(call.step.session_id).walk
            for action in call.step.actions:
                walk.step(action.text)
            return pb.Reply(call_id=call.call_id, error=Refused("DEADLINE", "too late").status)
        return await super().reply(call)


class PlaysRaggedRows(Faulty):
    """The rows of ragged columns that are whole are played, and the Stream ends with INVALID_ARGUMENT."""

    reported = ("S-14",)

    async def Stream(self, requests: Any, context: Any) -> AsyncIterator[pb.StreamResponse]:  # noqa: N802 - gRPC's name
        first = await anext(aiter(requests), pb.StreamRequest())
        steps = first.steps
        if len(steps.call_ids) != len(steps.session_ids):
            await self.step(pb.StepRequest(session_id=steps.session_ids[0], epoch=steps.epochs[0]))
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, "ragged")
        async for response in super().Stream(put_back(first, requests), context):
            yield response


class TrustsActionCounts(Faulty):
    """action_counts of another sum than there are actions are taken as far as the actions go."""

    reported = ("S-14",)

    def rows(self, steps: pb.StepColumns) -> list[pb.Call]:
        if sum(steps.action_counts) > len(steps.actions):
            steps.action_counts[-1] -= sum(steps.action_counts) - len(steps.actions)
        return super().rows(steps)


class AnswersOneRaggedRow(Faulty):
    """Ragged columns get one error, to their first row."""

    reported = ("S-14",)

    def rows(self, steps: pb.StepColumns) -> list[pb.Call]:
        calls = super().rows(steps)
        return calls[:1] if calls and not calls[0].HasField("step") else calls


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


class _SpoilsCopies(ReferenceService):
    """Does something to each copy that Fork made."""

    @abstractmethod
    def spoil(self, original: Seat, twin: Seat) -> None: ...

    async def fork_anew(self, request: pb.ForkRequest) -> pb.ForkResponse:
        reply = await super().fork_anew(request)
        for session in reply.sessions:
            self.spoil(self.seats[request.session_id], self.seats[session.session_id])
        return reply


class ForksShareState(_SpoilsCopies, Faulty):
    """A copy has the original's state, not one of its own."""

    reported = ("F-02", "F-03", "F-05")

    def spoil(self, original: Seat, twin: Seat) -> None:
        twin.walk = original.walk


class ForksRestartLuck(_SpoilsCopies, Faulty):
    """A copy starts the random stream again."""

    reported = ("F-02", "F-03")

    def spoil(self, original: Seat, twin: Seat) -> None:
        twin.walk.draws = 0


class ReseedsAtRandom(Faulty):
    """RESEED tells the given seed and uses another."""

    reported = ("F-05",)
    reseeded = 0

    def reseed(self, twin: Seat, dynamics_seed: int) -> None:
        super().reseed(twin, dynamics_seed)
        self.reseeded += 1
        twin.walk.luck += self.reseeded


class ForksWithoutLimits(_SpoilsCopies, Faulty):
    """A copy has the environment's own limits."""

    reported = ("F-12",)

    def spoil(self, original: Seat, twin: Seat) -> None:
        twin.limits = self.spec.limits


class ForksForAges(_SpoilsCopies, Faulty):
    """A copy has the longest lease there is."""

    reported = ("F-12",)

    def spoil(self, original: Seat, twin: Seat) -> None:
        twin.lease = self.limits.max_lease_seconds


class CopiesWithoutLimit(Faulty):
    """max_group holds for Open alone."""

    reported = ("F-13", "N-12")

    def admit(self, count: int) -> int:
        return super().admit(min(count, self.limits.max_group)) and max(1, count)

    async def open_anew(self, request: pb.OpenRequest) -> pb.OpenResponse:
        super().admit(request.count)
        return await super().open_anew(request)


class IgnoresSeedsOfKeep(Faulty):
    """dynamics_seeds without RESEED are dropped in silence."""

    reported = ("F-14",)

    async def fork_anew(self, request: pb.ForkRequest) -> pb.ForkResponse:
        if request.randomness != pb.FORK_RANDOMNESS_RESEED:
            del request.dynamics_seeds[:]
        return await super().fork_anew(request)


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
