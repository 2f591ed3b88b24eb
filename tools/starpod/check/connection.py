"""A connection to a server under test, over any transport. It makes single calls and does not recover from failures."""

from __future__ import annotations

import abc
import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, ClassVar

import grpc
from google.protobuf.message import Message
from google.rpc import status_pb2

from starpod.check.expectations import BrokenCall
from starpod.check.refusal import Refusal, from_error
from starpod.client.transport import Transport

Metadata = Sequence[tuple[str, str]]
METHODS = ("Describe", "Open", "Reset", "Step", "Render", "Fork", "Snapshot", "Restore", "Renew", "Close")

PATIENCE = 20.0
"""Seconds for which a call refused as OVERLOADED is retried, each time after the delay in the error's RetryInfo."""


class CheckConnection(abc.ABC):
    """A connection to a server.

    A failed call raises grpc.aio.AioRpcError with the google.rpc.Status, over every transport.

    Args:
        address: address of the server, in the transport's form.
        access: token and TLS settings; its other fields are ignored.
        seconds: default time limit of a call.
        portion: maximum number of calls in a Stream message, set by the server's max_calls_in_flight; 0: no limit.

    Attributes:
        transport: name of the transport.
        methods: the unary calls that the transport carries. Only gRPC has Streams.
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
    def new_connection(self, address: str = "", options: Sequence[tuple[str, int]] = ()) -> CheckConnection:
        """Return a new connection to `address`; empty: the same address. options: gRPC channel options."""

    @abc.abstractmethod
    def sibling(self, endpoint: str) -> str:
        """Return the address of an endpoint that Describe lists."""

    @abc.abstractmethod
    async def close(self) -> None: ...

    @abc.abstractmethod
    async def send(self, request: Message, seconds: float, metadata: Metadata) -> tuple[Any, Any]:
        """Send the request once, to the method for its type. Return the reply and the trailing metadata.

        Args:
            request: its type determines the method, such as OpenRequest for Open.
            metadata: all metadata of the request, including the token.

        Raises:
            grpc.aio.AioRpcError: the call failed.
        """

    @abc.abstractmethod
    async def send_unknown_field(self, request: Message) -> None:
        """Send the request with a field that this version of the protocol does not know."""

    @abc.abstractmethod
    async def send_garbage(self, method: str) -> None:
        """Send bytes that are not a protobuf message to a method."""

    @abc.abstractmethod
    async def serving(self, service: str) -> bool:
        """Return whether the health status of the service, as in grpc.health.v1, is SERVING."""

    async def call(self, request: Message, *, seconds: float | None = None, metadata: Metadata | None = None) -> Any:
        """Make a unary call and return its reply. Wait while the server is overloaded.

        Args:
            seconds: time limit of each attempt; None: the connection's default.
            metadata: metadata of the request; None: the connection's, with its token.

        Raises:
            BrokenCall: the environment or the server has a bug.
            grpc.aio.AioRpcError: the call failed for another reason.
        """
        return await retry_while_overloaded(lambda: self.call_once(request, seconds=seconds, metadata=metadata))

    async def call_once(
        self, request: Message, *, seconds: float | None = None, metadata: Metadata | None = None
    ) -> Any:
        """Make a unary call once and return its reply. The arguments are those of `call`.

        Raises:
            BrokenCall: the environment or the server has a bug.
            grpc.aio.AioRpcError: the call failed for another reason.
        """
        limit = self.seconds if seconds is None else seconds
        try:
            reply, _ = await self.send(request, limit, self.metadata if metadata is None else metadata)
        except grpc.aio.AioRpcError as error:
            if (refusal := from_error(error)).bug:
                raise BrokenCall(refusal) from error
            raise
        return reply

    async def trailer(self, request: Message) -> Any:
        """Make a unary call and return its trailing metadata, even if the call is refused."""
        try:
            _, trailer = await self.send(request, self.seconds, self.metadata)
        except grpc.aio.AioRpcError as error:
            return error.trailing_metadata()
        return trailer

    async def refusal(self, request: Message) -> Refusal | None:
        """Make a unary call, waiting while the server is overloaded. Return its error, or None if it succeeds."""
        try:
            await self.call(request)
        except grpc.aio.AioRpcError as error:
            return from_error(error)
        return None


def method_of(request: Message) -> str:
    """Return the name of the unary call for a request, such as Open for OpenRequest."""
    return type(request).__name__.removesuffix("Request")


def rpc_error(
    code: grpc.StatusCode, message: str, status: status_pb2.Status | None = None, trailer: Metadata = ()
) -> grpc.aio.AioRpcError:
    """Return the error that gRPC would raise for a failed call.

    Args:
        status: detailed status, added to the trailing metadata as `grpc-status-details-bin`; None: no details.
        trailer: the other trailing metadata.
    """
    details = (("grpc-status-details-bin", status.SerializeToString()),) if status else ()
    return grpc.aio.AioRpcError(code, grpc.aio.Metadata(), grpc.aio.Metadata(*trailer, *details), message)


async def retry_while_overloaded(send: Callable[[], Awaitable[Any]]) -> Any:
    """Make a call and return its result. If the server is overloaded, repeat the call after the delay in RetryInfo."""
    end = time.monotonic() + PATIENCE
    while True:
        try:
            return await send()
        except grpc.aio.AioRpcError as error:
            delay = from_error(error).wait
            if delay is None or time.monotonic() + delay > end:
                raise
            await asyncio.sleep(delay)
