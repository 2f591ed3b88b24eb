"""The ASGI application of the contract, with the same calls and admission as gRPC, and JSON bodies."""

from __future__ import annotations

import functools
from collections.abc import Awaitable, Callable, Sequence
from http import HTTPStatus
from typing import Any

import grpc
from google.protobuf.message import Message

from starpod.env_server.errors import CallError
from starpod.env_server.limits import Tenant
from starpod.env_server.sessions.responses import too_large
from starpod.env_server.sessions.worker import Worker
from starpod.env_server.timing import begin, clock
from starpod.env_server.transports.admission import CallsInFlight, OpenAdmission, receive_in_time
from starpod.env_server.transports.encoding import max_bytes, read_json, write_json
from starpod.env_server.transports.exchange import (
    Carried,
    Exchange,
    Headers,
    Receive,
    Refused,
    Scope,
    Send,
    write_status,
)
from starpod.env_server.transports.http.openapi import openapi
from starpod.env_server.transports.http.page import Page
from starpod.env_server.transports.http.routes import Route, find
from starpod.env_server.transports.service import Body, EnvironmentService
from starpod.v1 import environment_pb2 as pb

HEALTH, OPENAPI, PAGE = "/v1/health", "/openapi.json", "/docs"
Work = Callable[[Tenant], Awaitable[bytes | None]]
_SERVICE = pb.DESCRIPTOR.services_by_name["EnvironmentService"].full_name


class HTTPService:
    """ASGI application for the contract's methods, health, and the other protocols over HTTP.

    `hosts` are the names that a Host header may have besides addresses.
    """

    def __init__(
        self,
        service: EnvironmentService,
        worker: Worker,
        calls: CallsInFlight,
        strangers: OpenAdmission,
        *,
        hosts: tuple[str, ...],
        endpoints: tuple[str, ...],
        carried: Sequence[Carried] = (),
    ) -> None:
        self._service = service
        self._worker = worker
        self._calls = calls
        self._open = strangers
        self._hosts = frozenset(name.lower() for name in ("localhost", *hosts))
        self._endpoints = endpoints
        self._carried = carried

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._worker.share.accepted()
        exchange = Exchange(scope, receive, send)
        try:
            exchange.check_host(self._hosts)
            if exchange.path in (HEALTH, OPENAPI, PAGE):
                async with self._open.take_turn(exchange.peer):
                    await self._answer_anyone(exchange, scope)
                return
            found = find(exchange.path)
            if found is None:
                protocol = next((each for each in self._carried if each.claims(exchange.path)), None)
                if protocol is None:
                    raise Refused(HTTPStatus.NOT_FOUND, _no_such("path", exchange.path))
                protocol.admit(exchange)
                await self._call(exchange, protocol.name, functools.partial(self._carry, protocol, exchange))
                return
            route, value = found
            if exchange.verb != route.verb:
                error = _no_such("method", exchange.verb)
                raise Refused(HTTPStatus.METHOD_NOT_ALLOWED, error, (("allow", route.verb),))
        except Refused as refused:
            await self._refuse(exchange, refused.error, refused.status, refused.headers)
            return
        except CallError as error:
            await exchange.fail(error)
            return
        work: Work = functools.partial(self._unary, exchange, route, value)
        if route.method.server_streaming:
            work = functools.partial(self._stream, exchange)
        await self._call(exchange, route.name, work)

    async def _answer_anyone(self, exchange: Exchange, scope: Scope) -> None:
        """Answer a request that needs no token."""
        if exchange.path == HEALTH:
            await self._health(exchange, scope["query_string"])
        elif exchange.path == OPENAPI:
            await exchange.respond(openapi())
        else:
            body = self._page.at(f"{scope['scheme']}://{exchange.header('host')}")
            await exchange.respond(body, content_type="text/html; charset=utf-8")

    @functools.cached_property
    def _page(self) -> Page:
        return Page(list(self._worker.registry))

    async def _refuse(
        self, exchange: Exchange, error: CallError, status: HTTPStatus | None = None, headers: Headers = ()
    ) -> None:
        """Refuse a request that needs no token, within the limits on such requests."""
        try:
            async with self._open.take_turn(exchange.peer):
                await exchange.fail(error, status, headers)
        except CallError as beyond:
            await exchange.fail(beyond)

    async def _call(self, exchange: Exchange, name: str, work: Work) -> None:
        """Run a call for its tenant, and respond with its result, if any, or its error."""
        timing = begin(clock())
        status: HTTPStatus | None = None
        with self._service.tracer.span(name, exchange.metadata):
            try:
                with self._calls.hold(exchange.metadata) as tenant:
                    reply = await work(tenant)
                if reply is not None:
                    await exchange.respond(reply, headers=timing.trailer())
                return
            except ConnectionError:
                return
            except Refused as refused:
                failure, status = refused.error, refused.status
                self._worker.metrics.error(name, failure.reason)
            except Exception as error:
                failure = self._service.failure(name, error)
            if exchange.streaming:
                await exchange.send_event(write_status(failure.status()), "error")
                await exchange.end_events()
            elif failure.reason == "UNAUTHENTICATED":  # as an anonymous request
                await self._refuse(exchange, failure, status, timing.trailer())
            else:
                await exchange.fail(failure, status, timing.trailer())

    async def _unary(self, exchange: Exchange, route: Route, value: str, tenant: Tenant) -> bytes:
        body = await self._receive(exchange, route, tenant)

        async def read(tenant: Tenant) -> Message:
            request = read_json(route.request, body.take() or b"{}", self._worker.limits)
            if route.field:
                setattr(request, route.field, value)
            return request

        reply = await self._service.answer(route.name, tenant, body.size, read)
        with tenant.working:
            return self._write(reply)

    async def _stream(self, exchange: Exchange, tenant: Tenant) -> None:
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

    async def _carry(self, protocol: Carried, exchange: Exchange, tenant: Tenant) -> None:
        body = await self._receive(exchange, None, tenant) if protocol.has_body(exchange) else Body(b"")
        await protocol.answer(exchange, body.take(), tenant)

    async def _receive(self, exchange: Exchange, route: Route | None, tenant: Tenant) -> Body:
        if exchange.verb != "POST":
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

    async def _health(self, exchange: Exchange, query: bytes) -> None:
        """Respond with the health of a service, or of all, like grpc.health.v1."""
        service = query.decode("latin-1").partition("service=")[2]
        if service not in ("", _SERVICE, *self._worker.registry.ids):
            await exchange.fail(CallError("UNKNOWN_ENVIRONMENT", f"this server has no service {service[:80]!r}"))
            return
        if self._worker.draining:
            await exchange.respond(b'{"status":"NOT_SERVING"}', HTTPStatus.SERVICE_UNAVAILABLE)
        else:
            await exchange.respond(b'{"status":"SERVING"}')


class _Events:
    """A Stream's connection over HTTP: one message in, server-sent events out."""

    def __init__(self, exchange: Exchange, request: bytes) -> None:
        self._exchange = exchange
        self._request = request

    async def read(self) -> Any:
        data, self._request = self._request, b""
        return data or grpc.aio.EOF

    async def write(self, message: pb.StreamResponse) -> None:
        await self._exchange.start_events()
        await self._exchange.send_event(write_json(message))


def _no_such(what: str, value: str) -> CallError:
    problem = f"there is no {what} {value[:80]!r} here; GET /docs shows what there is, /openapi.json lists it"
    return CallError("BAD_ARGUMENT", problem, violations=[(what, problem)])
