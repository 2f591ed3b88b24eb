"""Wrong servers: faults of the Stream."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import grpc

from starpod.v1 import environment_pb2 as pb
from tests.tools.check.faults.faulty import Faulty
from tests.tools.check.reference_server import put_back
from tests.tools.check.refused import Refused


class ReversesBatches(Faulty, reported="S-02 S-03"):
    """The calls of a message are begun last to first."""

    async def incoming(self, requests: Any) -> AsyncIterator[pb.StreamRequest]:
        async for message in requests:
            yield pb.StreamRequest(
                calls=reversed(message.calls),
                steps=message.steps,
                resets=message.resets,
                acknowledge=message.acknowledge,
            )


class StreamsNoCopies(Faulty, reported="S-01"):
    """Fork, Snapshot and Restore are served only as unary calls."""

    async def reply(self, call: pb.Call) -> pb.Reply:
        if call.WhichOneof("request") in ("fork", "snapshot", "restore"):
            return pb.Reply(call_id=call.call_id, error=Refused("UNSUPPORTED", "no", capability="stream").status)
        return await super().reply(call)


class AbandonsLateCalls(Faulty, reported="S-09"):
    """A call on a Stream past its timeout stops half-way: the state has moved, the index has not."""

    async def reply(self, call: pb.Call) -> pb.Reply:
        if call.timeout_ms and call.HasField("step"):
            walk = self.find(call.step.session_id).walk
            for action in call.step.actions:
                walk.step(action.text)
            return pb.Reply(call_id=call.call_id, error=Refused("DEADLINE", "too late").status)
        return await super().reply(call)


class PlaysRaggedRows(Faulty, reported="S-14"):
    """The rows of ragged columns that are whole are played, and the Stream ends with INVALID_ARGUMENT."""

    async def Stream(self, requests: Any, context: Any) -> AsyncIterator[pb.StreamResponse]:  # noqa: N802 - gRPC's name
        first = await anext(aiter(requests), pb.StreamRequest())
        steps = first.steps
        if len(steps.call_ids) != len(steps.session_ids):
            await self.step(pb.StepRequest(session_id=steps.session_ids[0], epoch=steps.epochs[0]))
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, "ragged")
        async for response in super().Stream(put_back(first, requests), context):
            yield response


class TrustsActionCounts(Faulty, reported="S-14"):
    """Existing actions are executed even if the sum of action_counts differs from their number."""

    def rows(self, steps: pb.StepColumns) -> list[pb.Call]:
        if sum(steps.action_counts) > len(steps.actions):
            steps.action_counts[-1] -= sum(steps.action_counts) - len(steps.actions)
        return super().rows(steps)


class AnswersOneRaggedRow(Faulty, reported="S-14"):
    """Ragged columns get one error, to their first row."""

    def rows(self, steps: pb.StepColumns) -> list[pb.Call]:
        calls = super().rows(steps)
        return calls[:1] if calls and not calls[0].HasField("step") else calls


class RepeatsLast(Faulty, reported="S-16"):
    """Rows of a step that another row has made are worked on after all others."""

    def rows(self, steps: pb.StepColumns) -> list[pb.Call]:
        made: set[tuple[str, int]] = set()
        late: dict[int, bool] = {}
        calls = super().rows(steps)
        for place, call in enumerate(calls):
            step = (call.step.session_id, call.step.step_index)
            late[place] = call.HasField("step") and step in made
            made.add(step)
        return [calls[place] for place in sorted(late, key=late.__getitem__)]


class ForgetsRowSeeds(Faulty, reported="S-17"):
    """Rows of resets draw their seeds."""

    def reset_rows(self, resets: pb.ResetColumns) -> list[pb.Call]:
        calls = super().reset_rows(resets)
        for call in calls:
            if call.HasField("reset"):
                call.reset.ClearField("seed")
        return calls


class AcknowledgesCallsAlone(Faulty, reported="S-18"):
    """A message without calls is not acknowledged."""

    async def incoming(self, requests: Any) -> AsyncIterator[pb.StreamRequest]:
        async for message in requests:
            message.acknowledge &= bool(message.calls)
            yield message


class EndsStreamOnErrors(Faulty, reported="S-04 S-05 S-10 S-13 S-14 S-16 S-17 S-18", perhaps="S-09"):
    """One bad call ends the Stream."""

    async def reply(self, call: pb.Call) -> pb.Reply:
        reply = await super().reply(call)
        return pb.Reply() if reply.HasField("error") else reply

    async def Stream(self, requests: Any, context: Any) -> AsyncIterator[pb.StreamResponse]:  # noqa: N802 - gRPC's name
        async for response in super().Stream(requests, context):
            if any(not reply.WhichOneof("response") for reply in response.replies):
                return
            yield response


class DropsOnHalfClose(Faulty, reported="S-06 S-14"):
    """The Stream ends as soon as the client half-closes."""

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


class KillsWithTheStream(Faulty, reported="S-07"):
    """Sessions used on a Stream are closed when it is cancelled."""

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


class TimesMeans(Faulty, reported="S-15"):
    """The timing of a message has the total of one call, but the environment's time of many calls."""

    def pack(self, reply: pb.Reply, columns: bool) -> pb.StreamResponse:
        response = super().pack(reply, columns)
        response.timing.environment_ms, response.timing.total_ms = 0.3, 0.2
        return response


class LosesFlags(Faulty, reported="S-12"):
    """Columns tell of every sub-action that it was effective."""

    def pack(self, reply: pb.Reply, columns: bool) -> pb.StreamResponse:
        response = super().pack(reply, columns)
        flags = [flags | 4 for flags in response.transitions.outcome_flags]
        response.transitions.outcome_flags[:] = flags
        return response
