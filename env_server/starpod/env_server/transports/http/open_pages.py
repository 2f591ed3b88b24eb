"""Requests over HTTP that need no token: health, the description, the page for people, and refusals."""

from __future__ import annotations

import functools
from collections.abc import Awaitable, Callable
from http import HTTPStatus

from starpod.env_server.episodes.errors import CallError, bad_argument
from starpod.env_server.sessions.worker import Worker
from starpod.env_server.transports.admission import OpenAdmission
from starpod.env_server.transports.exchange import Headers, HTTPExchange
from starpod.env_server.transports.http.openapi import openapi
from starpod.env_server.transports.http.page import EnvironmentsPage
from starpod.v1 import environment_pb2 as pb

Answer = Callable[[HTTPExchange], Awaitable[None]]
_SERVICE = pb.DESCRIPTOR.services_by_name["EnvironmentService"].full_name


class OpenPages:
    """Answers to anyone, within the limits on requests without a token."""

    def __init__(self, worker: Worker, admission: OpenAdmission) -> None:
        self._worker = worker
        self._admission = admission

    async def answer(self, answer: Answer, exchange: HTTPExchange) -> None:
        """Answer a request that needs no token, within the limits on such requests."""
        try:
            async with self._admission.take_turn(exchange.peer):
                await answer(exchange)
        except CallError as error:
            await exchange.fail(error)

    def refuse(
        self, exchange: HTTPExchange, error: CallError, status: HTTPStatus | None = None, headers: Headers = ()
    ) -> Awaitable[None]:
        """Refuse a request that needs no token. status: None derives it from the error."""
        return self.answer(lambda exchange: exchange.fail(error, status, headers), exchange)

    async def refuse_host(self, exchange: HTTPExchange) -> None:
        host = exchange.header("host")
        problem = f"{host[:80]!r} is not a name of this server; start it with --http-host NAME, or call its address"
        await self.refuse(exchange, bad_argument("host", problem), HTTPStatus.MISDIRECTED_REQUEST)

    async def refuse_path(self, exchange: HTTPExchange) -> None:
        await self.refuse(exchange, no_such("path", exchange.path), HTTPStatus.NOT_FOUND)

    @functools.cached_property
    def _page(self) -> EnvironmentsPage:
        return EnvironmentsPage(list(self._worker.registry))

    async def show(self, exchange: HTTPExchange) -> None:
        body = self._page.at(f"{exchange.scope['scheme']}://{exchange.header('host')}")
        await exchange.respond(body, content_type="text/html; charset=utf-8")

    async def describe(self, exchange: HTTPExchange) -> None:
        await exchange.respond(openapi())

    async def health(self, exchange: HTTPExchange) -> None:
        """Respond with the health of a service, or of all, like grpc.health.v1."""
        service = exchange.query_params.get("service", "")
        if service not in ("", _SERVICE, *self._worker.registry.ids):
            await exchange.fail(CallError("UNKNOWN_ENVIRONMENT", f"this server has no service {service[:80]!r}"))
            return
        if self._worker.draining:
            await exchange.respond(b'{"status":"NOT_SERVING"}', HTTPStatus.SERVICE_UNAVAILABLE)
        else:
            await exchange.respond(b'{"status":"SERVING"}')


def no_such(what: str, value: str) -> CallError:
    problem = f"there is no {what} {value[:80]!r} here; GET /docs shows what there is, /openapi.json lists it"
    return CallError("BAD_ARGUMENT", problem, violations=[(what, problem)])
