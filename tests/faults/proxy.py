"""A TCP proxy that misbehaves: it knows nothing of HTTP/2 or gRPC, only of bytes and connections.

It runs on a thread of its own, so that a test that blocks and one in an event loop use it alike. What it shall do is
set as attributes, at any time; bytes that are on their way obey the new setting.
"""

import asyncio
import contextlib
import random
import socket
import struct
import threading
from collections import Counter
from concurrent.futures import Future
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

CHUNK = 65_536
TICK = 0.005


@dataclass
class Way:
    """The transport of bytes in one direction.

    delay, jitter: seconds; each chunk waits for the delay and up to the jitter more. Order is kept.
    bytes_per_second: 0 means no limit.
    open: False accepts bytes without forwarding them; they are kept until it is open again.
    """

    delay: float = 0.0
    jitter: float = 0.0
    bytes_per_second: float = 0.0
    open: bool = True


class Pipe:
    """One connection through the proxy: two sockets, and a task for each direction."""

    def __init__(self, proxy: "Proxy", client: asyncio.StreamWriter, server: asyncio.StreamWriter) -> None:
        self.proxy = proxy
        self.client = client
        self.server = server
        self.gone = False
        self.detained = False

    async def carry(self, way: Way, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, sent: str) -> None:
        """Forwards until the end of one side; then the other side hears of it."""
        luck = random.Random(f"{self.proxy.seed} {sent}")
        while data := await reader.read(CHUNK):
            await self._passable(way)
            if way.delay or way.jitter:
                await asyncio.sleep(way.delay + way.jitter * luck.random())
                await self._passable(way)
            cut_after, self.proxy.cut_after = self.proxy.cut_after, None
            if cut_after is not None:
                # In the middle of a frame: some bytes of it arrive, and no more ever.
                writer.write(data[:cut_after])
                await writer.drain()
                self.proxy.counts["cut"] += 1
                self.end(reset=self.proxy.resets)
                return
            while data:
                piece, data = data, b""
                if way.bytes_per_second:
                    size = max(1, int(way.bytes_per_second * TICK))
                    piece, data = piece[:size], piece[size:]
                    await asyncio.sleep(len(piece) / way.bytes_per_second)
                self.proxy.counts[sent] += len(piece)
                writer.write(piece)
                await writer.drain()

    async def _passable(self, way: Way) -> None:
        while not way.open or self.detained:
            await asyncio.sleep(TICK)

    def end(self, *, reset: bool) -> None:
        """Closes both sockets: with a reset (RST), or with an orderly end (FIN)."""
        self.gone = True
        for writer in (self.client, self.server):
            close(writer, reset=reset)


class Proxy:
    """A proxy on a port of its own that forwards to `upstream` ("host:port"), as `to_server` and `to_client` say.

    address: where clients reach it; the same after `refuse` and `accept`.
    resets: cuts are resets (RST), otherwise orderly ends (FIN).
    cut_after: the next chunk in either direction is cut after this number of bytes, together with its connection.
    counts: bytes forwarded ("to_server", "to_client"), connections ("accepted"), cuts ("cut").
    """

    def __init__(self, upstream: str, *, host: str = "127.0.0.1", seed: int = 0) -> None:
        self.upstream = upstream
        self.host = host
        self.seed = seed
        self.to_server = Way()
        self.to_client = Way()
        self.resets = True
        self.cut_after: int | None = None
        self.counts: Counter[str] = Counter()
        self.address = ""
        self._pipes: set[Pipe] = set()
        self._tasks: set[asyncio.Task[Any]] = set()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="proxy", daemon=True)
        self._server: asyncio.Server | None = None

    def __enter__(self) -> Self:
        self._thread.start()
        self._do(self._listen(0))
        return self

    def __exit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        self._do(self._close())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    @property
    def connections(self) -> int:
        """Return the number of open connections."""
        return len(self._pipes)

    # --- faults ------------------------------------------------------------------------------------------------------

    def black_hole(self, *, to_server: bool = True, to_client: bool = True) -> None:
        """Takes connections and bytes in and forwards none, in both directions or one."""
        self.to_server.open = not to_server
        self.to_client.open = not to_client

    def heal(self) -> None:
        """Forwards faithfully again, and listens again. Connections that were cut stay so."""
        self.to_server.open = self.to_client.open = True
        for way in (self.to_server, self.to_client):
            way.delay = way.jitter = way.bytes_per_second = 0.0
        self.accept()

    def cut(self, *, reset: bool = True) -> int:
        """Ends every connection; returns how many there were."""
        return self._do(self._cut(reset))

    def refuse(self) -> None:
        """Stops listening and cuts what there is: connections are refused."""
        self._do(self._refuse())

    def accept(self) -> None:
        """Listen again after `refuse`."""
        if self._server is None:
            self._do(self._listen(int(self.address.rpartition(":")[2])))

    def detain(self) -> int:
        """Freeze the present connections with the bytes in them, and reset them for their clients.

        The next connection overtakes them. Return their number.
        """
        return self._do(self._detain())

    def release(self) -> None:
        """Deliver the bytes of frozen connections to the server."""
        self._do(self._release())

    # --- the thread's own --------------------------------------------------------------------------------------------

    def _do(self, coroutine: Any) -> Any:
        future: Future[Any] = asyncio.run_coroutine_threadsafe(coroutine, self._loop)
        return future.result(30)

    async def _listen(self, port: int) -> None:
        self._server = await asyncio.start_server(self._accepted, self.host, port)
        self.address = f"{self.host}:{self._server.sockets[0].getsockname()[1]}"

    async def _accepted(self, from_client: asyncio.StreamReader, to_client: asyncio.StreamWriter) -> None:
        if self._server is None:
            # It waited in the queue when the door was shut.
            close(to_client, reset=True)
            return
        self.counts["accepted"] += 1
        host, _, port = self.upstream.rpartition(":")
        try:
            from_server, to_server = await asyncio.open_connection(host, int(port))
        except OSError:
            close(to_client, reset=True)
            return
        if self._server is None:
            close(to_client, reset=True)
            close(to_server, reset=True)
            return
        pipe = Pipe(self, to_client, to_server)
        self._pipes.add(pipe)
        ways = (
            asyncio.create_task(pipe.carry(self.to_server, from_client, to_server, "to_server")),
            asyncio.create_task(pipe.carry(self.to_client, from_server, to_client, "to_client")),
        )
        self._tasks.update(ways)
        try:
            await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
            if pipe.detained:
                while pipe.detained:
                    await asyncio.sleep(TICK)
                # What the client had sent arrives; then the server sees its end.
                await asyncio.wait(ways[:1], timeout=5)
        finally:
            for task in ways:
                task.cancel()
            await asyncio.gather(*ways, return_exceptions=True)
            self._tasks.difference_update(ways)
            self._pipes.discard(pipe)
            if not pipe.gone:
                pipe.end(reset=any(task.done() and not task.cancelled() and task.exception() for task in ways))

    async def _cut(self, reset: bool) -> int:
        pipes = [pipe for pipe in self._pipes if not pipe.gone and not pipe.detained]
        for pipe in pipes:
            pipe.end(reset=reset)
        self.counts["cut"] += len(pipes)
        return len(pipes)

    async def _refuse(self) -> None:
        if self._server is not None:
            self._server.close()
            self._server = None
        await self._cut(True)

    async def _detain(self) -> int:
        pipes = [pipe for pipe in self._pipes if not pipe.gone and not pipe.detained]
        for pipe in pipes:
            pipe.detained = True
            close(pipe.client, reset=True)
        return len(pipes)

    async def _release(self) -> None:
        for pipe in self._pipes:
            pipe.detained = False

    async def _close(self) -> None:
        if self._server is not None:
            self._server.close()
        await self._cut(True)
        await self._release()
        for task in list(self._tasks):
            task.cancel()
        while self._pipes:
            await asyncio.sleep(TICK)


def close(writer: asyncio.StreamWriter, *, reset: bool) -> None:
    """Ends a connection with FIN, or with RST (SO_LINGER of 0 seconds)."""
    raw = writer.get_extra_info("socket")
    if reset and raw is not None:
        with contextlib.suppress(OSError):
            raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        writer.transport.abort()
    else:
        writer.close()
