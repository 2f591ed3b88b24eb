"""One connection to a server under test: generated stubs, bare calls, and nothing that repairs anything."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
from google.protobuf.message import Message

from starpod.client.check.refusal import Refusal, from_error
from starpod.client.check.requirement import Unmet
from starpod.v1 import environment_pb2 as pb
from starpod.v1 import environment_pb2_grpc as pb_grpc

SERVICE = "starpod.v1.EnvironmentService"
_OPTIONS = (
    ("grpc.max_send_message_length", -1),
    ("grpc.max_receive_message_length", -1),
    ("grpc.enable_retries", 0),  # a call is sent once: repeating it is what is under test
    ("grpc.use_local_subchannel_pool", 1),  # every Link is a connection of its own
)


@dataclass(frozen=True, slots=True)
class Access:
    """What a server asks of its callers. token: sent as a bearer token. ca, certificate, key: PEM files for TLS."""

    token: str = ""
    ca: Path | None = None
    certificate: Path | None = None
    key: Path | None = None

    def channel(self, address: str) -> grpc.aio.Channel:
        if self.ca is None:
            return grpc.aio.insecure_channel(address, options=_OPTIONS)
        credentials = grpc.ssl_channel_credentials(
            self.ca.read_bytes(),
            self.key.read_bytes() if self.key else None,
            self.certificate.read_bytes() if self.certificate else None,
        )
        return grpc.aio.secure_channel(address, credentials, options=_OPTIONS)


class Link:
    """A connection to `address`. `seconds` bounds every call that does not say otherwise."""

    def __init__(self, address: str, access: Access, seconds: float) -> None:
        self.address = address
        self.access = access
        self.seconds = seconds
        self.channel = access.channel(address)
        self.stub = pb_grpc.EnvironmentServiceStub(self.channel)

    def twin(self, address: str = "") -> Link:
        """Another connection, to the same address or another."""
        return Link(address or self.address, self.access, self.seconds)

    async def close(self) -> None:
        await self.channel.close()

    @property
    def metadata(self) -> tuple[tuple[str, str], ...]:
        return (("authorization", f"Bearer {self.access.token}"),) if self.access.token else ()

    async def call(self, method: str, request: Message, *, seconds: float | None = None) -> Any:
        """The reply of a unary call. Raises grpc.aio.AioRpcError."""
        limit = self.seconds if seconds is None else seconds
        return await getattr(self.stub, method)(request, timeout=limit, metadata=self.metadata)

    async def trailer(self, method: str, request: Message) -> Any:
        """The trailing metadata of a unary call, of one that is refused too."""
        call = getattr(self.stub, method)(request, timeout=self.seconds, metadata=self.metadata)
        try:
            await call
        except grpc.aio.AioRpcError as error:
            return error.trailing_metadata()
        return await call.trailing_metadata()

    async def raw(self, path: str, request: bytes, *, metadata: Sequence[tuple[str, str]] | None = None) -> bytes:
        """The reply of a unary call, bytes for bytes. Raises grpc.aio.AioRpcError."""
        method = self.channel.unary_unary(path, request_serializer=bytes, response_deserializer=bytes)
        sent = self.metadata if metadata is None else metadata
        reply: bytes = await method(request, timeout=self.seconds, metadata=tuple(sent))
        return reply

    async def refusal(self, method: str, request: Message) -> Refusal | None:
        """How the server refuses the call; None if it does not."""
        try:
            await self.call(method, request)
        except grpc.aio.AioRpcError as error:
            return from_error(error)
        return None

    @contextlib.asynccontextmanager
    async def stream(self) -> AsyncIterator[Conversation]:
        """A Stream, cancelled at the end if it is still open."""
        conversation = Conversation(self.stub.Stream(metadata=self.metadata), self.seconds)
        try:
            yield conversation
        finally:
            conversation.cancel()


class Conversation:
    """An open Stream. Replies are kept by call id, transitions in columns turned into the Reply that they stand for.

    timings: those of the messages that carried one.
    """

    def __init__(self, call: Any, seconds: float) -> None:
        self._call = call
        self._seconds = seconds
        self.replies: dict[int, list[pb.Reply]] = {}
        self.columns = 0
        self.timings: list[pb.ServerTiming] = []

    async def send(self, *calls: pb.Call, steps: pb.StepColumns | None = None) -> None:
        await self._within(self._call.write(pb.StreamRequest(calls=calls, steps=steps)), "a message to be taken")

    async def ask(self, *calls: pb.Call, steps: pb.StepColumns | None = None) -> list[pb.Reply]:
        """Sends the calls in one message; returns their replies in the calls' order, rows of columns last."""
        await self.send(*calls, steps=steps)
        return await self.collect([call.call_id for call in calls] + list(steps.call_ids if steps else ()))

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
            self.replies.setdefault(reply.call_id, []).append(reply)
        self.columns += len(message.transitions.call_ids)
        if message.HasField("timing"):
            self.timings.append(message.timing)

    async def _within(self, waiting: Any, what: str) -> Any:
        try:
            return await asyncio.wait_for(waiting, self._seconds)
        except TimeoutError:
            raise Unmet(f"{what} within {self._seconds:g} s", "nothing") from None


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
