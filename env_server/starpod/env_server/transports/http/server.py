"""A uvicorn server in the worker's event loop, with limits on connections that uvicorn lacks."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
from asyncio import TimerHandle, Transport
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from starpod.env_server.config import ServerConfig

_HEADERS_BYTES = 65_536
"""Maximum bytes of one request's headers, not counting the packet in which they begin."""
_STARTED_SECONDS = 0.01


class _Server(uvicorn.Server):
    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leave signals to the owner of the event loop."""
        yield


class _Protocol(HttpToolsProtocol):
    """Connection that is closed if `max_connections` are open already, or its headers are long or late (`seconds`).

    `on_hang_up` is called with the number of unanswered requests if the caller closes a connection.
    """

    max_connections: int
    seconds: float
    on_hang_up: Callable[[int], None]

    def __init__(self, *arguments: Any, **settings: Any) -> None:
        super().__init__(*arguments, **settings)
        self._in_headers = self._began = False
        self._headers_bytes = 0
        self._impatience: TimerHandle | None = None
        self._unanswered: deque[RequestResponseCycle] = deque()

    def connection_made(self, transport: Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._wait_for_headers()
        if len(self.connections) > self.max_connections:
            transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_waiting()
        super().connection_lost(exc)
        # uvicorn informs only the newest request. Pipelined earlier ones would write to a closed connection, which is
        # an error in uvloop.
        for cycle in self._unanswered:
            cycle.disconnected = True
            cycle.message_event.set()
        self._forget_answered()
        if self._unanswered:
            self.on_hang_up(len(self._unanswered))

    def data_received(self, data: bytes) -> None:
        goes_on, self._began = self._in_headers, False
        super().data_received(data)
        if goes_on and self._in_headers and not self._began:
            self._headers_bytes += len(data)
            if self._headers_bytes > _HEADERS_BYTES:
                self.transport.abort()

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._in_headers = self._began = True
        self._headers_bytes = 0
        if self._impatience is None:
            self._wait_for_headers()

    def on_headers_complete(self) -> None:
        self._in_headers = False
        self._stop_waiting()
        super().on_headers_complete()
        self._forget_answered()
        if self.cycle is not None and (not self._unanswered or self._unanswered[-1] is not self.cycle):
            self._unanswered.append(self.cycle)

    def _forget_answered(self) -> None:
        """Drop the requests whose response is complete. Responses have the order of their requests."""
        while self._unanswered and self._unanswered[0].response_complete:
            self._unanswered.popleft()

    def _wait_for_headers(self) -> None:
        self._impatience = self.loop.call_later(self.seconds, self.transport.abort)

    def _stop_waiting(self) -> None:
        if self._impatience is not None:
            self._impatience.cancel()
            self._impatience = None


class HTTPServer:
    """Server of an ASGI application on a port. Use `await start()` and `await stop()`.

    `on_hang_up` is called with the number of unanswered requests if a caller closes its connection.
    """

    def __init__(self, app: Any, config: ServerConfig, port: int, on_hang_up: Callable[[int], None]) -> None:
        limits, tls = config.limits, config.tls

        class Bounded(_Protocol):
            max_connections, seconds = limits.max_connections, config.handshake_seconds

        Bounded.on_hang_up = staticmethod(on_hang_up)

        self._sockets = list(_listen(config.host, port))
        self.port = int(self._sockets[0].getsockname()[1])
        self._server = _Server(
            uvicorn.Config(
                app,
                http=Bounded,
                loop="none",
                ws="none",
                lifespan="off",
                interface="asgi3",
                log_config=None,
                access_log=False,
                server_header=False,
                proxy_headers=False,
                backlog=1_024,
                timeout_keep_alive=int(2 * config.keepalive_seconds),
                timeout_graceful_shutdown=1,
                ssl_certfile=tls.certificate if tls else None,
                ssl_keyfile=tls.key if tls else None,
                ssl_ca_certs=str(tls.client_ca) if tls and tls.client_ca else None,
                ssl_cert_reqs=ssl.CERT_REQUIRED if tls and tls.client_ca else ssl.CERT_NONE,
            )
        )
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        self._task = asyncio.get_running_loop().create_task(self._server.serve(self._sockets))
        while not self._server.started and not self._task.done():
            await asyncio.sleep(_STARTED_SECONDS)

    async def stop(self) -> None:
        """Close idle connections at once, and others after a second."""
        self._server.should_exit = True
        if self._task:
            await self._task


def _listen(host: str, port: int) -> Iterator[socket.socket]:
    """Yield a listening socket for each address of the host, on the same port (0: any free port). Raises OSError."""
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    for family, _, _, _, address in dict.fromkeys(found):
        listener = socket.create_server((address[0], port), family=family, backlog=1_024)
        port = listener.getsockname()[1]
        yield listener
