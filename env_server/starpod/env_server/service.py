"""The gRPC face of the calls: unary methods and the stream, with who calls, deadlines and errors."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar, cast

import grpc
from grpc_status import rpc_status

from starpod.env_server import convert
from starpod.env_server.auth import Authenticator
from starpod.env_server.calls import Calls
from starpod.env_server.eager import run_eagerly
from starpod.env_server.errors import CallError, overloaded
from starpod.env_server.limits import Tenant
from starpod.env_server.reading import Malformed
from starpod.env_server.session import SessionTable
from starpod.env_server.stream import StreamServer
from starpod.env_server.timing import begin, clock
from starpod.env_server.tracing import Tracer
from starpod.v1 import environment_pb2 as pb
from starpod.v1 import environment_pb2_grpc as rpc

PROTOCOL_VERSION = "1.0"
R = TypeVar("R")

if TYPE_CHECKING:
    Context = grpc.aio.ServicerContext[Any, Any]


class EnvironmentService(rpc.EnvironmentServiceServicer):
    """Serves the contract. Each tenant sees its own sessions alone."""

    def __init__(
        self, calls: Calls, authenticator: Authenticator, tracer: Tracer, endpoints: tuple[str, ...] = ()
    ) -> None:
        self._calls = calls
        self._authenticator = authenticator
        self._tracer = tracer
        self._endpoints = endpoints
        self.tables: dict[str, SessionTable] = {}
        self.stream_peers: Counter[str] = Counter()
        """gRPC's names of the connections with a Stream."""

    async def Describe(self, request: pb.DescribeRequest, context: Context) -> pb.DescribeResponse:
        with self._tracer.span("Describe", context):
            try:
                self._authenticator.identify(context.invocation_metadata()).tenant.take_calls()
                registry = self._calls.registry
                hosted = registry.versions(request.environment_id) if request.environment_id else registry
                specs = [convert.spec_to(environment) for environment in hosted]
            except Exception as error:
                await self._fail(context, "Describe", error)
            limits = self._calls.limits
            return pb.DescribeResponse(
                protocol_version=PROTOCOL_VERSION,
                server_name="starpod",
                server_version=server_version(),
                instance_id=self._calls.instance_id,
                capabilities=pb.ServerCapabilities(stream=True, step_columns=True),
                limits=pb.ServerLimits(
                    max_sessions=limits.max_sessions,
                    max_message_bytes=limits.max_message_bytes,
                    max_calls_in_flight=limits.max_calls_in_flight,
                    max_snapshot_bytes=limits.max_snapshot_bytes,
                    max_group=limits.max_group,
                    max_step_actions=limits.max_step_actions,
                    default_lease_seconds=limits.default_lease_seconds,
                    max_lease_seconds=limits.max_lease_seconds,
                ),
                endpoints=self._endpoints,
                environments=specs,
                live_sessions=self._calls.live_sessions,
                draining=self._calls.draining,
            )

    async def Open(self, request: pb.OpenRequest, context: Context) -> pb.OpenResponse:
        return await self._unary("Open", context, lambda table: self._calls.open(table, request))

    async def Reset(self, request: pb.ResetRequest, context: Context) -> pb.ResetResponse:
        return await self._unary("Reset", context, lambda table: self._calls.reset(table, request))

    async def Step(self, request: pb.StepRequest, context: Context) -> pb.StepResponse:
        return await self._unary("Step", context, lambda table: self._calls.step(table, request))

    async def Render(self, request: pb.RenderRequest, context: Context) -> pb.RenderResponse:
        return await self._unary("Render", context, lambda table: self._calls.render(table, request))

    async def Fork(self, request: pb.ForkRequest, context: Context) -> pb.ForkResponse:
        return await self._unary("Fork", context, lambda table: self._calls.fork(table, request))

    async def Snapshot(self, request: pb.SnapshotRequest, context: Context) -> pb.SnapshotResponse:
        return await self._unary("Snapshot", context, lambda table: self._calls.snapshot(table, request))

    async def Restore(self, request: pb.RestoreRequest, context: Context) -> pb.RestoreResponse:
        return await self._unary("Restore", context, lambda table: self._calls.restore(table, request))

    async def Renew(self, request: pb.RenewRequest, context: Context) -> pb.RenewResponse:
        return await self._unary("Renew", context, lambda table: self._calls.renew(table, request))

    async def Close(self, request: pb.CloseRequest, context: Context) -> pb.CloseResponse:
        return await self._unary("Close", context, lambda table: self._calls.close(table, request))

    async def Stream(self, _: Any, context: Context) -> None:  # type: ignore[override]
        with self._tracer.span("Stream", context):
            try:
                grant = self._authenticator.identify(context.invocation_metadata())
                if self._calls.metrics.streams >= (limit := self._calls.limits.max_streams):
                    raise overloaded("max_streams", f"{limit} streams are connected; try again later", 1.0)
                with grant.tenant.stream(), self._noted(context.peer()):
                    await StreamServer(self._calls, self._table(grant.tenant), context, grant).run()
            except grpc.aio.BaseError:
                raise  # the connection's own, such as a caller who is gone
            except Exception as error:
                await self._fail(context, "Stream", error)

    @contextmanager
    def _noted(self, peer: str) -> Iterator[None]:
        self.stream_peers[peer] += 1
        try:
            yield
        finally:
            self.stream_peers[peer] -= 1
            if not self.stream_peers[peer]:
                del self.stream_peers[peer]

    async def _unary(self, method: str, context: Context, start: Callable[[SessionTable], Coroutine[Any, Any, R]]) -> R:
        calls = self._calls
        timing = begin(clock())
        with self._tracer.span(method, context):
            try:
                tenant = self._authenticator.identify(context.invocation_metadata()).tenant
                tenant.take_calls()
                calls.check_in_flight()
                reply, task = run_eagerly(start(self._table(tenant)))
                if task is None:
                    context.set_trailing_metadata(timing.trailer())
                    return cast(R, reply)
                # A caller who gives up cancels his wait, not the work: it is finished and cached.
                calls.keep(task)
                reply = await asyncio.shield(task)
                context.set_trailing_metadata(timing.trailer())
                return reply
            except Exception as error:
                await self._fail(context, method, error, timing.trailer())

    async def refuse(self, context: Context, method: str, request: Malformed) -> NoReturn:
        """Answers a request that cannot be read; a stranger learns no more than that he is one."""
        error = request.error()
        try:
            self._authenticator.identify(context.invocation_metadata())
        except CallError as stranger:
            error = stranger
        await self._fail(context, method, error)

    def _table(self, tenant: Tenant) -> SessionTable:
        table = self.tables.get(tenant.id)
        if table is None:
            table = self.tables[tenant.id] = SessionTable(tenant)
        return table

    async def _fail(
        self, context: Context, method: str, error: Exception, trailer: tuple[tuple[str, str], ...] = ()
    ) -> NoReturn:
        failure = self._calls.as_call_error(error)
        self._calls.metrics.error(method, failure.reason)
        status = rpc_status.to_status(failure.status())
        await context.abort(status.code, status.details, (*status.trailing_metadata, *trailer))
        raise AssertionError("abort raises")


def server_version() -> str:
    try:
        return version("starpod")
    except PackageNotFoundError:
        return "unknown"
