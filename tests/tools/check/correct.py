"""Correct servers that are unlike the reference server: small, slow, picky, or with an environment of another kind."""

import asyncio
import secrets
import time
from abc import abstractmethod
from collections.abc import AsyncIterator
from typing import Any, ClassVar

import grpc

from starpod.v1 import environment_pb2 as pb
from tests.tools.check.reference_server import LIMITS, ReferenceService, Seat, put_back
from tests.tools.check.refused import Refused
from tests.tools.check.walk import NAMES, SPEC


class Correct(ReferenceService):
    """A correct service. lacks: features of the reference server that it omits. levels: letters of its levels."""

    lacks: ClassVar[list[str]]
    levels: ClassVar[str]

    def __init_subclass__(cls, lacks: str = "", levels: str = "CSFN") -> None:
        cls.lacks, cls.levels = lacks.split(), levels


class Reference(Correct):
    """The reference server as it is."""


def _limits(**fields: Any) -> pb.ServerLimits:
    limits = pb.ServerLimits()
    limits.CopyFrom(LIMITS)
    limits.MergeFrom(pb.ServerLimits(**fields))
    return limits


def _spec() -> pb.EnvironmentSpec:
    spec = pb.EnvironmentSpec()
    spec.CopyFrom(SPEC)
    return spec


class OneAction(Correct, lacks="C-42", levels="CS"):
    """A Step takes one sub-action."""

    limits = _limits(max_step_actions=1)


class FewSessions(Correct, levels="CFN"):
    """There is room for twelve sessions."""

    limits = _limits(max_sessions=12)


class FourSessions(
    Correct,
    lacks="C-07 C-08 C-11 C-18 C-23 C-45 C-49 C-74 C-78 C-82 S-06 S-12 F-01 F-05 F-06 F-08 F-11 F-12",
    levels="CSF",
):
    """There is room for four sessions."""

    limits = _limits(max_sessions=4)


class NoGroups(Correct, lacks="C-06 C-10 C-11 C-13 C-23 C-25 F-01 F-03 F-05 F-06 F-08 F-11 N-07", levels="CFN"):
    """A call opens one session."""

    limits = _limits(max_group=1)


class FewCalls(Correct, levels="CS"):
    """A service that runs at most four calls at once, each of which takes 5 ms."""

    limits = _limits(max_calls_in_flight=4)
    busy = 0

    async def _unary(self, context: Any, work: Any) -> Any:
        return await super()._unary(context, self.admitted(work))

    async def reply(self, call: pb.Call) -> pb.Reply:
        try:
            await self.admitted(asyncio.sleep(0))
        except Refused as error:
            return pb.Reply(call_id=call.call_id, error=error.status)
        return await super().reply(call)

    async def step(self, request: pb.StepRequest) -> pb.StepResponse:
        reply = await super().step(request)
        await asyncio.sleep(0.005)
        return reply

    async def admitted(self, work: Any) -> Any:
        if self.busy >= self.limits.max_calls_in_flight:
            work.close()
            raise Refused("OVERLOADED", "busy", limit="max_calls_in_flight")
        self.busy += 1
        try:
            await asyncio.sleep(0.005)
            return await work
        finally:
            self.busy -= 1


class RequiresAnOption(Correct, levels="C"):
    """One option has no default."""

    spec = _spec()
    spec.options_schema_json = spec.options_schema_json.replace(', "default": 9', "", 1).replace(
        '"type": "object"', '"type": "object", "required": ["length"]'
    )

    def read_options(self, struct: Any) -> dict[str, Any]:
        if "length" not in struct.fields:
            raise Refused("BAD_ARGUMENT", "is required", "options.length")
        return super().read_options(struct)


class TellsTheTime(Correct, levels="CS"):
    """`info` contains the time of a turn, which no seed determines."""

    def play(self, seat: Seat, request: pb.StepRequest) -> pb.Transition:
        transition = super().play(seat, request)
        transition.info.update({"seconds": time.perf_counter()})
        return transition


class _OneKind(ReferenceService):
    """Takes one kind of action: another one is BAD_ARGUMENT.

    kind: the field of Action. problem: with another one.
    """

    kind: ClassVar[str]
    problem: ClassVar[str]

    @abstractmethod
    def name_of(self, action: pb.Action) -> str:
        """The move that an action of that kind means."""

    def check_actions(self, actions: Any) -> None:
        super().check_actions(actions)
        for place, action in enumerate(actions):
            if not action.HasField(self.kind):
                raise Refused("BAD_ARGUMENT", self.problem, f"actions[{place}]")

    def play(self, seat: Seat, request: pb.StepRequest) -> pb.Transition:
        texts = pb.StepRequest()
        texts.CopyFrom(request)
        for action in texts.actions:
            action.text = self.name_of(action)
        return super().play(seat, texts)


class TakesTools(_OneKind, Correct, lacks="S-11 S-12 S-16", levels="CS"):
    """An environment that only accepts tool calls: text is BAD_ARGUMENT."""

    kind, problem = "tool_call", "takes tool calls"

    spec = _spec()
    spec.action_space.Clear()
    for name in NAMES:
        spec.action_space.tools.add(name=name, parameters_schema_json="{}")

    def name_of(self, action: pb.Action) -> str:
        return action.tool_call.name

    def observe(self, seat: Seat, want: pb.Want) -> pb.Observation:
        observation = super().observe(seat, want)
        experts = [observation.expert_action] if observation.HasField("expert_action") else []
        for action in (*observation.valid_actions, *experts):
            action.tool_call.CopyFrom(pb.ToolCall(name=action.text, arguments_json="{}"))
        return observation


class TakesJson(_OneKind, Correct, lacks="C-64 C-66 S-11 S-12 S-16", levels="CS"):
    """An environment that only accepts JSON, which Describe does not say."""

    kind, problem = "json", "takes JSON"

    spec = _spec()
    spec.action_space.Clear()
    spec.action_space.grammar = "the name of a move"
    spec.capabilities.valid_actions = spec.capabilities.expert_action = False

    def name_of(self, action: pb.Action) -> str:
        return "right" if action.json == "{}" else ""

    def observe(self, seat: Seat, want: pb.Want) -> pb.Observation:
        if want.valid_actions or want.expert_action:
            raise Refused("UNSUPPORTED", "cannot say", capability="valid_actions")
        return super().observe(seat, want)


class DrawsItsStart(
    Correct,
    lacks="C-09 C-10 C-12 C-21 C-32 C-39 C-40 C-49 C-51 C-56 C-57 C-69 C-77 C-78 C-79 C-80 C-81 C-96 S-02 S-03 "
    "S-07 S-08 S-09 S-11 S-12 S-16 F-01 F-02 F-03 F-05 N-02 N-03 N-07 N-10",
):
    """A nondeterministic environment: its valid actions depend on a start that no seed determines."""

    spec = _spec()
    spec.capabilities.deterministic = False
    spec.action_space.Clear()

    def begin(self, options: dict[str, Any], seed: int, dynamics_seed: int) -> Any:
        walk = super().begin(options, seed, dynamics_seed)
        walk.position = secrets.randbelow(walk.length - 1)
        return walk

    def observe(self, seat: Seat, want: pb.Want) -> pb.Observation:
        observation = super().observe(seat, want)
        if observation.valid_actions:
            del observation.valid_actions[:]
            observation.valid_actions.add(text=f"leave {seat.walk.position}")
        if observation.HasField("expert_action"):
            observation.expert_action.text = f"leave {seat.walk.position}"
        return observation

    def play(self, seat: Seat, request: pb.StepRequest) -> pb.Transition:
        texts = pb.StepRequest()
        texts.CopyFrom(request)
        good = [action.text == f"leave {seat.walk.position}" for action in texts.actions]
        for action in texts.actions:
            action.text = "wait"
        transition = super().play(seat, texts)
        for outcome, valid in zip(transition.outcomes, good, strict=True):
            outcome.valid = valid or not outcome.executed
        return transition


class Plain(ReferenceService):
    """A server that has only what every server must have."""

    spec = _spec()
    spec.capabilities.CopyFrom(pb.EnvironmentCapabilities(deterministic=True))

    async def describe(self, request: pb.DescribeRequest) -> pb.DescribeResponse:
        reply = await super().describe(request)
        reply.capabilities.Clear()
        return reply

    def observe(self, seat: Seat, want: pb.Want) -> pb.Observation:
        if want.ListFields():
            raise Refused("UNSUPPORTED", "has nothing to be wanted", capability="want")
        return super().observe(seat, want)

    async def fork(self, request: pb.ForkRequest) -> pb.ForkResponse:
        raise Refused("UNSUPPORTED", "cannot be forked", capability="fork")

    async def snapshot(self, request: pb.SnapshotRequest) -> pb.SnapshotResponse:
        raise Refused("UNSUPPORTED", "cannot be snapshot", capability="snapshot")


class EndsStreams(ReferenceService):
    """A server that ends a Stream whose columns are of unequal lengths, and answers no row of them."""

    def rows(self, steps: pb.StepColumns) -> list[pb.Call]:
        if len(steps.call_ids) != len(steps.session_ids):
            raise ValueError("columns of unequal lengths")
        return super().rows(steps)

    async def Stream(self, requests: AsyncIterator[pb.StreamRequest], context: Any) -> AsyncIterator[pb.StreamResponse]:  # noqa: N802 - gRPC's name
        first = await anext(aiter(requests))
        try:
            self.rows(first.steps)
        except ValueError as error:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))
        async for response in super().Stream(put_back(first, requests), context):
            yield response


class Guarded(ReferenceService):
    """Wants the token `secret`."""

    async def _unary(self, context: Any, work: Any) -> Any:
        try:
            await self.guard(context)
        except BaseException:
            work.close()
            raise
        return await super()._unary(context, work)

    async def Stream(self, requests: Any, context: Any) -> Any:  # noqa: N802 - gRPC's name
        await self.guard(context)
        async for response in super().Stream(requests, context):
            yield response

    async def guard(self, context: Any) -> None:
        if dict(context.invocation_metadata()).get("authorization") != "Bearer secret":
            error = Refused("UNAUTHENTICATED", "who are you?")
            context.set_trailing_metadata((("grpc-status-details-bin", error.status.SerializeToString()),))
            await context.abort(grpc.StatusCode.UNAUTHENTICATED, error.status.message)


CORRECT: tuple[type[Correct], ...] = tuple(Correct.__subclasses__())
