"""Replies of one Stream on their way to the caller."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, Protocol

from starpod.env_server.episodes.errors import CallError
from starpod.env_server.episodes.timing import Timing, clock
from starpod.env_server.sessions.responses import split_response
from starpod.v1 import environment_pb2 as pb

_UNSENT_BYTES = 8 * 2**20
"""Above this many bytes of unsent replies, nothing more is read from the caller, who does not read fast enough."""


class ClientStream(Protocol):
    """Transport of a Stream. Both methods may wait. `read` returns grpc.aio.EOF when the caller has half-closed."""

    async def read(self) -> Any: ...

    async def write(self, message: pb.StreamResponse) -> None: ...


class Outbox:
    """Queue that writes one message at a time, and splits a message that is too large.

    Replies of calls that finish later are collected while a message is written, and then sent together. `refuse` is
    that of `split_response`.
    """

    def __init__(self, connection: ClientStream, max_bytes: int, refuse: Callable[[int, int], CallError]) -> None:
        self._connection = connection
        self._max_bytes = max_bytes
        self._refuse = refuse
        self._writing = asyncio.Lock()
        # Store sizes, because measuring a reply takes as long as serializing it.
        self._finished: list[tuple[pb.Reply, Timing, int]] = []
        self._unsent = 0
        self._wake = asyncio.Event()
        self._room = asyncio.Event()
        self._flusher = asyncio.get_running_loop().create_task(self._flush())

    def add(self, reply: pb.Reply, timing: Timing) -> None:
        """Add the reply of a call that finished after its message was answered."""
        size = reply.ByteSize()
        self._finished.append((reply, timing, size))
        self._unsent += size
        self._wake.set()

    async def keep_up(self) -> None:
        """Wait until the caller has read enough replies. Otherwise they would pile up."""
        while self._unsent > _UNSENT_BYTES:
            self._room.clear()
            await self._room.wait()

    async def write(self, response: pb.StreamResponse) -> int:
        """Write a message, split if it is too large, and return its size."""
        async with self._writing:
            return await self._send(response)

    async def finish(self) -> None:
        """Write the replies that were added."""
        async with self._writing:
            self._flusher.cancel()
        await self._write_finished()

    def close(self) -> None:
        self._flusher.cancel()

    async def _flush(self) -> None:
        """Send replies of calls that finish later. While one batch is written, the next one is collected."""
        while True:
            await self._wake.wait()
            self._wake.clear()
            await self._write_finished()

    async def _write_finished(self) -> None:
        async with self._writing:
            entries, self._finished = self._finished, []
            if entries:
                now = clock()
                timing = pb.ServerTiming(
                    environment_ms=1e3 * sum(timing.environment for _, timing, _ in entries),
                    total_ms=1e3 * sum(now - timing.arrived for _, timing, _ in entries),
                )
                replies = [reply for reply, _, _ in entries]
                await self._send(pb.StreamResponse(replies=replies, timing=timing))
                self._unsent -= sum(size for _, _, size in entries)
                self._room.set()

    async def _send(self, response: pb.StreamResponse) -> int:
        size = response.ByteSize()
        for message in split_response(response, size, self._max_bytes, self._refuse):
            await self._connection.write(message)
        return size
