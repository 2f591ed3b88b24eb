"""The interface `Wire`, over which messages travel to one server, and its implementation over gRPC."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, Protocol

import grpc
from google.protobuf.message import Message

from starpod.client.errors import ServerBug, Unreachable, from_rpc
from starpod.client.server_timing import find_server_timing
from starpod.v1 import environment_pb2 as pb
from starpod.v1 import environment_pb2_grpc as pb_grpc


class Unreadable(ServerBug):
    """A message of the Stream cannot be parsed."""


class Wire(Protocol):
    """One physical connection to a server: unary calls and at most one Stream.

    Every method may raise StarpodError: Unreachable if the connection is broken, else the server's error.
    """

    async def unary(self, rpc: str, request: Message, timeout: float) -> tuple[Any, str]:
        """Return the response to a call of an RPC such as "Open", and its Server-Timing. The timeout is in seconds."""

    def open(self) -> None:
        """Open the Stream."""

    async def read(self) -> pb.StreamResponse | None:
        """Return the next message of the Stream; None if the server ended it. Also raises Unreadable."""

    async def write(self, message: pb.StreamRequest) -> None:
        """Send a message on the Stream. Raises Unreachable if the Stream has ended; `read` then tells why."""

    def cancel(self) -> None:
        """End the Stream, if one is open. `read` then raises Unreachable."""

    async def close(self) -> None:
        """Close the connection."""


class Connector(Protocol):
    """A factory of wires. Transport is the factory of gRPC wires."""

    @property
    def max_message_bytes(self) -> int:
        """Maximum size of one message in either direction."""

    def connect(self, address: str, server_name: str = "") -> Wire:
        """Return a wire to a server. It need not be connected yet. Raises OSError or StarpodError."""


class GrpcWire:
    """A Wire over a gRPC channel to one address. `metadata` returns each call's metadata, or raises OSError or
    UnicodeDecodeError if the token's file cannot be read.
    """

    def __init__(
        self, address: str, channel: grpc.aio.Channel, metadata: Callable[[], tuple[tuple[str, str], ...]]
    ) -> None:
        self._address = address
        self._channel = channel
        self._read_metadata = metadata
        self._stub: Any = pb_grpc.EnvironmentServiceStub(channel)  # its methods are untyped in grpc.aio
        self._stream: Any = None

    async def unary(self, rpc: str, request: Message, timeout: float) -> tuple[Any, str]:
        try:
            call = getattr(self._stub, rpc)(request, timeout=timeout, metadata=self._metadata())
            return await call, find_server_timing(await call.trailing_metadata())
        except grpc.aio.AioRpcError as error:
            raise from_rpc(error) from None
        except asyncio.CancelledError:
            if _is_being_cancelled():
                raise
            raise Unreachable(f"The connection to {self._address} was closed during a call.") from None

    def open(self) -> None:
        self._stream = self._stub.Stream(metadata=self._metadata())

    async def read(self) -> pb.StreamResponse | None:
        try:
            message: Any = await self._stream.read()
            if message is grpc.aio.EOF:
                code = await self._stream.code()
                if code is not grpc.StatusCode.OK:
                    raise Unreachable(await self._stream.details() or code.name, code=code)
                return None
        except grpc.aio.AioRpcError as error:
            raise from_rpc(error) from None
        except asyncio.CancelledError:
            if _is_being_cancelled():
                raise
            raise Unreachable(f"The Stream of {self._address} was cancelled.") from None
        if message is None:  # gRPC could not parse the bytes
            raise Unreadable(f"A message of the Stream of {self._address} cannot be read.")
        response: pb.StreamResponse = message
        return response

    async def write(self, message: pb.StreamRequest) -> None:
        try:
            await self._stream.write(message)
        except (grpc.aio.AioRpcError, asyncio.InvalidStateError):
            raise Unreachable(f"The Stream of {self._address} has ended.") from None

    def cancel(self) -> None:
        if self._stream is not None:
            self._stream.cancel()

    async def close(self) -> None:
        await self._channel.close()

    def _metadata(self) -> tuple[tuple[str, str], ...]:
        try:
            return self._read_metadata()
        except (OSError, UnicodeDecodeError) as error:
            raise Unreachable(f"The token for {self._address} cannot be read: {error}") from None


def _is_being_cancelled() -> bool:
    """Return whether the current task was cancelled, and not only the call that it waits for.

    This is a function so that callers have no local variable for the task. A cancelled task refers to its exception,
    and the exception refers to the caller's frame. Such a variable would close the cycle and keep the frame and its
    channel alive. gRPC's threads end only with the channel, and a fork waits for their end.
    """
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0
