"""Admission of calls by their headers: tokens, limits on open calls, and separate limits for health and reflection.

gRPC asks a generic handler for the method before it reads the request. A refused call therefore costs the server only
its headers, and its caller gets the reason. gRPC's own limit on calls would refuse all tenants alike, without details.
"""

from __future__ import annotations

import asyncio
import functools
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import TYPE_CHECKING, Any, TypeVar
from weakref import WeakValueDictionary

import grpc
from google.protobuf import message_factory
from google.protobuf.descriptor import MethodDescriptor
from google.protobuf.message import Message

from starpod.env_server.episodes.errors import CallError, bad_argument, overloaded
from starpod.env_server.operation.metrics import Metrics
from starpod.env_server.operation.tenants import LoopShare, Tenant
from starpod.env_server.sessions.requests import parse
from starpod.env_server.transports.auth import Authenticator
from starpod.env_server.transports.connections import address_of
from starpod.env_server.transports.service import abort

if TYPE_CHECKING:
    Handler = grpc.RpcMethodHandler[Any, Any]
    TurnDetails = grpc.HandlerCallDetails
    Context = grpc.aio.ServicerContext[Any, Any]

R = TypeVar("R")

_PER_CONNECTION = 16
_ADDRESS_SHARE = 4
"""Calls without a token have a limit. One address may use at most that limit divided by this number."""
_REQUEST_SECONDS = 5.0
"""Timeout for receiving the request of a call that needs no token."""
_REQUEST_BYTES = 4_096
_READ_AHEAD = 32
"""If several tenants have tokens, a tenant's requests are read one by one once it has more than this many open calls.
Otherwise requests are read as they arrive."""
_BODY_SECONDS = 60.0
"""Timeout for receiving a request for which other requests wait."""
_READ_AT_ONCE = 4
_RETRY_SECONDS = 1.0


class CallsInFlight:
    """Counter of open contract calls over all transports, with a limit. Only calls with a valid token are admitted.

    A call is open once its headers have arrived, even if its request never does. At most `limit` calls are open; if
    several tenants have tokens, each may have half of them.
    """

    def __init__(self, authenticator: Authenticator, share: LoopShare, limit: int) -> None:
        self._authenticator = authenticator
        self._share = share
        self._limit = limit
        self._open: Counter[str] = Counter()
        self._all = 0

    def begin(self, metadata: Iterable[tuple[str, Any]] | None) -> Tenant:
        """Admit a call until `end` is called, and return its tenant. Raises UNAUTHENTICATED or OVERLOADED."""
        tenant = self._authenticator.identify(metadata).tenant
        limit = self._limit if self._alone else self._limit // 2
        if self._all >= self._limit or self._open[tenant.id] >= limit:
            raise overloaded("max_calls_in_flight", f"{limit} calls are open; try again later", _RETRY_SECONDS)
        self._count(tenant.id, 1)
        return tenant

    def end(self, tenant: Tenant) -> None:
        self._count(tenant.id, -1)

    @contextmanager
    def hold(self, metadata: Iterable[tuple[str, Any]] | None) -> Iterator[Tenant]:
        """Admit a call while the context lasts. Raises UNAUTHENTICATED or OVERLOADED."""
        tenant = self.begin(metadata)
        try:
            yield tenant
        finally:
            self.end(tenant)

    def in_turn(self, tenant: Tenant) -> bool:
        """Return whether the tenant's requests are read one by one: it has many open calls, and other tenants exist."""
        return not self._alone and self._open[tenant.id] > _READ_AHEAD

    async def read(self, tenant: Tenant, receive: Callable[[], Awaitable[R]]) -> R:
        """Receive a request after the tenant's earlier ones, when it is the tenant's turn. Raises DEADLINE.

        Receiving many large requests takes the event loop's time, too.
        """
        async with tenant.reading:
            if self._share.exceeded(tenant):
                await self._share.wait(tenant)
            return await receive_in_time(receive)

    @property
    def _alone(self) -> bool:
        return len(self._authenticator.tenants) == 1

    def _count(self, tenant: str, change: int) -> None:
        self._all += change
        self._open[tenant] += change
        if not self._open[tenant]:
            del self._open[tenant]


async def receive_in_time(receive: Callable[[], Awaitable[R]]) -> R:
    """Return the result of `receive`. Raises DEADLINE after 60 seconds."""
    try:
        async with asyncio.timeout(_BODY_SECONDS):
            return await receive()
    except TimeoutError:
        raise CallError("DEADLINE", f"no request came within {_BODY_SECONDS:g} s") from None


class ContractAdmission(grpc.GenericRpcHandler):
    """Handler that admits gRPC calls of the contract according to CallsInFlight."""

    def __init__(
        self, contract: grpc.GenericRpcHandler, calls: CallsInFlight, metrics: Metrics, share: LoopShare
    ) -> None:
        self._contract = contract
        self._calls = calls
        self._metrics = metrics
        self._share = share

    def service(self, handler_call_details: TurnDetails) -> Handler | None:
        self._share.note_accepted_call()  # counts calls of any service, because gRPC asks this handler first
        handler = self._contract.service(handler_call_details)
        if handler is None:
            return None
        try:
            tenant = self._calls.begin(handler_call_details.invocation_metadata)
        except CallError as error:
            self._metrics.error(handler_call_details.method.rpartition("/")[2], error.reason)
            return _refusal(error)
        task = asyncio.current_task()
        assert task is not None, "gRPC looks for handlers in the task of the call"
        task.add_done_callback(functools.partial(self._end, tenant))
        behaviour: Any = handler.unary_unary
        if behaviour is None or not self._calls.in_turn(tenant):
            return handler
        return self._read_in_turn(behaviour, handler.response_serializer, tenant)

    def _end(self, tenant: Tenant, call: asyncio.Task[Any]) -> None:
        self._calls.end(tenant)
        if call.cancelled():  # gRPC cancels it if the caller is gone or its deadline has passed
            self._metrics.hang_ups["grpc"] += 1

    def _read_in_turn(self, behaviour: Any, write: Any, tenant: Tenant) -> Handler:
        """Return a handler that runs the same call, but reads its request when it is the tenant's turn."""

        async def serve(_: object, context: Context) -> None:
            try:
                holder = [await self._calls.read(tenant, context.read)]
            except CallError as error:
                await abort(context, error)
            if holder[0] is not grpc.aio.EOF:
                # Keep no name for the request: the frames of an aborted call are held for a while.
                await context.write(await behaviour(holder.pop(), context))

        return grpc.stream_stream_rpc_method_handler(serve, None, write)


class OpenAdmission(grpc.GenericRpcHandler):
    """Limits on calls that need no token: health, reflection, and pages and refusals over HTTP.

    At most `limit` calls that wait (Watch, reflection) and `limit` calls that return at once (Check) may be open.
    One address may have a quarter of them and one connection 16, so that a single caller cannot lock out the others.
    """

    def __init__(self, limit: int) -> None:
        self._waiting = _Bound(limit)
        self._passing = _Bound(limit)
        self._turn = asyncio.Lock()
        self._reading: WeakValueDictionary[str, asyncio.Semaphore] = WeakValueDictionary()
        self._handlers: dict[str, Handler] = {}

    def add(self, file: Any, servicer: Any) -> None:
        """Serve the services of a proto file, given its descriptor."""
        for service in file.services_by_name.values():
            for method in service.methods:
                self._handlers[f"/{service.full_name}/{method.name}"] = self._handler(method, servicer)

    def service(self, handler_call_details: TurnDetails) -> Handler | None:
        return self._handlers.get(handler_call_details.method)

    @asynccontextmanager
    async def take_turn(self, peer: str) -> AsyncIterator[None]:
        """Count an anonymous HTTP request while it is answered. Raises OVERLOADED.

        One answer, including refusals, begins per round of the event loop. Otherwise a caller with a thousand
        connections that repeats each request at once would take all of the loop.
        """
        async with self._turn:
            await asyncio.sleep(0)
        with self._passing.hold(peer):
            yield

    def _handler(self, method: MethodDescriptor, servicer: Any) -> Handler:
        call_limit = self._waiting if method.server_streaming else self._passing
        behaviour = getattr(servicer, method.name)

        async def serve(_: object, context: Context) -> None:
            peer = context.peer()
            requests = _Requests(request_class, context, self._slot(peer))
            try:
                with call_limit.hold(peer):
                    if method.client_streaming:
                        async for response in behaviour(requests, context):
                            await context.write(response)
                    elif (request := await requests.read()) is grpc.aio.EOF:
                        return
                    elif method.server_streaming:
                        await behaviour(request, context)
                    else:
                        await context.write(await behaviour(request, context))
            except CallError as error:
                await abort(context, error)

        # Register every call as a stream, because a stream's handler runs before anything is read.
        request_class = message_factory.GetMessageClass(method.input_type)
        serialize = message_factory.GetMessageClass(method.output_type).SerializeToString
        return grpc.stream_stream_rpc_method_handler(serve, None, serialize)

    def _slot(self, peer: str) -> asyncio.Semaphore:
        """Return the semaphore that bounds how many requests of this address are read at once."""
        address = address_of(peer)[0]
        slot = self._reading.get(address)
        if slot is None:
            slot = self._reading[address] = asyncio.Semaphore(_READ_AT_ONCE)
        return slot


class _Requests:
    """The requests of one call. Only a few per address are read at a time, because gRPC does not limit their size."""

    def __init__(self, kind: type[Message], context: Context, slot: asyncio.Semaphore) -> None:
        self._kind = kind
        self.context = context
        self._slot = slot

    async def read(self) -> Any:
        """Return the next request, or EOF. Raises DEADLINE, or BAD_ARGUMENT above 4,096 bytes."""
        try:
            async with asyncio.timeout(_REQUEST_SECONDS), self._slot:
                data = await self.context.read()
        except TimeoutError:
            raise CallError("DEADLINE", f"no request came within {_REQUEST_SECONDS:g} s") from None
        if data is grpc.aio.EOF:
            return data
        if len(data) > _REQUEST_BYTES:
            raise bad_argument("request", f"has {len(data)} bytes; at most {_REQUEST_BYTES} are read")
        return parse(self._kind, data)

    async def __aiter__(self) -> AsyncIterator[Any]:
        while (request := await self.read()) is not grpc.aio.EOF:
            yield request


class _Bound:
    """Maximum number of open calls: in total, per address and per connection."""

    def __init__(self, limit: int) -> None:
        self._limits = (limit, max(_PER_CONNECTION, limit // _ADDRESS_SHARE), _PER_CONNECTION)
        self._held: Counter[str] = Counter()

    @contextmanager
    def hold(self, peer: str) -> Iterator[None]:
        """Count a call while the context lasts. `peer` is gRPC's peer name. Raises OVERLOADED."""
        keys = ("all", address_of(peer)[0], peer)
        for key, limit, callers in zip(
            keys, self._limits, ("all callers", "your address", "your connection"), strict=True
        ):
            if self._held[key] >= limit:
                problem = f"{limit} calls of {callers} that need no token are open; end some, or try again later"
                raise overloaded("max_health_calls", problem, _RETRY_SECONDS)
        self._held.update(keys)
        try:
            yield
        finally:
            self._held.subtract(keys)
            for key in keys:
                if not self._held[key]:
                    del self._held[key]


def _refusal(error: CallError) -> Handler:
    async def refuse(requests: Any, context: Context) -> None:
        await abort(context, error)

    return grpc.stream_stream_rpc_method_handler(refuse)
