"""A uvicorn server in the worker's event loop, with limits on connections that uvicorn lacks."""

from __future__ import annotations

import socket
import ssl
from asyncio import Transport
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

from starlette.types import ASGIApp
from uvicorn.protocols.http.httptools_impl import RequestResponseCycle

from starpod.env_server.operation.config import ServerConfig
from starpod.serving.http import IdleBoundProtocol, Server

_HEADERS_BYTES = 65_536
"""Maximum bytes of one request's headers, not counting the packet in which they begin."""


class _Protocol(IdleBoundProtocol):
    """Connection that is closed if `max_connections` are open already, or if its headers are too long or too late.

    `on_hang_up` is called with the number of unanswered requests if the caller closes a connection.
    """

    max_connections: int
    head_seconds: float
    on_hang_up: Callable[[int], None]

    def __init__(self, *arguments: Any, **settings: Any) -> None:
        super().__init__(*arguments, **settings)
        self._in_headers = self._began = False
        self._headers_bytes = 0
        self._unanswered: deque[RequestResponseCycle] = deque()

    def connection_made(self, transport: Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if len(self.connections) > self.max_connections:
            transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
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
        continues_headers, self._began = self._in_headers, False
        super().data_received(data)
        if continues_headers and self._in_headers and not self._began:
            self._headers_bytes += len(data)
            if self._headers_bytes > _HEADERS_BYTES:
                self.transport.abort()

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._in_headers = self._began = True
        self._headers_bytes = 0
        self._deadline = min(self._deadline, self.loop.time() + self.head_seconds)

    def on_headers_complete(self) -> None:
        self._in_headers = False
        super().on_headers_complete()
        self._forget_answered()
        if self.cycle is not None and (not self._unanswered or self._unanswered[-1] is not self.cycle):
            self._unanswered.append(self.cycle)

    def _forget_answered(self) -> None:
        """Drop the requests whose response is complete. Responses have the order of their requests."""
        while self._unanswered and self._unanswered[0].response_complete:
            self._unanswered.popleft()


class HTTPServer(Server):
    """Server of an ASGI application on a port of the worker's host.

    `on_hang_up` is called with the number of unanswered requests if a caller closes its connection.
    """

    def __init__(self, app: ASGIApp, config: ServerConfig, port: int, on_hang_up: Callable[[int], None]) -> None:
        limits, tls = config.limits, config.tls

        class Bounded(_Protocol):
            max_connections, head_seconds = limits.max_connections, config.handshake_seconds

        Bounded.on_hang_up = staticmethod(on_hang_up)

        listeners = list(_listen(config.host, port))
        self.port = int(listeners[0].getsockname()[1])
        super().__init__(
            app,
            listeners,
            http=Bounded,
            timeout_keep_alive=int(2 * config.keepalive_seconds),
            ssl_certfile=tls.certificate if tls else None,
            ssl_keyfile=tls.key if tls else None,
            ssl_ca_certs=str(tls.client_ca) if tls and tls.client_ca else None,
            ssl_cert_reqs=ssl.CERT_REQUIRED if tls and tls.client_ca else ssl.CERT_NONE,
        )


def _listen(host: str, port: int) -> Iterator[socket.socket]:
    """Yield a listening socket for each address of the host, on the same port (0: any free port). Raises OSError."""
    infos = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    for family, _, _, _, address in dict.fromkeys(infos):
        listener = socket.create_server((address[0], port), family=family, backlog=1_024)
        port = listener.getsockname()[1]
        yield listener
