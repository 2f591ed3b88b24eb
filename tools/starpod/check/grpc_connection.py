"""A connection over gRPC: generated stubs, unary calls and Streams."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Iterable, Iterator, Mapping, Sequence
from typing import Any

import grpc
from google.protobuf.message import Message

from starpod.check.connection import PATIENCE, CheckConnection, Metadata, method_of, retry_while_overloaded
from starpod.check.expectations import BrokenCall, NotShown, Unmet
from starpod.check.refusal import from_status
from starpod.client.transport import Transport, join_endpoint
from starpod.v1 import environment_pb2 as pb
from starpod.v1 import environment_pb2_grpc as pb_grpc

SERVICE = "starpod.v1.EnvironmentService"
UNKNOWN_FIELD = b"\xfa\xff\xff\xff\x0f\x03new"
"""A serialized field with the highest possible field number (536,870,911) and a value of three bytes."""
SERVING = b"\x08\x01"
"""A serialized grpc.health.v1.HealthCheckResponse that says SERVING, so that the check needs no health package."""
_OPTIONS = (
    ("grpc.max_send_message_length", -1),
    ("grpc.max_receive_message_length", -1),
    ("grpc.enable_retries", 0),  # tests repeat calls themselves
    ("grpc.use_local_subchannel_pool", 1),  # connections of this process must not share a TCP connection
)


class GrpcConnection(CheckConnection):
    """A gRPC channel to a server, not shared with other connections."""

    transport = "gRPC"

    def __init__(
        self,
        address: str,
        access: Transport,
        seconds: float,
        portion: int = 0,
        options: Sequence[tuple[str, int]] = (),
    ) -> None:
        super().__init__(address, access, seconds, portion)
        options = (*_OPTIONS, *options)
        self.channel = (
            grpc.aio.secure_channel(address, access.tls.credentials(), options=options)
            if access.tls
            else grpc.aio.insecure_channel(address, options=options)
        )
        self.stub = pb_grpc.EnvironmentServiceStub(self.channel)

    def new_connection(self, address: str = "", options: Sequence[tuple[str, int]] = ()) -> GrpcConnection:
        return GrpcConnection(address or self.address, self.access, self.seconds, self.portion, options)

    def sibling(self, endpoint: str) -> str:
        return join_endpoint(endpoint, self.address.rpartition(":")[0])

    async def close(self) -> None:
        await self.channel.close()

    async def send(self, request: Message, seconds: float, metadata: Metadata) -> tuple[Any, Any]:
        call = getattr(self.stub, method_of(request))(request, timeout=seconds, metadata=tuple(metadata))
        return await call, await call.trailing_metadata()

    async def send_unknown_field(self, request: Message) -> None:
        await self._raw(f"/{SERVICE}/{method_of(request)}", request.SerializeToString() + UNKNOWN_FIELD)

    async def send_garbage(self, method: str) -> None:
        await self._raw(f"/{SERVICE}/{method}", b"\xff\xff\xff\xff garbage")

    async def serving(self, service: str) -> bool:
        name = service.encode()
        request = b"\x0a" + bytes([len(name)]) + name if name else b""
        return await self._raw("/grpc.health.v1.Health/Check", request) == SERVING

    async def _raw(self, path: str, request: bytes) -> bytes:
        """Make a unary call and return the reply's bytes, waiting while the server is overloaded."""
        method = self.channel.unary_unary(path, request_serializer=bytes, response_deserializer=bytes)
        reply: bytes = await retry_while_overloaded(
            lambda: method(request, timeout=self.seconds, metadata=tuple(self.metadata))
        )
        return reply


def over_grpc(connection: CheckConnection) -> GrpcConnection:
    """Return the connection as a GrpcConnection. Raise NotShown if it uses another transport."""
    if isinstance(connection, GrpcConnection):
        return connection
    raise NotShown(f"{connection.transport} has no Stream in both directions, no server reflection and no keepalive")


@contextlib.asynccontextmanager
async def open_stream(connection: CheckConnection) -> AsyncIterator[CheckStream]:
    """Open a Stream, and cancel it on exit if it is still open. Raise NotShown for other transports."""
    grpc_connection = over_grpc(connection)
    call = grpc_connection.stub.Stream(metadata=grpc_connection.metadata)
    conversation = CheckStream(call, connection.seconds, connection.portion)
    try:
        yield conversation
    finally:
        conversation.cancel()


class CheckStream:
    """An open Stream.

    Attributes:
        replies: all replies by call id. A row of TransitionColumns or StartColumns is stored as the equivalent Reply.
        columns: number of rows of TransitionColumns received.
        acknowledged: number of messages that the server has acknowledged.
        timings: the ServerTiming of each message that carried one.
    """

    def __init__(self, call: Any, seconds: float, portion: int = 0) -> None:
        self._call = call
        self._seconds = seconds
        self._portion = portion
        self.replies: dict[int, list[pb.Reply]] = {}
        self.columns = self.acknowledged = 0
        self.timings: list[pb.ServerTiming] = []

    async def send(self, *calls: pb.Call, steps: pb.StepColumns | None = None) -> None:
        await self._write([pb.StreamRequest(calls=calls, steps=steps)])

    async def ask_acknowledged(self, *calls: pb.Call) -> list[pb.Reply]:
        """Send calls in a message that asks to be acknowledged. Return their replies, when that has come too."""
        before = self.acknowledged
        await self._write([pb.StreamRequest(calls=calls, acknowledge=True)])
        replies = await self.collect([call.call_id for call in calls])
        while self.acknowledged == before:
            await self._read("an acknowledgement")
        return replies

    async def ask_resets(self, resets: pb.ResetColumns) -> list[pb.Reply]:
        """Send resets in columns, and return their replies."""
        await self._write([pb.StreamRequest(resets=resets)])
        return await self.collect(resets.call_ids)

    async def ask(self, *calls: pb.Call, steps: pb.StepColumns | None = None) -> list[pb.Reply]:
        """Send calls and rows of columns. Return the replies to the calls in their order, then those to the rows.

        All calls go in one message, or in several consecutive ones if the server allows fewer calls in flight. A call
        that is refused as OVERLOADED is sent again.
        """
        requests = {call.call_id: pb.StreamRequest(calls=[call]) for call in calls}
        requests |= {row.call_ids[0]: pb.StreamRequest(steps=row) for row in split(steps or pb.StepColumns())}
        ids = list(requests)
        limit = self._portion or len(ids)
        if fits := len(ids) <= limit:
            await self.send(*calls, steps=steps)
        replies = []
        for start in range(0, len(ids), max(1, limit)):
            portion = ids[start : start + limit]
            await self._write([] if fits else [requests[call_id] for call_id in portion])
            replies += await self._call_while_overloaded(portion, requests)
        return replies

    async def _call_while_overloaded(
        self, ids: Sequence[int], requests: Mapping[int, pb.StreamRequest]
    ) -> list[pb.Reply]:
        """Return the replies to calls. Calls refused as overloaded are sent again, in the same order."""
        end = time.monotonic() + PATIENCE
        while True:
            replies = await self.collect(ids)
            refusals = {reply.call_id: from_status(reply.error) for reply in replies if reply.HasField("error")}
            delays = {call_id: r.wait for call_id, r in refusals.items() if r.wait is not None}
            if not delays or time.monotonic() + max(delays.values()) > end:
                return replies
            await asyncio.sleep(max(delays.values()))
            for call_id in delays:
                del self.replies[call_id]
            await self._write([requests[call_id] for call_id in delays])

    async def _write(self, requests: Iterable[pb.StreamRequest]) -> None:
        for request in requests:
            await self._within(self._call.write(request), "a message to be accepted")

    async def collect(self, call_ids: Sequence[int]) -> list[pb.Reply]:
        """Read until every call has a reply, and return the first reply of each call."""
        while missing_ids := [call_id for call_id in call_ids if call_id not in self.replies]:
            await self._read(f"replies to the calls {missing_ids[:5]}")
        return [self.replies[call_id][0] for call_id in call_ids]

    async def _read(self, what: str) -> None:
        message = await self._within(self._call.read(), what)
        if message is grpc.aio.EOF:
            raise Unmet(what, f"the end of the stream ({(await self._call.code()).name})")
        self._store(message)

    async def finish(self) -> grpc.StatusCode:
        """Half-close the stream, read it to the end and return its status."""
        with contextlib.suppress(grpc.aio.AioRpcError):  # the server may have ended it before the half-close
            await self._call.done_writing()
            while (message := await self._within(self._call.read(), "the end of the stream")) is not grpc.aio.EOF:
                self._store(message)
        code: grpc.StatusCode = await self._call.code()
        return code

    def cancel(self) -> None:
        self._call.cancel()

    def _store(self, message: pb.StreamResponse) -> None:
        self.acknowledged += message.acknowledged
        for reply in (*message.replies, *rows(message.transitions), *start_rows(message.starts)):
            if reply.HasField("error") and (refusal := from_status(reply.error)).bug:
                raise BrokenCall(refusal)
            self.replies.setdefault(reply.call_id, []).append(reply)
        self.columns += len(message.transitions.call_ids)
        if message.HasField("timing"):
            self.timings.append(message.timing)

    async def _within(self, waiting: Any, what: str) -> Any:
        try:
            return await asyncio.wait_for(waiting, self._seconds)
        except TimeoutError:
            raise Unmet(f"{what} within {self._seconds:g} s", "nothing") from None


def columns_of(requests: Mapping[int, pb.StepRequest]) -> pb.StepColumns:
    """Return Steps with text actions as StepColumns, one row per Step. `requests` maps call ids to Steps."""
    columns = pb.StepColumns(call_ids=requests)
    for request in requests.values():
        columns.session_ids.append(request.session_id)
        columns.epochs.append(request.epoch)
        columns.step_indices.append(request.step_index)
        columns.action_counts.append(len(request.actions))
        columns.actions.extend(action.text for action in request.actions)
    return columns


def split(steps: pb.StepColumns) -> Iterator[pb.StepColumns]:
    """Split StepColumns into messages of one row each."""
    actions = iter(steps.actions)
    for row, call_id in enumerate(steps.call_ids):
        count = steps.action_counts[row] if steps.action_counts else 1
        yield pb.StepColumns(
            call_ids=[call_id],
            session_ids=[steps.session_ids[row]],
            epochs=[steps.epochs[row]],
            step_indices=[steps.step_indices[row]],
            actions=[next(actions) for _ in range(count)],
            action_counts=[count] if steps.action_counts else [],
        )


def rows(columns: pb.TransitionColumns) -> list[pb.Reply]:
    """Return the equivalent Reply of each row, without next_step_index, which columns do not carry."""
    replies = []
    end_indices: Mapping[int, int] = {row: index for index, row in enumerate(columns.ended_rows)}
    outcome = 0
    for row, call_id in enumerate(columns.call_ids):
        transition = pb.Transition(reward=columns.rewards[row])
        transition.observation.parts.add(text=columns.texts[row])
        if columns.state_keys:
            transition.observation.state_key = columns.state_keys[row]
        for _ in range(columns.outcome_counts[row] if columns.outcome_counts else 1):
            flags = columns.outcome_flags[outcome]
            transition.outcomes.add(
                executed=bool(flags & 1),
                valid=bool(flags & 2),
                effective=bool(flags & 4),
                reward=columns.outcome_rewards[outcome] if columns.outcome_rewards else columns.rewards[row],
            )
            outcome += 1
        if row in end_indices:
            transition.end_reason = columns.end_reasons[end_indices[row]]
            transition.terminated = transition.end_reason == pb.END_REASON_TERMINAL
            transition.truncated = not transition.terminated
            if success := columns.end_successes[end_indices[row]]:
                transition.success = success == 2
        replies.append(pb.Reply(call_id=call_id, step=pb.StepResponse(transition=transition)))
    return replies


def start_rows(columns: pb.StartColumns) -> list[pb.Reply]:
    """Return the equivalent Reply of each row, without session id, epoch and limits, which columns do not carry."""
    replies = []
    for row, call_id in enumerate(columns.call_ids):
        session = pb.Session(seed=columns.seeds[row], dynamics_seed=columns.dynamics_seeds[row])
        session.observation.parts.add(text=columns.texts[row])
        if columns.state_keys:
            session.observation.state_key = columns.state_keys[row]
        place = columns.instruction_places[row] if columns.instruction_places else 0
        response = pb.ResetResponse(session=session, instructions=columns.instructions[place])
        replies.append(pb.Reply(call_id=call_id, reset=response))
    return replies
