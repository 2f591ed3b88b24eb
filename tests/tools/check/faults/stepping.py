"""Wrong servers: faults of Step and Reset, observations and frames."""

import asyncio
import copy
import secrets
from contextvars import ContextVar
from typing import Any

from google.protobuf import struct_pb2

from starpod.v1 import environment_pb2 as pb
from tests.tools.check.faults.faulty import Faulty
from tests.tools.check.reference_server import Seat
from tests.tools.check.refused import Refused
from tests.tools.check.walk import NAMES

IN_HURRY = ContextVar("IN_HURRY", default=False)


class BreaksLater(Faulty, reported="C-30", perhaps="C-42 C-46 C-65 C-66"):
    """The seventh turn of an episode is an error."""

    def play(self, seat: Seat, request: pb.StepRequest) -> pb.Transition:
        if seat.index == 6:
            raise Refused("UNSUPPORTED", "too late", capability="turns")
        return super().play(seat, request)


class UnseededLater(Faulty, reported="C-79", perhaps="C-42"):
    """Random numbers come from the seed only for the first move."""

    def play(self, seat: Seat, request: pb.StepRequest) -> pb.Transition:
        before = seat.walk.draws
        transition = super().play(seat, request)
        if seat.walk.draws > before > 0 and not seat.over:
            seat.walk.position = secrets.randbelow(seat.walk.length - 1)
            transition.observation.CopyFrom(self.observe(seat, seat.want))
        return transition


class RunsOn(Faulty, reported="C-42"):
    """Sub-actions after the end of the episode are executed."""

    def play(self, seat: Seat, request: pb.StepRequest) -> pb.Transition:
        transition = super().play(seat, request)
        if transition.terminated:
            for outcome in transition.outcomes:
                outcome.executed = True
        return transition


class PlaysRepeats(Faulty, reported="C-32 C-33 S-08", perhaps="C-81 S-07 S-09 C-42"):
    """A repeated Step gets the cached reply, but the turn is played again all the same."""

    def cached(self, seat: Seat, request: pb.StepRequest) -> pb.StepResponse | None:
        known = super().cached(seat, request)
        if known is not None:
            for action in request.actions:
                seat.walk.step(action.text)
        return known


class AnswersOtherActions(Faulty, reported="C-34"):
    """The last index has the last reply, whatever the actions."""

    def cached(self, seat: Seat, request: pb.StepRequest) -> pb.StepResponse | None:
        at_last = seat.last is not None and (request.epoch, request.step_index) == (seat.epoch, seat.index - 1)
        return seat.last[1] if seat.last and at_last else None


class CutsIndices(Faulty, reported="C-35"):
    """Indices are kept in eight bits."""

    async def step(self, request: pb.StepRequest) -> pb.StepResponse:
        request.step_index &= 0xFF
        return await super().step(request)


class ForgetsEpochs(Faulty, reported="C-37"):
    """A Step of an older epoch is played in the present episode."""

    async def step(self, request: pb.StepRequest) -> pb.StepResponse:
        seat = self.seats.get(request.session_id)
        if seat and request.epoch < seat.epoch:
            request.epoch = seat.epoch
        return await super().step(request)


class AbandonsWork(Faulty, reported="C-81"):
    """A Step whose caller has gone stops half-way: the state has moved, the index has not."""

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


class GoesOnAfterTheEnd(Faulty, reported="C-47 C-89"):
    """A Step after the end of the episode is played."""

    async def step(self, request: pb.StepRequest) -> pb.StepResponse:
        seat = self.seats.get(request.session_id)
        if seat and seat.over and request.step_index == seat.index:
            seat.over = False
        return await super().step(request)


class FailsOnBadActions(Faulty, reported="C-48 S-12"):
    """An action that the environment does not know is an error."""

    def check_actions(self, actions: Any) -> None:
        super().check_actions(actions)
        for place, action in enumerate(actions):
            if action.HasField("text") and action.text.lower() not in NAMES:
                raise Refused("BAD_ARGUMENT", f"there are {NAMES}", f"actions[{place}]")


class EndsTwice(Faulty, reported="C-46"):
    """The end of the task also counts as truncated."""

    def end(self, seat: Seat, transition: pb.Transition) -> None:
        super().end(seat, transition)
        transition.truncated |= transition.terminated


class ForgetsOptions(Faulty, reported="C-57"):
    """A Reset without options takes the defaults."""

    async def reset(self, request: pb.ResetRequest) -> pb.ResetResponse:
        seat = self.find(request.session_id)
        if request.epoch == seat.epoch and not request.HasField("options"):
            seat.options = self.read_options(struct_pb2.Struct())
        return await super().reset(request)


class TellsTurnsFirst(Faulty, reported="C-58"):
    """MAX_TURNS is reported although MAX_ACTIONS is reached, too."""

    def end(self, seat: Seat, transition: pb.Transition) -> None:
        super().end(seat, transition)
        if transition.truncated and 0 < seat.limits.max_turns <= seat.index + 1:
            transition.end_reason = pb.END_REASON_MAX_TURNS


class SolvesByLimits(Faulty, reported="C-59"):
    """An episode that a limit cut short counts as solved."""

    def end(self, seat: Seat, transition: pb.Transition) -> None:
        super().end(seat, transition)
        if transition.truncated:
            transition.success = True


class KeysOfHistory(Faulty, reported="C-63"):
    """The state key counts turns."""

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


class KeysOfLuck(Faulty, reported="C-10 C-12 C-63"):
    """The state key depends on the random stream."""

    def state_key(self, seat: Seat) -> bytes:
        return super().state_key(seat) + seat.walk.luck.to_bytes(8, "big")


class AdvisesAfterTheEnd(Faulty, reported="C-60"):
    """valid_actions and expert_action are also sent after the end."""

    def observe(self, seat: Seat, want: pb.Want) -> pb.Observation:
        over, seat.over = seat.over, False
        try:
            return super().observe(seat, want)
        finally:
            seat.over = over


class ScoresAboveOne(Faulty, reported="C-65"):
    """The score is not in [0, 1]."""

    def score(self, seat: Seat) -> float:
        return 3.0 * super().score(seat)


class DrawsWithLuck(Faulty, reported="C-69"):
    """Render takes a number from the random stream of the transitions."""

    async def render(self, request: pb.RenderRequest) -> pb.RenderResponse:
        reply = await super().render(request)
        self.seats[request.session_id].walk.draws += 1
        return reply


class HangsOnRender(Faulty, reported="C-67 C-69"):
    """Render of HTML never ends."""

    async def render(self, request: pb.RenderRequest) -> pb.RenderResponse:
        if request.mode == "html":
            await asyncio.sleep(3600)
        return await super().render(request)
