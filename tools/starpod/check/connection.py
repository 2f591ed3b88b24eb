"""One connection to a server under test: generated stubs, bare calls, no recovery."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import grpc
from google.protobuf.message import Message

from starpod.check.expectations import Broken, Unmet
from starpod.check.refusal import Refusal, from_error, from_status
from starpod.client.transport import Transport
from starpod.v1 import environment_pb2 as pb
from starpod.v1 import environment_pb2_grpc as pb_grpc

SERVICE = "starpod.v1.EnvironmentService"
_OPTIONS = (
    ("grpc.max_send_message_length", -1),
    ("grpc.max_receive_message_length", -1),
    ("grpc.enable_retries", 0),  # a call is sent once: repeating it is what is under test
    ("grpc.use_local_subchannel_pool", 1),  # every Connection is a connection of its own
)
PATIENCE = 20.0
"""Seconds in which a call that is refused as OVERLOADED is sent again, each time after the delay of RetryInfo."""


class Connection:
    """A connection to `address`. `seconds` bounds every call that does not say otherwise.

    access: what the server asks of its callers: token and TLS; nothing else of it counts.
    portion: calls that one message of a Stream may carry without running into max_calls_in_flight; 0: any number.
    """

    def __init__(
        self,
        address: str,
        access: Transport,
        seconds: float,
        portion: int = 0,
        options: Sequence[tuple[str, int]] = (),
    ) -> None:
        self.address = address
        self.access = access
        self.seconds = seconds
        self.portion = portion
        self.metadata = access.metadata()
        options = (*_OPTIONS, *options)
        self.channel = (
            grpc.aio.secure_channel(address, access.tls.credentials(), options=options)
            if access.tls
            else grpc.aio.insecure_channel(address, options=options)
        )
        self.stub = pb_grpc.EnvironmentServiceStub(self.channel)

    def another(self, address: str = "", options: Sequence[tuple[str, int]] = ()) -> Connection:
        """Another connection, to the same address or another; options: gRPC's, of its channel."""
        return Connection(address or self.address, self.access, self.seconds, self.portion, options)

    async def close(self) -> None:
        await self.channel.close()

    def _send(self, request: Message, seconds: float | None = None) -> grpc.aio.UnaryUnaryCall[Any, Any]:
        """Sends a request by the method of its name."""
        method = getattr(self.stub, method_of(request))
        call: grpc.aio.UnaryUnaryCall[Any, Any] = method(
            request, timeout=self.seconds if seconds is None else seconds, metadata=self.metadata
        )
        return call

    async def call(self, request: Message, *, seconds: float | None = None) -> Any:
        """The reply of a unary call. Waits while overloaded. Raises grpc.aio.AioRpcError."""
        return await _patiently(lambda: self.call_once(request, seconds=seconds))

    async def call_once(self, request: Message, *, seconds: float | None = None) -> Any:
        """The reply of a unary call, sent once whatever comes. Raises Broken where the environment or the server has a
        bug, grpc.aio.AioRpcError for other errors.
        """
        try:
            return await self._send(request, seconds)
        except grpc.aio.AioRpcError as error:
            if (refusal := from_error(error)).bug:
                raise Broken(refusal) from error
            raise

    async def trailer(self, request: Message) -> Any:
        """The trailing metadata of a unary call, of one that is refused too."""
        call = self._send(request)
        try:
            await call
        except grpc.aio.AioRpcError as error:
            return error.trailing_metadata()
        return await call.trailing_metadata()

    async def raw(self, path: str, request: bytes, *, metadata: Sequence[tuple[str, str]] | None = None) -> bytes:
        """The reply of a unary call, bytes for bytes. Waits while overloaded. Raises grpc.aio.AioRpcError."""
        method = self.channel.unary_unary(path, request_serializer=bytes, response_deserializer=bytes)
        sent = tuple(self.metadata if metadata is None else metadata)
        reply: bytes = await _patiently(lambda: method(request, timeout=self.seconds, metadata=sent))
        return reply

    async def refusal(self, request: Message) -> Refusal | None:
        """How the server refuses the call; None if it does not. Waits while overloaded."""
        try:
            await self.call(request)
        except grpc.aio.AioRpcError as error:
            return from_error(error)
        return None

    @contextlib.asynccontextmanager
    async def stream(self) -> AsyncIterator[StreamConnection]:
        """A Stream, cancelled at the end if it is still open."""
        conversation = StreamConnection(self.stub.Stream(metadata=self.metadata), self.seconds, self.portion)
        try:
            yield conversation
        finally:
            conversation.cancel()


class StreamConnection:
    """An open Stream. Replies are kept by call id, transitions in columns turned into the Reply that they stand for.

    timings: those of the messages that carried one.
    """

    def __init__(self, call: Any, seconds: float, portion: int = 0) -> None:
        self._call = call
        self._seconds = seconds
        self._portion = portion
        self.replies: dict[int, list[pb.Reply]] = {}
        self.columns = 0
        self.timings: list[pb.ServerTiming] = []

    async def send(self, *calls: pb.Call, steps: pb.StepColumns | None = None) -> None:
        await self._write([pb.StreamRequest(calls=calls, steps=steps)])

    async def ask(self, *calls: pb.Call, steps: pb.StepColumns | None = None) -> list[pb.Reply]:
        """Sends the calls in one message; returns their replies in the calls' order, rows of columns last.

        In several messages, each answered before the next, where the server works on so few calls at once. A call
        that is refused as OVERLOADED is sent again.
        """
        requests = {call.call_id: pb.StreamRequest(calls=[call]) for call in calls}
        requests |= {row.call_ids[0]: pb.StreamRequest(steps=row) for row in split(steps or pb.StepColumns())}
        ids = list(requests)
        most = self._portion or len(ids)
        if whole := len(ids) <= most:
            await self.send(*calls, steps=steps)
        replies = []
        for start in range(0, len(ids), max(1, most)):
            portion = ids[start : start + most]
            await self._write([] if whole else [requests[call_id] for call_id in portion])
            replies += await self._patiently(portion, requests)
        return replies

    async def _patiently(self, ids: Sequence[int], requests: Mapping[int, pb.StreamRequest]) -> list[pb.Reply]:
        """The replies to the calls. Those that find the server overloaded are sent again, in the same order."""
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
            await self._within(self._call.write(request), "a message to be taken")

    async def collect(self, call_ids: Sequence[int]) -> list[pb.Reply]:
        """Reads until every id has its reply; returns the first reply of each."""
        while missing := [call_id for call_id in call_ids if call_id not in self.replies]:
            message = await self._within(self._call.read(), f"replies to the calls {missing[:5]}")
            if message is grpc.aio.EOF:
                code = await self._call.code()
                raise Unmet(f"replies to the calls {missing[:5]}", f"the end of the stream ({code.name})")
            self._take(message)
        return [self.replies[call_id][0] for call_id in call_ids]

    async def finish(self) -> grpc.StatusCode:
        """Half-closes, reads to the end and returns the stream's status."""
        with contextlib.suppress(grpc.aio.AioRpcError):  # the server ended it, perhaps before the half-close
            await self._call.done_writing()
            while (message := await self._within(self._call.read(), "the end of the stream")) is not grpc.aio.EOF:
                self._take(message)
        code: grpc.StatusCode = await self._call.code()
        return code

    def cancel(self) -> None:
        self._call.cancel()

    def _take(self, message: pb.StreamResponse) -> None:
        for reply in (*message.replies, *rows(message.transitions)):
            if reply.HasField("error") and (refusal := from_status(reply.error)).bug:
                raise Broken(refusal)
            self.replies.setdefault(reply.call_id, []).append(reply)
        self.columns += len(message.transitions.call_ids)
        if message.HasField("timing"):
            self.timings.append(message.timing)

    async def _within(self, waiting: Any, what: str) -> Any:
        try:
            return await asyncio.wait_for(waiting, self._seconds)
        except TimeoutError:
            raise Unmet(f"{what} within {self._seconds:g} s", "nothing") from None


def method_of(request: Message) -> str:
    """The name of the unary call with such a request."""
    return type(request).__name__.removesuffix("Request")


async def _patiently(send: Callable[[], Awaitable[Any]]) -> Any:
    """What the call gives, which is sent again while the server is overloaded and says for how long."""
    end = time.monotonic() + PATIENCE
    while True:
        try:
            return await send()
        except grpc.aio.AioRpcError as error:
            delay = from_error(error).wait
            if delay is None or time.monotonic() + delay > end:
                raise
            await asyncio.sleep(delay)


def columns_of(requests: Mapping[int, pb.StepRequest]) -> pb.StepColumns:
    """Steps of texts, by call id, as rows of columns."""
    columns = pb.StepColumns(call_ids=requests)
    for request in requests.values():
        columns.session_ids.append(request.session_id)
        columns.epochs.append(request.epoch)
        columns.step_indices.append(request.step_index)
        columns.action_counts.append(len(request.actions))
        columns.actions.extend(action.text for action in request.actions)
    return columns


def split(steps: pb.StepColumns) -> Iterator[pb.StepColumns]:
    """Each row of columns as columns of its own."""
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
    """The rows of columns, each as the Reply that it stands for (but for next_step_index, which they do not carry)."""
    replies = []
    ended: Mapping[int, int] = {row: place for place, row in enumerate(columns.ended_rows)}
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
        if row in ended:
            transition.end_reason = columns.end_reasons[ended[row]]
            transition.terminated = transition.end_reason == pb.END_REASON_TERMINAL
            transition.truncated = not transition.terminated
            if success := columns.end_successes[ended[row]]:
                transition.success = success == 2
        replies.append(pb.Reply(call_id=call_id, step=pb.StepResponse(transition=transition)))
    return replies
