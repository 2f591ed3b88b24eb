"""One HTTP request and its response, for all protocols served over HTTP.

Headers are checked before the body, the body is bounded, and errors are google.rpc.Status as JSON.
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import math
from collections.abc import Awaitable, Callable, Iterable, MutableMapping, Sequence
from http import HTTPStatus
from typing import Any, Protocol

from google.rpc import code_pb2, status_pb2

from starpod.env_server.errors import CallError, bad_argument
from starpod.env_server.limits import Tenant
from starpod.env_server.transports.encoding import body_too_large, write_json

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
Headers = Sequence[tuple[str, str]]

JSON = "application/json"
_LINGER_SECONDS = 2.0
"""Seconds for which the unread rest of a body is received, because resetting the connection would lose the response."""
_LENGTH_DIGITS = 20
"""Maximum digits of a Content-Length. Python refuses to parse more than 4,300."""

_STATUS = {
    code_pb2.INVALID_ARGUMENT: HTTPStatus.BAD_REQUEST,
    code_pb2.FAILED_PRECONDITION: HTTPStatus.BAD_REQUEST,
    code_pb2.UNAUTHENTICATED: HTTPStatus.UNAUTHORIZED,
    code_pb2.NOT_FOUND: HTTPStatus.NOT_FOUND,
    code_pb2.RESOURCE_EXHAUSTED: HTTPStatus.TOO_MANY_REQUESTS,
    code_pb2.UNIMPLEMENTED: HTTPStatus.NOT_IMPLEMENTED,
    code_pb2.UNAVAILABLE: HTTPStatus.SERVICE_UNAVAILABLE,
    code_pb2.DEADLINE_EXCEEDED: HTTPStatus.GATEWAY_TIMEOUT,
}
"""HTTP status of each code, as in google/rpc/code.proto; other codes are 500."""


class Refused(Exception):
    """A request that is refused with a specific HTTP status."""

    def __init__(self, status: HTTPStatus, error: CallError, headers: Headers = ()) -> None:
        super().__init__(str(error))
        self.status = status
        self.error = error
        self.headers = headers


class Exchange:
    """One ASGI request and its response.

    Attributes:
        metadata: the request's headers, under gRPC's name for them.
        streaming: whether a response of server-sent events has begun.
    """

    def __init__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.scope = scope
        self.send = send
        self.streaming = False
        self.verb: str = scope["method"]
        self.path: str = scope["raw_path"].decode("ascii")
        self.metadata = [(name.decode("latin-1"), value.decode("latin-1")) for name, value in scope["headers"]]
        client = scope["client"] or ("", 0)
        self.peer = f"ipv6:[{client[0]}]:{client[1]}" if ":" in client[0] else f"ipv4:{client[0]}:{client[1]}"
        self._receive = receive
        self._read = False

    def header(self, name: str) -> str:
        return next((value for key, value in self.metadata if key == name), "")

    # --- the request -----------------------------------------------------------------------------------------------

    def check_host(self, names: Iterable[str]) -> None:
        """Refuse a Host header with an unknown name. IP addresses are accepted.

        Another site's page could otherwise let its own name resolve to our address (DNS rebinding), and share our
        origin.
        """
        host = self.header("host")
        name = host.rpartition(":")[0] if host.rpartition(":")[2].isdecimal() else host
        with contextlib.suppress(ValueError):
            ipaddress.ip_address(name.strip("[]"))
            return
        if name.lower() not in names:
            problem = f"{host[:80]!r} is no name of this server; start it with --http-host NAME, or call its address"
            raise Refused(HTTPStatus.MISDIRECTED_REQUEST, bad_argument("host", problem))

    def check_body(self, most: int) -> None:
        """Refuse, by its headers, a body that is not JSON, lacks a length or exceeds `most` bytes (0: no limit)."""
        kind = self.header("content-type").partition(";")[0].strip().lower()
        if kind != JSON:
            error = bad_argument("content-type", f"is {kind[:80]!r}; send JSON, with content-type: {JSON}")
            raise Refused(HTTPStatus.UNSUPPORTED_MEDIA_TYPE, error)
        length = self.header("content-length")
        if self.header("transfer-encoding") or not length.isdecimal():
            error = bad_argument("content-length", "is missing; send the body whole, with its length")
            raise Refused(HTTPStatus.LENGTH_REQUIRED, error)
        if len(length) > _LENGTH_DIGITS:
            problem = f"has {len(length)} digits; write the number of bytes without leading zeros"
            raise Refused(HTTPStatus.BAD_REQUEST, bad_argument("content-length", problem))
        if most and int(length) > most:
            raise body_too_large(int(length), most)

    async def body(self) -> bytes:
        """Receive the request's body. Raises ConnectionError if the caller has disconnected."""
        data = bytearray()
        more = True
        while more:
            message = await self._receive()
            if message["type"] == "http.disconnect":
                raise ConnectionError("the caller is gone")
            data += message.get("body", b"")
            more = message.get("more_body", False)
        self._read = True
        return bytes(data)

    # --- the response ----------------------------------------------------------------------------------------------

    async def respond(
        self, body: bytes, status: HTTPStatus = HTTPStatus.OK, headers: Headers = (), content_type: str = JSON
    ) -> None:
        closing = () if self._read or self.verb == "GET" else (("connection", "close"),)
        length = (("content-length", str(len(body))),)
        await self._start(status, content_type, (*length, *headers, *closing))
        if closing:
            await self.send({"type": "http.response.body", "body": body, "more_body": True})
            await self._linger()
            body = b""
        await self.send({"type": "http.response.body", "body": body})

    async def fail(self, error: CallError, status: HTTPStatus | None = None, headers: Headers = ()) -> None:
        """Respond with google.rpc.Status as JSON."""
        more = list(headers)
        if error.retry_after is not None:
            more.append(("retry-after", str(max(1, math.ceil(error.retry_after)))))
        if error.reason == "UNAUTHENTICATED":
            more.append(("www-authenticate", "Bearer"))
        if status is None:
            too_large = error.reason == "TOO_LARGE"  # unlike 429, it must not be retried
            found = HTTPStatus.REQUEST_ENTITY_TOO_LARGE if too_large else _STATUS.get(error.code)
            status = found or HTTPStatus.INTERNAL_SERVER_ERROR
        await self.respond(write_status(error.status()), status, more)

    async def start_events(self) -> None:
        """Begin a response of server-sent events. Repeated calls have no effect."""
        if self.streaming:
            return
        self.streaming = True
        await self._start(HTTPStatus.OK, "text/event-stream", (("cache-control", "no-store"),))

    async def send_event(self, data: bytes, name: str = "") -> None:
        event = b"event: %s\n" % name.encode() if name else b""
        await self.send({"type": "http.response.body", "body": b"%sdata: %s\n\n" % (event, data), "more_body": True})

    async def end_events(self) -> None:
        await self.send({"type": "http.response.body", "body": b""})

    async def _start(self, status: HTTPStatus, content_type: str, headers: Headers) -> None:
        encoded = [(name.encode(), value.encode()) for name, value in (("content-type", content_type), *headers)]
        await self.send({"type": "http.response.start", "status": int(status), "headers": encoded})

    async def _linger(self) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_LINGER_SECONDS):
                while (message := await self._receive())["type"] != "http.disconnect" and message.get("more_body"):
                    pass


def write_status(status: status_pb2.Status) -> bytes:
    """Return an error as JSON."""
    return write_json(status)


class Carried(Protocol):
    """Another protocol over HTTP, beside the contract's own paths. `name` is its name in metrics and traces."""

    name: str

    def claims(self, path: str) -> bool:
        """Return whether a path outside the contract belongs to this protocol."""

    def admit(self, exchange: Exchange) -> None:
        """Check a request's headers before the caller is identified. Raises Refused."""

    def has_body(self, exchange: Exchange) -> bool:
        """Return whether a POST has a body, which is then received within the limits."""

    async def answer(self, exchange: Exchange, body: bytes, tenant: Tenant) -> None:
        """Answer a request. Raises CallError, or Refused for errors that have a specific HTTP status."""
