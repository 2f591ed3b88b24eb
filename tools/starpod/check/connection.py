"""A connection to a server under test, over any transport: bare calls, no recovery."""

from __future__ import annotations

import abc
import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, ClassVar

import grpc
from google.protobuf.message import Message
from google.rpc import status_pb2

from starpod.check.expectations import Broken
from starpod.check.refusal import Refusal, from_error
from starpod.client.transport import Transport

Metadata = Sequence[tuple[str, str]]
METHODS = ("Describe", "Open", "Reset", "Step", "Render", "Fork", "Snapshot", "Restore", "Renew", "Close")

PATIENCE = 20.0
"""Seconds in which a call that is refused as OVERLOADED is sent again, each time after the delay of RetryInfo."""


class Connection(abc.ABC):
    """A connection to `address`. `seconds` bounds every call that does not say otherwise.

    Whatever the transport, a call that fails raises grpc.aio.AioRpcError with the google.rpc.Status as gRPC has it.

    access: what the server asks of its callers: token and TLS; nothing else of it counts.
    portion: calls that one message of a Stream may carry without running into max_calls_in_flight; 0: any number.
    transport: its name; methods: what it carries besides Streams, which gRPC alone does.
    """

    transport: ClassVar[str]
    methods: ClassVar[Sequence[str]] = METHODS

    def __init__(self, address: str, access: Transport, seconds: float, portion: int = 0) -> None:
        self.address = address
        self.access = access
        self.seconds = seconds
        self.portion = portion
        self.metadata = access.metadata()

    @abc.abstractmethod
    def another(self, address: str = "", options: Sequence[tuple[str, int]] = ()) -> Connection:
        """Another connection, to the same address or another; options: gRPC's, of its channel."""

    @abc.abstractmethod
    def sibling(self, endpoint: str) -> str:
        """The address of an endpoint that Describe names."""

    @abc.abstractmethod
    async def close(self) -> None: ...

    @abc.abstractmethod
    async def send(self, request: Message, seconds: float, metadata: Metadata) -> tuple[Any, Any]:
        """The reply of the method of the request's name, and the trailing metadata. Sent once."""

    @abc.abstractmethod
    async def send_unknown_field(self, request: Message) -> None:
        """Sends the request with a field of the future."""

    @abc.abstractmethod
    async def send_garbage(self, method: str) -> None:
        """Sends a method bytes that are no message."""

    @abc.abstractmethod
    async def serving(self, service: str) -> bool:
        """Whether the health of the service, as grpc.health.v1 names it, is SERVING."""

    async def call(self, request: Message, *, seconds: float | None = None, metadata: Metadata | None = None) -> Any:
        """The reply of a unary call. Waits while overloaded. Raises grpc.aio.AioRpcError."""
        return await patiently(lambda: self.call_once(request, seconds=seconds, metadata=metadata))

    async def call_once(
        self, request: Message, *, seconds: float | None = None, metadata: Metadata | None = None
    ) -> Any:
        """The reply of a unary call, sent once whatever comes. Raises Broken where the environment or the server has a
        bug, grpc.aio.AioRpcError for other errors.
        """
        limit = self.seconds if seconds is None else seconds
        try:
            reply, _ = await self.send(request, limit, self.metadata if metadata is None else metadata)
        except grpc.aio.AioRpcError as error:
            if (refusal := from_error(error)).bug:
                raise Broken(refusal) from error
            raise
        return reply

    async def trailer(self, request: Message) -> Any:
        """The trailing metadata of a unary call, of one that is refused too."""
        try:
            _, trailer = await self.send(request, self.seconds, self.metadata)
        except grpc.aio.AioRpcError as error:
            return error.trailing_metadata()
        return trailer

    async def refusal(self, request: Message) -> Refusal | None:
        """How the server refuses the call; None if it does not. Waits while overloaded."""
        try:
            await self.call(request)
        except grpc.aio.AioRpcError as error:
            return from_error(error)
        return None


def method_of(request: Message) -> str:
    """The name of the unary call with such a request."""
    return type(request).__name__.removesuffix("Request")


def rpc_error(
    code: grpc.StatusCode, message: str, status: status_pb2.Status | None = None, trailer: Metadata = ()
) -> grpc.aio.AioRpcError:
    """The error that gRPC would have raised."""
    details = (("grpc-status-details-bin", status.SerializeToString()),) if status else ()
    return grpc.aio.AioRpcError(code, grpc.aio.Metadata(), grpc.aio.Metadata(*trailer, *details), message)


async def patiently(send: Callable[[], Awaitable[Any]]) -> Any:
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
