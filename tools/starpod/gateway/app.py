"""The gateway over HTTP: routes, keys, limits of requests, and errors in the form of the API that was called."""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import json
import math
import re
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Coroutine, Mapping
from contextlib import ExitStack, nullcontext, suppress
from http import HTTPStatus
from typing import Any, Protocol, TypeVar

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from starpod.gateway.dialects.base import Dialect
from starpod.gateway.dialects.chat import ChatCompletions
from starpod.gateway.dialects.messages import Messages
from starpod.gateway.dialects.responses import Responses
from starpod.gateway.requests import Ask, Rejected, bad_request
from starpod.gateway.session import RolloutSession
from starpod.gateway.streams import LiveReply
from starpod.gateway.turns import Rotation
from starpod.serving.http import KnownHosts, PlainBodies
from starpod.serving.sockets import parse_whole

MOST_BODY_BYTES = 8 * 2**20
"""Default maximum size of a request's body. The longest context is far shorter."""
_HEARTBEAT_SECONDS = 5.0
"""Seconds after which a stream begins even if its reply is not ready. Comments at this interval then keep it alive."""
_LARGE_BODY_BYTES = 2**18
_LARGE_BODIES = 4
"""Maximum number of large bodies received at the same time, to bound their memory. Smaller bodies never wait."""
_BODY_SECONDS = 60.0
"""Time limit in seconds for receiving a body, so that a slow client cannot keep one of the _LARGE_BODIES places."""
_SIGNATURE = 32
_SURROGATE_ESCAPE = re.compile(rb"\\u[dD][89a-fA-F]")
_large_bodies = Rotation(_LARGE_BODIES)
_CHAT, _MESSAGES = ChatCompletions(), Messages()
_DIALECTS: tuple[Dialect, ...] = (_CHAT, Responses(), _MESSAGES)

Endpoint = Callable[[Request], Awaitable[Response]]
Result = TypeVar("Result")


class SessionHost(Protocol):
    """The object that owns the sessions and finds them by name."""

    def find(self, name: str) -> RolloutSession:
        """Return the session with this name. Raise Rejected if there is none."""


class Keys:
    """API keys of sessions.

    If the gateway has no token, a key is the session's name. Otherwise a key also has a signature, so that only the
    owner of the token can create keys.
    """

    def __init__(self, token: str = "") -> None:
        self._token = token.encode()

    def key(self, name: str) -> str:
        """Return the API key of a session."""
        return f"{name}.{self._sign(name)}" if self._token else name

    def name(self, key: str) -> str:
        """Return the name of the session that a key belongs to. Raise Rejected for an invalid key."""
        name, _, signature = key.rpartition(".") if self._token else (key, "", "")
        if not name or (self._token and not hmac.compare_digest(signature.encode(), self._sign(name).encode())):
            raise Rejected(HTTPStatus.UNAUTHORIZED, "invalid_api_key", "the API key names no session of this gateway")
        return name

    def admits(self, key: str) -> bool:
        """Return whether a key is the token, which is required to begin, reward and end sessions."""
        return not self._token or hmac.compare_digest(key.encode(), self._token)

    def _sign(self, name: str) -> str:
        return hmac.new(self._token, name.encode(), hashlib.sha256).hexdigest()[:_SIGNATURE]


def create_app(
    host: SessionHost,
    *,
    model: str,
    keys: Keys | None = None,
    hosts: Collection[str] = (),
    most_body_bytes: int = MOST_BODY_BYTES,
    more: Mapping[tuple[str, str], Endpoint] | None = None,
    mounted: Mapping[str, ASGIApp] | None = None,
) -> Starlette:
    """Return the application that serves the sessions of a host.

    Args:
        host: the object that owns the sessions.
        model: the model name that /v1/models lists.
        keys: the API keys; None: session names.
        hosts: host names that requests may use, besides localhost and IP addresses.
        most_body_bytes: maximum size of a request's body.
        more: further endpoints by method and path.
        mounted: ASGI applications by path.
    """
    keys = keys or Keys()

    def complete(dialect: Dialect) -> Endpoint:
        async def endpoint(request: Request) -> Response:
            name = keys.name(key_of(request))  # first: the body of a caller without a key is not received
            ask = dialect.read(await read_json(request, most_body_bytes))
            session = host.find(name)
            if not ask.stream:
                return JSONResponse(dialect.write(ask, await _while_connected(request, session.complete(ask))))
            with ExitStack() as stack:
                live = stack.enter_context(session.follow(ask))
                # Raise an early error now: once the stream has begun, the status cannot change.
                with suppress(TimeoutError):
                    await _while_connected(request, asyncio.wait_for(live.head(), _HEARTBEAT_SECONDS))
                return _EventStream(_stream(dialect, ask, live), stack.pop_all())

        return endpoint

    async def count_tokens(request: Request) -> Response:
        name = keys.name(key_of(request))
        ask = _MESSAGES.read(await read_json(request, most_body_bytes))
        return JSONResponse({"input_tokens": await host.find(name).count(ask)})

    endpoints = {("POST", dialect.path): complete(dialect) for dialect in _DIALECTS}
    endpoints["POST", f"{_MESSAGES.path}/count_tokens"] = count_tokens
    endpoints |= {("GET", "/v1/models"): _list_model(model), ("GET", "/health"): _health, **(more or {})}
    return Starlette(
        routes=[
            *(Route(path, _guarded(endpoint), methods=[method]) for (method, path), endpoint in endpoints.items()),
            *(Route(path, inner) for path, inner in (mounted or {}).items()),
        ],
        middleware=[
            Middleware(KnownHosts, names=hosts, refusal=_unknown_host),
            Middleware(PlainBodies, refusal=_encoded),
        ],
        exception_handlers={HTTPException: _not_found, Exception: _internal_error},
    )


def key_of(request: Request) -> str:
    """Return the API key in a request's Authorization or x-api-key header; empty without one."""
    scheme, _, key = request.headers.get("authorization", "").partition(" ")
    return key.strip() if scheme.lower() == "bearer" else request.headers.get("x-api-key", "").strip()


async def read_json(request: Request, max_bytes: int = MOST_BODY_BYTES) -> dict[str, Any]:
    """Return the JSON object in a request's body. Raise Rejected if the body is invalid, too long or too slow."""
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":  # browsers send this type to another site only if that site allows it
        raise Rejected(HTTPStatus.UNSUPPORTED_MEDIA_TYPE, "not_json", "send JSON, with content-type: application/json")
    length = request.headers.get("content-length")
    expected_bytes = max_bytes if length is None else parse_whole(length, max_bytes)
    if expected_bytes is None:
        raise _too_large_error(max_bytes)
    large = expected_bytes > _LARGE_BODY_BYTES
    async with _large_bodies.turn(key_of(request)) if large else nullcontext():
        try:
            async with asyncio.timeout(_BODY_SECONDS):
                data = await _receive(request, max_bytes)
        except TimeoutError:
            message = f"the body did not arrive within {_BODY_SECONDS:.0f} seconds; send it again"
            raise Rejected(HTTPStatus.REQUEST_TIMEOUT, "body_timeout", message) from None
        try:
            # Python would parse NaN and infinities, which JSON replies cannot contain.
            body = json.loads(data.decode(), parse_constant=_refuse_constant, parse_float=_finite_float)
            if _SURROGATE_ESCAPE.search(data):  # half of a surrogate pair cannot be encoded in a prompt
                json.dumps(body, ensure_ascii=False).encode()
        except (ValueError, RecursionError) as error:
            raise bad_request(f"the body is not JSON: {error}", "invalid_json") from error
    if not isinstance(body, dict):
        raise bad_request("the body must be a JSON object", "invalid_json")
    return body


async def _receive(request: Request, max_bytes: int) -> bytes:
    data = bytearray()
    async for chunk in request.stream():
        data += chunk
        if len(data) > max_bytes:
            raise _too_large_error(max_bytes)
    return bytes(data)


def _too_large_error(max_bytes: int) -> Rejected:
    return Rejected(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, "body_too_large", f"a body has at most {max_bytes} bytes")


def _refuse_constant(word: str) -> Any:
    raise ValueError(f"{word} is not a JSON number")


def _finite_float(text: str) -> float:
    number = float(text)
    return number if math.isfinite(number) else _refuse_constant(text[:40])


def _list_model(name: str) -> Endpoint:
    async def endpoint(request: Request) -> Response:
        entry = {"id": name, "object": "model", "created": 0, "owned_by": "starpod", "type": "model"}
        return JSONResponse({"object": "list", "data": [entry], "has_more": False})

    return endpoint


async def _health(request: Request) -> Response:
    return JSONResponse({"status": "ok"})


class _EventStream(StreamingResponse):
    """The events of a reply. When they end, or the client disconnects, it leaves the reply."""

    def __init__(self, events: AsyncIterator[bytes], reply: ExitStack) -> None:
        super().__init__(events, media_type="text/event-stream")
        self._reply = reply

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with self._reply:
            await super().__call__(scope, receive, send)


async def _stream(dialect: Dialect, ask: Ask, live: LiveReply) -> AsyncIterator[bytes]:
    """Yield the events of a reply, and comments that keep the connection alive while it waits for one."""
    events, sent = dialect.events(ask, live), 0
    while True:
        waiting = asyncio.ensure_future(anext(events, None))
        try:
            while not (await asyncio.wait((waiting,), timeout=_HEARTBEAT_SECONDS))[0]:
                yield b": sampling\n\n"
            event = waiting.result()
        except (Rejected, OSError) as error:
            yield dialect.failure_event(_rejection(error), sent)
            return
        finally:
            waiting.cancel()
        if event is None:
            return
        sent += event.count(b"\n\n")
        yield event


async def _while_connected(request: Request, call: Coroutine[Any, Any, Result]) -> Result:
    """Return the result of a call. If the client disconnects, cancel the call and raise ClientDisconnect."""
    work, gone = asyncio.ensure_future(call), asyncio.ensure_future(_disconnection(request))
    try:
        await asyncio.wait((work, gone), return_when=asyncio.FIRST_COMPLETED)
        if not work.done():
            raise ClientDisconnect
        return work.result()
    finally:
        work.cancel()
        gone.cancel()


async def _disconnection(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


# --- errors, in the form of the API that was called ------------------------------------------------------------------


def _guarded(endpoint: Endpoint) -> Endpoint:
    """Return the endpoint with answers to its errors."""

    async def call(request: Request) -> Response:
        try:
            return await endpoint(request)
        except (Rejected, OSError) as error:
            return _error_response(request, _rejection(error))
        except ClientDisconnect:
            return Response(status_code=499)  # as other servers log it; no client receives it
        except RecursionError:
            return _error_response(request, bad_request("the request is nested too deeply"))

    return call


def _rejection(error: Rejected | OSError) -> Rejected:
    if isinstance(error, Rejected):
        return error
    cause = f"the session cannot be written ({error.strerror or error}): make room, and send the call again"
    return Rejected(HTTPStatus.INSUFFICIENT_STORAGE, "cannot_write", cause)


async def _not_found(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    message = f"the gateway has no {request.method} {request.url.path[:100]}"
    return _error_response(request, Rejected(HTTPStatus(error.status_code), "not_found", message))


async def _internal_error(request: Request, error: Exception) -> Response:
    message = f"{type(error).__name__}: {error}"
    return _error_response(request, Rejected(HTTPStatus.INTERNAL_SERVER_ERROR, "internal_error", message))


async def _unknown_host(scope: Scope, receive: Receive, send: Send) -> None:
    message = "start the gateway with --allow-host NAME to call it so"
    rejected = Rejected(HTTPStatus.MISDIRECTED_REQUEST, "unknown_host", message)
    await _error_response(Request(scope), rejected)(scope, receive, send)


def _encoded(scope: Scope, problem: str) -> ASGIApp:
    rejected = Rejected(HTTPStatus.UNSUPPORTED_MEDIA_TYPE, "unsupported_encoding", problem)
    return _error_response(Request(scope), rejected)


def _error_response(request: Request, rejected: Rejected) -> Response:
    path = request.url.path
    dialect = next((dialect for dialect in _DIALECTS[::-1] if path.startswith(dialect.path)), _CHAT)
    return JSONResponse(dialect.failure(rejected), rejected.status)
