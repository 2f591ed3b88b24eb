"""The ASGI application of the contract, with the same calls and admission as gRPC, and JSON bodies."""

from __future__ import annotations

import functools
from collections.abc import Awaitable, Callable, Iterator, Sequence
from http import HTTPStatus
from typing import Any

import grpc
from google.protobuf.message import Message
from starlette import routing
from starlette.requests import ClientDisconnect
from starlette.types import Receive, Scope, Send

from starpod.env_server.episodes.timing import begin, clock
from starpod.env_server.operation.tenants import Tenant
from starpod.env_server.sessions.responses import too_large
from starpod.env_server.sessions.worker import Worker
from starpod.env_server.transports.admission import CallsInFlight, OpenAdmission, receive_in_time
from starpod.env_server.transports.encoding import max_bytes, read_json, write_json
from starpod.env_server.transports.exchange import HTTPExchange, HTTPProtocol, RequestRefused
from starpod.env_server.transports.http.open_pages import Answer, OpenPages, no_such
from starpod.env_server.transports.http.routes import ROUTES, Route
from starpod.env_server.transports.service import Body, EnvironmentService
from starpod.serving.http import KnownHosts
from starpod.v1 import environment_pb2 as pb

HEALTH, OPENAPI, PAGE = "/v1/health", "/openapi.json", "/docs"
Work = Callable[[HTTPExchange, Tenant], Awaitable[bytes | None]]


class HTTPService:
    """ASGI application for the contract's methods, health, and the other protocols over HTTP.

    `hosts` are the names that a Host header may have besides addresses.
    """

    def __init__(
        self,
        service: EnvironmentService,
        worker: Worker,
        calls: CallsInFlight,
        open_admission: OpenAdmission,
        *,
        hosts: tuple[str, ...],
        endpoints: tuple[str, ...],
        protocols: Sequence[HTTPProtocol] = (),
    ) -> None:
        self._service = service
        self._worker = worker
        self._calls = calls
        self._pages = OpenPages(worker, open_admission)
        self._endpoints = endpoints
        default_protocol = next((protocol for protocol in protocols if not protocol.paths), None)
        default = (
            _Endpoint(self._call_protocol, default_protocol) if default_protocol else _Endpoint(self._pages.refuse_path)
        )
        # Not a whole Starlette application: its handling of exceptions would cost several percent of a step.
        router = routing.Router(list(self._routes(protocols)), redirect_slashes=False, default=default)
        self._app = KnownHosts(router, hosts, _Endpoint(self._pages.refuse_host))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._worker.share.note_accepted_call()
        await self._app(scope, receive, send)

    def _routes(self, protocols: Sequence[HTTPProtocol]) -> Iterator[routing.BaseRoute]:
        """Yield the routes in the order in which they are tried. Session routes come first: most calls are steps."""
        for route in sorted(ROUTES, key=lambda route: route.field != "session_id"):
            call = self._stream if route.method.server_streaming else functools.partial(self._unary, route)
            # An empty id matches too: the call is refused for its token before its session is looked up.
            path = route.path.replace("{session_id}", "{session_id:path}")
            yield self._route(path, route.verb, functools.partial(self._call, route.name, call))
        pages = self._pages
        for path, answer in ((HEALTH, pages.health), (OPENAPI, pages.describe), (PAGE, pages.show)):
            yield self._route(path, "GET", functools.partial(pages.answer, answer))
        for protocol in protocols:
            for path in protocol.paths:
                yield self._route(path, "POST", functools.partial(self._call_protocol, protocol))

    def _route(self, path: str, verb: str, answer: Answer) -> routing.Route:
        return routing.Route(path, _Endpoint(self._expect, verb, answer))

    async def _expect(self, verb: str, answer: Answer, exchange: HTTPExchange) -> None:
        """Answer a request with this HTTP method, and refuse others."""
        if exchange.method == verb:
            await answer(exchange)
        else:
            error = no_such("method", exchange.method)
            await self._pages.refuse(exchange, error, HTTPStatus.METHOD_NOT_ALLOWED, (("allow", verb),))

    async def _call(self, name: str, work: Work, exchange: HTTPExchange) -> None:
        """Run a call for its tenant, and respond with its result, if any, or its error."""
        timing = begin(clock())
        status: HTTPStatus | None = None
        with self._service.tracer.span(name, exchange.metadata):
            try:
                with self._calls.hold(exchange.metadata) as tenant:
                    reply = await work(exchange, tenant)
                if reply is not None:
                    await exchange.respond(reply, headers=timing.trailer())
                return
            except ClientDisconnect:
                return
            except RequestRefused as refusal:
                failure, status = refusal.error, refusal.status
                self._worker.metrics.error(name, failure.reason)
            except Exception as error:
                failure = self._service.failure(name, error)
            if exchange.streaming:
                await exchange.send_event(write_json(failure.status()), "error")
                await exchange.end_events()
            elif failure.reason == "UNAUTHENTICATED":  # as an anonymous request
                await self._pages.refuse(exchange, failure, status, timing.trailer())
            else:
                await exchange.fail(failure, status, timing.trailer())

    async def _unary(self, route: Route, exchange: HTTPExchange, tenant: Tenant) -> bytes:
        body = await self._receive(exchange, route, tenant)

        async def read(tenant: Tenant) -> Message:
            request = read_json(route.request, body.take() or b"{}", self._worker.limits)
            if route.field:
                setattr(request, route.field, exchange.path_params[route.field])
            return request

        reply = await self._service.answer(route.name, tenant, body.size, read)
        with tenant.working:
            return self._write(reply)

    async def _stream(self, exchange: HTTPExchange, tenant: Tenant) -> None:
        """Serve a Stream of one message, and send its replies as events when they finish."""
        body = await self._receive(exchange, None, tenant)
        await self._worker.share.wait(tenant)
        with tenant.working:
            request = read_json(pb.StreamRequest, body.take(), self._worker.limits)
            events = _Events(exchange, request.SerializeToString())
        del request
        await self._service.stream(events, exchange.metadata, exchange.peer)
        await exchange.start_events()
        await exchange.end_events()

    async def _call_protocol(self, protocol: HTTPProtocol, exchange: HTTPExchange) -> None:
        protocol.admit(exchange)
        await self._call(protocol.name, functools.partial(self._serve_protocol, protocol), exchange)

    async def _serve_protocol(self, protocol: HTTPProtocol, exchange: HTTPExchange, tenant: Tenant) -> None:
        body = await self._receive(exchange, None, tenant) if protocol.has_body(exchange) else Body(b"")
        await protocol.answer(exchange, body.take(), tenant)

    async def _receive(self, exchange: HTTPExchange, route: Route | None, tenant: Tenant) -> Body:
        if exchange.method != "POST":
            return Body(b"")
        exchange.check_body(max_bytes(route.request if route else pb.StreamRequest, self._worker.limits))
        if self._calls.in_turn(tenant):
            return Body(await self._calls.read(tenant, exchange.body))
        return Body(await receive_in_time(exchange.body))

    def _write(self, reply: Message) -> bytes:
        if isinstance(reply, pb.DescribeResponse):
            # Correct what differs over HTTP.
            reply.capabilities.stream = False
            reply.endpoints[:] = self._endpoints
        size, limit = reply.ByteSize(), self._worker.limits.max_message_bytes
        if limit and size > limit:
            raise too_large(size, limit)
        return write_json(reply)


class _Events:
    """A Stream's connection over HTTP: one message in, server-sent events out."""

    def __init__(self, exchange: HTTPExchange, request: bytes) -> None:
        self._exchange = exchange
        self._request = request

    async def read(self) -> Any:
        data, self._request = self._request, b""
        return data or grpc.aio.EOF

    async def write(self, message: pb.StreamResponse) -> None:
        await self._exchange.start_events()
        await self._exchange.send_event(write_json(message))


class _Endpoint:
    """ASGI application that calls `function` with fixed arguments, followed by the exchange."""

    def __init__(self, function: Callable[..., Awaitable[None]], *arguments: Any) -> None:
        self._answer = functools.partial(function, *arguments)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._answer(HTTPExchange(scope, receive, send))
