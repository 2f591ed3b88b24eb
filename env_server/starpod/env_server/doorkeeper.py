"""Refuses strangers before their requests are read: a call without a valid token costs the server its headers alone."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any, NoReturn

import grpc
from grpc_status import rpc_status

from starpod.env_server.auth import Authenticator
from starpod.env_server.errors import CallError
from starpod.env_server.metrics import Metrics

if TYPE_CHECKING:
    Handler = grpc.RpcMethodHandler[Any, Any]


class Doorkeeper(grpc.aio.ServerInterceptor):
    """Stands before the calls of one service. Health and reflection are open to all."""

    def __init__(self, service: str, authenticator: Authenticator, metrics: Metrics) -> None:
        self._prefix = f"/{service}/"
        self._authenticator = authenticator
        self._metrics = metrics

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Handler | None]],
        details: grpc.HandlerCallDetails,
    ) -> Handler | None:
        if details.method.startswith(self._prefix):
            try:
                self._authenticator.identify(details.invocation_metadata)
            except CallError as error:
                self._metrics.error(details.method.removeprefix(self._prefix), error.reason)
                return _refusal(error)
        return await continuation(details)


def _refusal(error: CallError) -> Handler:
    status = rpc_status.to_status(error.status())

    async def refuse(requests: Any, context: Any) -> NoReturn:
        await context.abort(status.code, status.details, status.trailing_metadata)
        raise AssertionError("abort raises")

    # As a stream whatever the call is: a stream's handler runs before anything is read.
    return grpc.stream_stream_rpc_method_handler(refuse)
