"""A server of troublesome environments in the test's own event loop, reached over a real socket."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import Any

import grpc
import pytest
from grpc_status import rpc_status

from starpod.check.grpc_connection import rows
from starpod.env_server.authoring.environment import Environment
from starpod.env_server.operation.config import ServerConfig
from starpod.env_server.registry import Registry
from starpod.env_server.server.server import EnvironmentServer
from starpod.env_server.sessions.table import SessionTable
from starpod.v1 import environment_pb2 as pb
from starpod.v1.environment_pb2_grpc import EnvironmentServiceStub
from starpod.v1.statuses import details_of
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

    @property
    def limit(self) -> tuple[str, str | None]:
        """The reason and, where a limit was reached, its name."""
        return self.reason, self.metadata.get("limit")

    @property
    def bug(self) -> tuple[str, str, str | None]:
        """Code, reason, and what became of the session."""
        return self.code, self.reason, self.metadata.get("session")


LOST = ("INTERNAL", "ENVIRONMENT_BUG", "lost")
INTACT = ("INTERNAL", "ENVIRONMENT_BUG", "intact")


def failure_of(error: grpc.aio.AioRpcError) -> Failure:
    status = rpc_status.from_call(error)  # type: ignore[arg-type]
    assert status is not None, error
    return read_status(status)


def read_status(status: Any) -> Failure:
    info, violations, delay = details_of(status)
    assert info is not None and info.domain == "starpod.v1"
    code = grpc.StatusCode[next(c.name for c in grpc.StatusCode if c.value[0] == status.code)].name
    fields = [field for field, _ in violations]
    return Failure(code, info.reason, status.message, dict(info.metadata), fields, delay)


class Client:
    """The generated stub, with what tests do over and over."""

    def __init__(self, server: EnvironmentServer, channel: grpc.aio.Channel) -> None:
        self.server = server
        self.channel = channel
        self.stub = EnvironmentServiceStub(channel)

    def ask(self, method: str, session: pb.Session | None = None, **fields: Any) -> Any:
        """A call of the contract by its name, about a session."""
        if session is not None:
            fields["session_id"] = session.session_id
        return getattr(self.stub, method)(getattr(pb, f"{method}Request")(**fields))

    async def open(self, environment: str, **fields: Any) -> pb.Session:
        (session,) = (await self.ask("Open", environment_id=environment, **{"seed": 1, **fields})).sessions
        return session  # type: ignore[no-any-return]

    async def group(self, environment: str, count: int, **fields: Any) -> Sequence[pb.Session]:
        response = await self.ask("Open", environment_id=environment, count=count, **{"seed": 1, **fields})
        return response.sessions  # type: ignore[no-any-return]

    async def step(self, session: pb.Session, index: int, *actions: str, epoch: int = 1, **call: Any) -> pb.Transition:
        request = step_request(session, index, *actions, epoch=epoch)
        return (await self.stub.Step(request, **call)).transition

    async def fork(self, session: pb.Session, step_index: int = 0, **fields: Any) -> Sequence[pb.Session]:
        fork = self.ask("Fork", session, **{"epoch": 1, "step_index": step_index, **fields})
        return (await fork).sessions  # type: ignore[no-any-return]

    async def snapshot(self, session: pb.Session) -> pb.SessionSnapshot:
        return (await self.ask("Snapshot", session)).snapshot  # type: ignore[no-any-return]

    async def close(self, *sessions: pb.Session) -> None:
        await self.ask("Close", session_ids=[session.session_id for session in sessions])

    async def live(self) -> int:
        """Return the number of live sessions."""
        return (await self.ask("Describe")).live_sessions  # type: ignore[no-any-return]

    @property
    def table(self) -> SessionTable:
        """The sessions in the server."""
        (table,) = self.server._service.tables.values()
        return table

    async def pending(self, session: pb.Session, count: int) -> None:
        """Wait until `count` calls wait for a session or work on it."""
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
    """Wait until a step of waiting-v1 is at its gate."""
    assert await asyncio.to_thread(Waiting.entered.wait, 30)


Row = tuple[Any, ...]
"""A session, the index of its step, and the actions."""


class Stream:
    """One stream, which numbers its calls. replies: by number; a step's is its transition, an error's a Failure."""

    def __init__(self, client: Client) -> None:
        self.call = client.stub.Stream()
        self.replies: dict[int, Any] = {}
        self.timings: list[pb.ServerTiming] = []
        self._sent = 0

    async def send(self, *rows: Row, calls: Sequence[pb.Call] = (), request: pb.StreamRequest | None = None) -> None:
        """Sends steps in columns, and calls, in one message. Rows are numbered before calls."""
        message = request or columns(*rows)
        message.calls.extend(calls)
        for place, call in enumerate(message.calls):
            call.call_id = self._sent + len(message.steps.call_ids) + place
        message.steps.call_ids[:] = range(self._sent, self._sent + len(message.steps.call_ids))
        self._sent += len(message.steps.call_ids) + len(message.calls)
        await self.call.write(message)

    async def until(self, count: int) -> None:
        """Wait until `count` calls are answered."""
        while len(self.replies) < count:
            response = await asyncio.wait_for(self.call.read(), 60)
            assert response is not grpc.aio.EOF, await self.call.details()
            arrived: dict[int, Any] = {}
            for reply in (*response.replies, *rows(response.transitions)):
                answer = getattr(reply, reply.WhichOneof("response"))
                answer = answer.transition if isinstance(answer, pb.StepResponse) else answer
                arrived[reply.call_id] = read_status(answer) if reply.HasField("error") else answer
            assert not arrived.keys() & self.replies.keys(), "answered twice"
            self.replies.update(arrived)
            self.timings.append(response.timing)

    async def ask(self, *rows: Row, calls: Sequence[pb.Call] = (), request: pb.StreamRequest | None = None) -> Any:
        """The replies to one message in the order of its calls, when all that was sent is answered."""
        first = self._sent
        await self.send(*rows, calls=calls, request=request)
        await self.until(self._sent)
        return [self.replies[number] for number in range(first, self._sent)]


def columns(*rows: Row) -> pb.StreamRequest:
    request = pb.StreamRequest()
    if rows:
        request.steps.call_ids[:] = range(len(rows))
        request.steps.session_ids[:] = [row[0].session_id for row in rows]
        request.steps.epochs[:] = [1] * len(rows)
        request.steps.step_indices[:] = [row[1] for row in rows]
        request.steps.action_counts[:] = [len(row) - 2 for row in rows]
        request.steps.actions[:] = [action for row in rows for action in row[2:]]
    return request


@pytest.fixture(autouse=True)
def gate() -> Iterator[None]:
    """Closes the gate of waiting-v1, and opens it after the test: a thread that waits there would keep Python alive."""
    Waiting.entered.clear()
    Waiting.opened.clear()
    yield
    Waiting.opened.set()


Serve = Callable[..., Awaitable[Client]]


@pytest.fixture
async def serve(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Serve]:
    """Starts servers of the given environments, else of all troublesome ones; stops them after the test."""

    async def nothing_tried(_: EnvironmentServer) -> None:
        """Trying a confined process of each class takes longer than most tests; sessions start confined ones anyway."""

    monkeypatch.setattr(EnvironmentServer, "_try_sandbox", nothing_tried)
    async with AsyncExitStack() as stack:

        async def start(*environments: type[Environment], **config: Any) -> Client:
            registry = Registry(environments or troublesome.ALL)
            server = EnvironmentServer(registry, ServerConfig(port=0, **config))
            await server.start()
            stack.push_async_callback(server.stop, 0)
            channel = await stack.enter_async_context(grpc.aio.insecure_channel(server.address))
            return Client(server, channel)

        yield start


@pytest.fixture
async def client(serve: Serve) -> Client:
    """A server with default settings."""
    return await serve()
