"""One HTTP request and its response, for all protocols served over HTTP.

Headers are checked before the body, the body is bounded, and errors are google.rpc.Status as JSON.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from http import HTTPStatus
from typing import ClassVar

from google.rpc import code_pb2
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from starpod.env_server.episodes.errors import CallError, bad_argument
from starpod.env_server.operation.tenants import Tenant
from starpod.env_server.transports.encoding import body_too_large, write_json
from starpod.serving.http import refuse_encoding

Headers = Sequence[tuple[str, str]]

JSON = "application/json"
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


class RequestRefused(Exception):
    """A request that is refused with a specific HTTP status."""

    def __init__(self, status: HTTPStatus, error: CallError) -> None:
        super().__init__(str(error))
        self.status = status
        self.error = error


class HTTPExchange(Request):
    """One request and its response.

    Attributes:
        path: the request's path.
        metadata: the request's headers, under gRPC's name for them.
        peer: the caller's address, as gRPC spells it.
        streaming: whether a response of server-sent events has begun.
    """

    def __init__(self, scope: Scope, receive: Receive, send: Send) -> None:
        super().__init__(scope, receive, send)
        self.send = send
        self.path: str = scope["path"]
        self.metadata = self.headers.items()
        self._values = dict(self.metadata)  # Starlette searches the list of headers each time
        client = scope["client"] or ("", 0)
        self.peer = f"ipv6:[{client[0]}]:{client[1]}" if ":" in client[0] else f"ipv4:{client[0]}:{client[1]}"
        self.streaming = False

    def header(self, name: str) -> str:
        return self._values.get(name, "")

    # --- the request -----------------------------------------------------------------------------------------------

    def check_body(self, max_bytes: int) -> None:
        """Refuse a body if its headers do not say that it is plain JSON of at most `max_bytes` (0 means no limit)."""
        media_type = self.header("content-type").partition(";")[0].strip().lower()
        if media_type != JSON:
            error = bad_argument("content-type", f"is {media_type[:80]!r}; send JSON, with content-type: {JSON}")
            raise RequestRefused(HTTPStatus.UNSUPPORTED_MEDIA_TYPE, error)
        if problem := refuse_encoding(self.scope["headers"]):
            raise RequestRefused(HTTPStatus.UNSUPPORTED_MEDIA_TYPE, CallError("BAD_ARGUMENT", problem))
        length = self.header("content-length")
        if self.header("transfer-encoding") or not length.isdecimal():
            error = bad_argument("content-length", "is missing; send the body whole, with its length")
            raise RequestRefused(HTTPStatus.LENGTH_REQUIRED, error)
        if len(length) > _LENGTH_DIGITS:
            problem = f"has {len(length)} digits; write the number of bytes without leading zeros"
            raise RequestRefused(HTTPStatus.BAD_REQUEST, bad_argument("content-length", problem))
        if max_bytes and int(length) > max_bytes:
            raise body_too_large(int(length), max_bytes)

    async def body(self) -> bytes:
        """Receive the request's body, which is not kept. Raises ClientDisconnect if the caller has disconnected."""
        return b"".join([part async for part in self.stream()])

    # --- the response ----------------------------------------------------------------------------------------------

    async def respond(
        self, body: bytes, status: HTTPStatus = HTTPStatus.OK, headers: Headers = (), content_type: str = JSON
    ) -> None:
        """Send the whole response.

        Args:
            headers: names and values besides those of the content.
        """
        await Response(body, status, dict(headers), content_type)(self.scope, self.receive, self.send)

    async def fail(self, error: CallError, status: HTTPStatus | None = None, headers: Headers = ()) -> None:
        """Respond with google.rpc.Status as JSON.

        Args:
            status: status of the response; None derives it from the error's code and reason.
            headers: additional names and values. `retry-after` and `www-authenticate` follow from the error.
        """
        all_headers = list(headers)
        if error.retry_after is not None:
            all_headers.append(("retry-after", str(max(1, math.ceil(error.retry_after)))))
        if error.reason == "UNAUTHENTICATED":
            all_headers.append(("www-authenticate", "Bearer"))
        if status is None:
            is_too_large = error.reason == "TOO_LARGE"  # unlike 429, it must not be retried
            known_status = HTTPStatus.REQUEST_ENTITY_TOO_LARGE if is_too_large else _STATUS.get(error.code)
            status = known_status or HTTPStatus.INTERNAL_SERVER_ERROR
        await self.respond(write_json(error.status()), status, all_headers)

    async def start_events(self) -> None:
        """Begin a response of server-sent events. Repeated calls have no effect."""
        if self.streaming:
            return
        self.streaming = True
        headers = [(b"content-type", b"text/event-stream"), (b"cache-control", b"no-store")]
        await self.send({"type": "http.response.start", "status": int(HTTPStatus.OK), "headers": headers})

    async def send_event(self, data: bytes, name: str = "") -> None:
        event = b"event: %s\n" % name.encode() if name else b""
        await self.send({"type": "http.response.body", "body": b"%sdata: %s\n\n" % (event, data), "more_body": True})

    async def end_events(self) -> None:
        await self.send({"type": "http.response.body", "body": b""})


class HTTPProtocol(ABC):
    """Another protocol over HTTP, beside the contract's own paths."""

    name: ClassVar[str]
    """Name in metrics and traces."""
    paths: ClassVar[Sequence[str]] = ()
    """Paths of the protocol's POST requests, in Starlette's syntax. If empty, it gets all paths that no other route
    matches."""

    def admit(self, exchange: HTTPExchange) -> None:  # noqa: B027 - most protocols have nothing to do
        """Prepare a request before its caller is identified."""

    def has_body(self, exchange: HTTPExchange) -> bool:
        """Return whether a POST has a body, which is then received within the limits."""
        return True

    @abstractmethod
    async def answer(self, exchange: HTTPExchange, body: bytes, tenant: Tenant) -> None:
        """Answer a request. Raises CallError, or RequestRefused for errors that have a specific HTTP status.

        Args:
            body: the whole body; empty if `has_body` is False.
        """
