"""HTTP servers: the parts that uvicorn and Starlette lack. The extra of a component that serves HTTP installs both."""

from __future__ import annotations

import asyncio
import signal
import socket
from collections.abc import AsyncIterator, Callable, Collection, Iterable, Iterator, Sequence
from contextlib import asynccontextmanager, closing, contextmanager, suppress
from typing import TYPE_CHECKING, Any

import uvicorn
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from starpod.serving.sockets import known_host, link, listen

if TYPE_CHECKING:
    from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol as Protocol
else:
    from uvicorn.protocols.http.auto import AutoHTTPProtocol as Protocol

IDLE_SECONDS = 75
"""Clients' pools drop idle connections after 5 to 60 s. If the server closes one at that moment, a request is lost."""
LINGER_SECONDS = 2.0
"""Seconds for which the unread rest of a body is received, because resetting the connection would lose the response."""
_STARTED_SECONDS = 0.01


class IdleBoundProtocol(Protocol):
    """Closes a connection if no request begins within `timeout_keep_alive` seconds after its opening or last reply.

    uvicorn itself waits forever for the first request and for the rest of an incomplete head.
    """

    head_seconds: float | None = None
    """Time limit for the first request's head; None means `timeout_keep_alive`."""
    _deadline = 0.0

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._wait_for_request(self.head_seconds)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        waits = self.cycle is None or self.cycle.response_complete
        if waits and self.timeout_keep_alive_task is None and not self.transport.is_closing():
            self._arm()  # an incomplete head does not extend the deadline

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self.timeout_keep_alive_task is not None:
            self._wait_for_request()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._unset_keepalive_if_required()

    def _wait_for_request(self, seconds: float | None = None) -> None:
        self._deadline = self.loop.time() + (seconds or self.timeout_keep_alive)
        self._arm()

    def _arm(self) -> None:
        self._unset_keepalive_if_required()
        self.timeout_keep_alive_task = self.loop.call_at(self._deadline, self.timeout_keep_alive_handler)


class Server(uvicorn.Server):
    """Server of an ASGI application on listening sockets. The owner of the event loop handles signals.

    A response that is ready before its request's body was received ends when the body does, or after LINGER_SECONDS.
    `settings` are further settings of uvicorn.
    """

    def __init__(self, app: ASGIApp, listeners: Sequence[socket.socket], **settings: Any) -> None:
        defaults: dict[str, Any] = {
            "http": IdleBoundProtocol,
            "timeout_keep_alive": IDLE_SECONDS,
            "timeout_graceful_shutdown": 1,
            "lifespan": "off",
            "ws": "none",
            "log_config": None,
            "access_log": False,
            "server_header": False,
            "proxy_headers": False,
            "backlog": 1_024,
        }
        super().__init__(uvicorn.Config(_Lingering(app), **{**defaults, **settings}))
        self._listeners = list(listeners)
        self._task: asyncio.Task[None] | None = None

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leave signals to the owner of the event loop."""
        yield

    async def start(self) -> None:
        """Serve until `stop`."""
        self._task = asyncio.create_task(self.serve(self._listeners))
        while not self.started and not self._task.done():
            await asyncio.sleep(_STARTED_SECONDS)

    async def stop(self) -> None:
        """Close idle connections at once, and others after a second."""
        self.should_exit = True
        if self._task:
            await self._task


@asynccontextmanager
async def listening(app: ASGIApp, port: int = 0) -> AsyncIterator[str]:
    """Serve an application on this machine while the context lasts. Yield its URL, without a slash at the end.

    The application's lifespan is not run. port: 0 chooses a free one.
    """
    host = "127.0.0.1"
    with closing(listen(host, port)) as listener:
        server = Server(app, [listener])
        await server.start()
        try:
            yield link(listener, host).rstrip("/")
        finally:
            await server.stop()


async def serve(app: ASGIApp, listener: socket.socket) -> None:
    """Serve an application and its lifespan until SIGTERM or SIGINT. A second SIGINT does not wait for connections."""
    server = Server(app, [listener], lifespan="auto")
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, server.handle_exit, number, None)
    await server.serve([listener])


class KnownHosts:
    """ASGI middleware that passes requests with a known Host header to `app`, and others to `refusal`.

    names: the host names by which the server may be called, besides localhost and addresses.
    """

    def __init__(self, app: ASGIApp, names: Collection[str], refusal: ASGIApp) -> None:
        self._app = app
        self._names = names
        self._refusal = refusal

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        host = next((value for name, value in scope["headers"] if name == b"host"), b"")
        is_known_host = known_host(host.decode("latin-1"), self._names)
        await (self._app if is_known_host else self._refusal)(scope, receive, send)


def refuse_encoding(headers: Iterable[tuple[bytes, bytes]]) -> str:
    """Return why a body with these headers is refused; "" if it is plain UTF-8, which is all that our servers read."""
    for name, value in headers:
        text = value.decode("latin-1").strip().lower()
        if name == b"content-encoding" and not {part.strip() for part in text.split(",")} <= {"", "identity"}:
            return f"the body's content-encoding is {text[:80]!r}; send it as it is, without compression"
        if name == b"content-type":
            for parameter in text.split(";")[1:]:
                key, _, charset = parameter.partition("=")
                if key.strip() == "charset" and charset.strip(" \t\"'") not in ("utf-8", "utf8"):
                    return f"the body's charset is {charset.strip()[:80]!r}; send UTF-8"
    return ""


class PlainBodies:
    """ASGI middleware that passes requests with plain UTF-8 to `app`, and others to `refusal`, with the reason."""

    def __init__(self, app: ASGIApp, refusal: Callable[[Scope, str], ASGIApp]) -> None:
        self._app = app
        self._refusal = refusal

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        problem = refuse_encoding(scope.get("headers", ()))
        await (self._refusal(scope, problem) if problem else self._app)(scope, receive, send)


class _Lingering:
    """ASGI middleware that receives and discards the rest of a body before the response ends.

    A connection that is closed with unread data is reset, and the response is lost.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        has_unread_body = scope["type"] == "http" and any(
            name == b"transfer-encoding" or (name == b"content-length" and value != b"0")
            for name, value in scope["headers"]
        )
        if not has_unread_body:
            await self._app(scope, receive, send)
            return

        async def receive_part() -> Message:
            nonlocal has_unread_body
            message = await receive()
            has_unread_body = message.get("more_body", False)
            return message

        async def send_part(message: Message) -> None:
            if has_unread_body and message["type"] == "http.response.start":
                message["headers"] = [*message.get("headers", ()), (b"connection", b"close")]
            elif has_unread_body and not message.get("more_body", False):
                await send({**message, "more_body": True})
                with suppress(TimeoutError):
                    async with asyncio.timeout(LINGER_SECONDS):
                        while has_unread_body:
                            await receive_part()
                message = {"type": "http.response.body", "body": b""}
            await send(message)

        await self._app(scope, receive_part, send_part)
