"""The contract's unary methods and Stream, with authentication, deadlines and errors; and their gRPC handlers."""

from __future__ import annotations

import asyncio
import functools
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Iterator
from contextlib import contextmanager
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Any, NoReturn

import grpc
from google.protobuf import message_factory
from google.protobuf.message import Message
from grpc_status import rpc_status

from starpod.env_server.authoring.environment import Concurrency, Environment
from starpod.env_server.episodes import convert
from starpod.env_server.episodes.errors import CallError, overloaded, release
from starpod.env_server.episodes.timing import begin, clock
from starpod.env_server.operation.tenants import Tenant
from starpod.env_server.operation.tracing import Tracer
from starpod.env_server.processes.child_process import ChildProcess
from starpod.env_server.sessions.calls import Calls
from starpod.env_server.sessions.requests import check_size, extra_members, is_large, measure, parse
from starpod.env_server.sessions.table import SessionTable
from starpod.env_server.transports.auth import Authenticator
from starpod.env_server.transports.eager import run_eagerly
from starpod.env_server.transports.outbox import ClientStream
from starpod.env_server.transports.stream import StreamServer
from starpod.v1 import environment_pb2 as pb

PROTOCOL_VERSION = "1.0"
_LIMITS = pb.ServerLimits.DESCRIPTOR.fields
"""The limits that Describe tells. They have the names of their settings."""
Verb = Callable[[SessionTable, Any], Coroutine[Any, Any, Message]]
Metadata = Iterable[tuple[str, Any]]
Read = Callable[[Tenant], Awaitable[Message]]

if TYPE_CHECKING:
    Context = grpc.aio.ServicerContext[Any, Any]


class Body:
    """The bytes of a request, held until `take` is called. `size` is the number of bytes."""

    __slots__ = ("_data", "size")

    def __init__(self, data: bytes) -> None:
        self._data = data
        self.size = len(data)

    def take(self) -> bytes:
        data, self._data = self._data, b""
        return data


class EnvironmentService:
    """The contract as a service. Each tenant sees only its own sessions."""

    def __init__(
        self, calls: Calls, authenticator: Authenticator, tracer: Tracer, endpoints: tuple[str, ...] = ()
    ) -> None:
        self._calls = calls
        self._worker = calls.worker
        self._authenticator = authenticator
        self.tracer = tracer
        self._endpoints = endpoints
        self.tables: dict[str, SessionTable] = {}
        self.stream_peers: Counter[str] = Counter()
        """Number of open Streams per connection, keyed by gRPC's peer name."""

    def handlers(self) -> grpc.GenericRpcHandler:
        """Return the gRPC handlers. They receive bytes, because requests are parsed when it is the caller's turn."""
        contract = pb.DESCRIPTOR.services_by_name["EnvironmentService"]
        by_name: dict[str, grpc.RpcMethodHandler[Any, Any]] = {}
        for method in contract.methods:
            serialize = message_factory.GetMessageClass(method.output_type).SerializeToString
            if method.client_streaming:
                by_name[method.name] = grpc.stream_stream_rpc_method_handler(self._stream, None, serialize)
            else:
                request_class = message_factory.GetMessageClass(method.input_type)
                behaviour = functools.partial(self._unary, method.name, request_class)
                by_name[method.name] = grpc.unary_unary_rpc_method_handler(behaviour, None, serialize)
        return grpc.method_handlers_generic_handler(contract.full_name, by_name)

    async def describe(self, _: SessionTable, request: pb.DescribeRequest) -> pb.DescribeResponse:
        registry = self._worker.registry
        environments = registry.versions(request.environment_id) if request.environment_id else registry
        specs = [convert.spec_to(environment) for environment in environments]
        limits = self._worker.limits
        response = pb.DescribeResponse(
            protocol_version=PROTOCOL_VERSION,
            server_name="starpod",
            server_version=server_version(),
            instance_id=self._worker.instance_id,
            capabilities=pb.ServerCapabilities(
                stream=True, step_columns=True, reset_columns=True, acknowledgements=True
            ),
            limits=pb.ServerLimits(**{field.name: getattr(limits, field.name) for field in _LIMITS}),
            endpoints=self._endpoints,
            environments=specs,
            live_sessions=self._worker.live_sessions,
            draining=self._worker.draining,
        )
        for environment, spec in zip(environments, response.environments, strict=True):
            self._describe_confinement(environment, spec)
            if environment.spec.effects and not self._worker.hosts.journal.durable:
                spec.capabilities.deterministic = False  # recorded replies are lost with this process
        return response

    def _describe_confinement(self, environment: type[Environment], spec: pb.EnvironmentSpec) -> None:
        """Describe the sandbox of an environment of class `process`. Other classes have none."""
        if environment.spec.concurrency is Concurrency.PROCESS:
            spec.confinement.mode = self._worker.hosts.sandbox.mode
            if report := ChildProcess.confinements.get(environment):
                spec.confinement.applied.extend(report.applied)
                spec.confinement.missing.extend(report.reasons)

    async def _stream(self, _: Any, context: Context) -> None:
        metadata = context.invocation_metadata() or ()
        with self.tracer.span("Stream", metadata):
            try:
                await self.stream(context, metadata, context.peer())
                return
            except grpc.aio.BaseError:
                raise  # an error of the connection, such as a caller that is gone
            except Exception as error:
                failure = self.failure("Stream", error)
            await abort(context, failure)

    async def stream(self, connection: ClientStream, metadata: Metadata, peer: str) -> None:
        """Serve a Stream until it ends. Raises as StreamServer.run does. peer: the address as gRPC spells it."""
        grant = self._authenticator.identify(metadata)
        if self._worker.metrics.streams >= (limit := self._worker.limits.max_streams):
            raise overloaded("max_streams", f"{limit} streams are connected; try again later", 1.0)
        with grant.tenant.stream(), self._noted(peer):
            await StreamServer(self._calls, self._table(grant.tenant), connection, grant).run()

    @contextmanager
    def _noted(self, peer: str) -> Iterator[None]:
        self.stream_peers[peer] += 1
        try:
            yield
        finally:
            self.stream_peers[peer] -= 1
            if not self.stream_peers[peer]:
                del self.stream_peers[peer]

    async def _unary(self, method: str, kind: type[Message], data: bytes, context: Context) -> Any:
        timing = begin(clock())
        body = Body(data)
        del data
        metadata = context.invocation_metadata() or ()
        with self.tracer.span(method, metadata):
            try:
                tenant = self._authenticator.identify(metadata).tenant
                reply = await self.answer(method, tenant, body.size, functools.partial(self._read, kind, body))
                context.set_trailing_metadata(timing.trailer())
                return reply
            except Exception as error:
                failure = self.failure(method, error)
            body.take()  # the frames of an aborted call are held for a while
            return await abort(context, failure, timing.trailer())

    async def _read(self, kind: type[Message], body: Body, tenant: Tenant) -> Message:
        data = body.take()
        check_size(kind, len(data), self._worker.limits)
        if is_large(data):
            for _ in measure(kind, data):
                await self._worker.share.pause(tenant)
        return parse(kind, data)

    async def answer(self, method: str, tenant: Tenant, size: int, read: Read) -> Message:
        """Return the reply to a unary call.

        Args:
            size: bytes of the request.
            read: returns the request, and is called when it is the tenant's turn.

        Raises:
            CallError: the call failed. Other exceptions are converted by `failure`.
        """
        if method != "Describe":
            self._worker.check_in_flight()
        self._worker.count_received(tenant, size)
        tenant.take_calls(1, size)
        with tenant.working:
            reply, task = run_eagerly(self._serve(tenant, method, read), tenant)
        if task is None:
            assert reply is not None
            return reply
        # A caller that gives up cancels its wait, not the work, which finishes and is cached.
        self._worker.keep(task)
        return await asyncio.shield(task)

    async def ask(self, tenant: Tenant, request: Message) -> Any:
        """Return the reply to a request that was made from another protocol's call. Raises as `answer` does."""

        async def read(_: Tenant) -> Message:
            return request

        return await self.answer(type(request).__name__.removesuffix("Request"), tenant, request.ByteSize(), read)

    async def _serve(self, tenant: Tenant, method: str, read: Read) -> Message:
        """Read the request and execute it when it is the tenant's turn."""
        await self._worker.share.wait(tenant)
        request = await read(tenant)
        tenant.charge(extra_members(request))
        verb: Verb = getattr(self if method == "Describe" else self._calls, method.lower())
        return await verb(self._table(tenant), request)

    def _table(self, tenant: Tenant) -> SessionTable:
        table = self.tables.get(tenant.id)
        if table is None:
            table = self.tables[tenant.id] = SessionTable(tenant)
        return table

    def failure(self, method: str, error: Exception) -> CallError:
        """Return the error to send for an exception, and free what the exception refers to, such as the request."""
        failure = self._worker.failures.as_call_error(error)
        self._worker.metrics.error(method, failure.reason)
        release(error)
        return failure


async def abort(context: Context, failure: CallError, trailer: tuple[tuple[str, str], ...] = ()) -> NoReturn:
    """End a gRPC call with an error. trailer: trailing metadata besides the error's details."""
    status = rpc_status.to_status(failure.status())
    await context.abort(status.code, status.details, (*status.trailing_metadata, *trailer))
    raise AssertionError("abort raises")


def server_version() -> str:
    try:
        return version("starpod")
    except PackageNotFoundError:
        return "unknown"
