"""A server of troublesome environments in the test's own event loop, reached over a real socket."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import Any

import grpc
import pytest
from google.rpc import error_details_pb2
from grpc_status import rpc_status

from starpod.env_server.config import ServerConfig, ServerLimits
from starpod.env_server.registry import Registry
from starpod.env_server.server import EnvironmentServer
from starpod.env_server.session import SessionTable
from starpod.v1 import environment_pb2 as pb
from starpod.v1.environment_pb2_grpc import EnvironmentServiceStub
from tests.env_server import troublesome
from tests.env_server.troublesome import Waiting
from tests.waiting import eventually


@dataclass
class Failure:
    """A failed call: code name, reason, metadata, violated fields and the seconds to wait."""

    code: str
    reason: str
    message: str
    metadata: dict[str, str]
    fields: list[str]
    retry_after: float | None


def failure_of(error: grpc.aio.AioRpcError) -> Failure:
    status = rpc_status.from_call(error)  # type: ignore[arg-type]
    assert status is not None, error
    return read_status(status)


def read_status(status: Any) -> Failure:
    info, bad, retry = error_details_pb2.ErrorInfo(), error_details_pb2.BadRequest(), error_details_pb2.RetryInfo()
    found: dict[str, bool] = {}
    for detail in status.details:
        for name, message in (("info", info), ("bad", bad), ("retry", retry)):
            found[name] = found.get(name, False) or detail.Unpack(message)
    assert found["info"] and info.domain == "starpod.v1"
    delay = retry.retry_delay.ToMilliseconds() / 1000 if found["retry"] else None
    code = grpc.StatusCode[next(c.name for c in grpc.StatusCode if c.value[0] == status.code)].name
    fields = [violation.field for violation in bad.field_violations]
    return Failure(code, info.reason, status.message, dict(info.metadata), fields, delay)


class Client:
    """The generated stub, with what tests do over and over."""

    def __init__(self, server: EnvironmentServer, channel: grpc.aio.Channel) -> None:
        self.server = server
        self.channel = channel
        self.stub = EnvironmentServiceStub(channel)

    async def open(self, environment: str, **fields: Any) -> pb.Session:
        response = await self.stub.Open(pb.OpenRequest(environment_id=environment, **{"seed": 1, **fields}))
        return response.sessions[0]

    async def step(self, session: pb.Session, index: int, *actions: str, epoch: int = 1, **call: Any) -> pb.Transition:
        request = step_request(session, index, *actions, epoch=epoch)
        return (await self.stub.Step(request, **call)).transition

    @property
    def table(self) -> SessionTable:
        """The sessions in the server."""
        (table,) = self.server._service.tables.values()
        return table

    async def pending(self, session: pb.Session, count: int) -> None:
        """Until so many calls wait for or work on a session."""
        await eventually(lambda: self.table[session.session_id].pending == count)

    async def fails(self, call: Awaitable[Any]) -> Failure:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call
        return failure_of(caught.value)


def step_request(session: pb.Session, index: int, *actions: str, epoch: int = 1) -> pb.StepRequest:
    return pb.StepRequest(
        session_id=session.session_id, epoch=epoch, step_index=index, actions=[pb.Action(text=a) for a in actions]
    )


def text_of(holder: pb.Session | pb.Transition) -> str:
    (part,) = holder.observation.parts
    return part.text


async def entered() -> None:
    """Until a step of waiting-v1 is at its gate."""
    assert await asyncio.to_thread(Waiting.entered.wait, 30)


@pytest.fixture(autouse=True)
def gate() -> Iterator[None]:
    """Closes the gate of waiting-v1, and opens it after the test: a thread that waits there would keep Python alive."""
    Waiting.entered.clear()
    Waiting.opened.clear()
    yield
    Waiting.opened.set()


Serve = Callable[..., Awaitable[Client]]


@pytest.fixture
async def serve() -> AsyncIterator[Serve]:
    """Starts servers with the given limits and configuration; stops them after the test."""
    async with AsyncExitStack() as stack:

        async def start(*, limits: ServerLimits | None = None, **config: Any) -> Client:
            registry = Registry(troublesome.ALL)
            server = EnvironmentServer(registry, ServerConfig(port=0, limits=limits or ServerLimits(), **config))
            await server.start()
            stack.push_async_callback(server.stop, 0)
            channel = await stack.enter_async_context(grpc.aio.insecure_channel(server.address))
            return Client(server, channel)

        yield start


@pytest.fixture
async def client(serve: Serve) -> Client:
    """A server with default settings."""
    return await serve()
