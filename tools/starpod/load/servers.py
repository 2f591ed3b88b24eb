"""Servers as a generator drives them, and the sessions whose calls they carry."""

from __future__ import annotations

import asyncio
import json
import time
from abc import ABC, abstractmethod
from collections.abc import Container, Coroutine, Sequence
from typing import Any, Protocol

import websockets.asyncio.client as websockets
from websockets.exceptions import ConnectionClosed, WebSocketException

from starpod.client.connection import METHODS, Call, Connection, Method, Step, StepBatch
from starpod.client.errors import (
    BadArgument,
    DeadlineExceeded,
    EnvironmentBug,
    Overloaded,
    SessionLost,
    StarpodError,
    Unreachable,
)
from starpod.client.transport import Backoff
from starpod.load.measurements import ServerTime
from starpod.load.plan import Place, Plan, Policy
from starpod.v1 import environment_pb2 as pb

HOLD_SECONDS = 0.001
"""Steps that are ready share a message; none waits for longer than this."""

clock = time.monotonic
"""One for all generators of a machine, and the event loop's own."""


class LoadSession(Step):
    """A session, the policy that plays it, and its one call in flight.

    actions: a policy's Turn: texts, or messages as they came.
    call: its name; empty while there is none. due: when it should have been sent; sent: when it was.
    asked: when it was last counted as sent, for its deadline. request: of a call other than a step.
    over: the episode has ended. observation: what the policy needs to see; None where it needs nothing.
    resend: the turn was refused and is still to be played. failing: its latest call failed.
    abandoned: another one took its place; a late reply is not for us.
    played: the turns of the episode, where they are recorded. socket: its own connection, with OpenEnv.
    """

    __slots__ = (
        "abandoned",
        "asked",
        "backoff",
        "call",
        "due",
        "episodes",
        "failing",
        "missed",
        "number",
        "observation",
        "over",
        "played",
        "policy",
        "request",
        "resend",
        "sent",
        "server",
        "socket",
    )

    def __init__(self, number: int, policy: Policy) -> None:
        super().__init__("", 0, 0)
        self.number = number
        self.policy = policy
        self.server: Server | None = None
        self.over = self.resend = self.failing = self.abandoned = False
        self.observation: pb.Observation | None = None
        self.call = ""
        self.due = self.sent = self.asked = 0.0
        self.request: Any = None
        self.episodes = 0
        self.missed = 0
        self.played: list[Any] | None = None
        self.backoff = Backoff(0.02, 1.0)
        self.socket: Any = None


class Receiver(Protocol):
    """Is told what became of calls. sees: the policies look at observations."""

    sees: bool

    def stepped(self, server: Server, steps: list[LoadSession], ended: Container[int], now: float) -> None:
        """Steps came back; `ended` has the places of those that ended their episodes."""

    def answered(self, session: LoadSession, response: Any, now: float) -> None: ...

    def failed(self, session: LoadSession, error: StarpodError, now: float) -> None: ...

    def connected(self) -> None:
        """A server is there, again."""


class Server(ABC):
    """A server as a generator drives it. Unlike a fleet it recovers nothing: what fails is counted.

    number: its place in the plan. sessions: how many of ours it has.
    """

    def __init__(self, number: int, place: Place, plan: Plan, receiver: Receiver) -> None:
        self.number = number
        self.place = place
        self.sessions = 0
        self._plan = plan
        self._receiver = receiver

    @property
    @abstractmethod
    def ready(self) -> bool:
        """Calls can be sent."""

    @property
    @abstractmethod
    def error(self) -> StarpodError | None:
        """Why it is not ready."""

    @abstractmethod
    def start(self) -> None:
        """Connects, and again whenever the connection is lost."""

    @abstractmethod
    async def close(self) -> None: ...

    @abstractmethod
    def send(self, session: LoadSession) -> None:
        """Sends the session's call; the receiver is told what becomes of it."""

    def send_steps(self, sessions: Sequence[LoadSession]) -> None:
        """Sends many steps of plain text."""
        for session in sessions:
            self.send(session)

    def server_time(self) -> ServerTime:
        """Sums of what the server has said of its time so far."""
        return ServerTime()


class GrpcServer(Server):
    """A Starpod server over the fleet's connection: one Stream for all sessions, or a unary call for each."""

    def __init__(self, number: int, place: Place, plan: Plan, receiver: Receiver) -> None:
        super().__init__(number, place, plan, receiver)
        self._connection = Connection(
            place.address,
            plan.transport,
            self,
            server_name=place.server_name,
            timeout=plan.timeout,
            patience=float("inf"),  # the receiver counts deadlines, and gives up
            grace=0.0,
            hold=HOLD_SECONDS,
            stream=plan.wire == "stream",
            on_change=self._changed,
        )

    @property
    def ready(self) -> bool:
        return self._connection.ready

    @property
    def error(self) -> StarpodError | None:
        return self._connection.error

    def start(self) -> None:
        self._connection.start()

    async def close(self) -> None:
        await self._connection.close()

    def send(self, session: LoadSession) -> None:
        if session.call == "step":
            self._connection.submit(session)
        else:
            self._connection.submit(_SessionCall(self._receiver, session))

    def send_steps(self, sessions: Sequence[LoadSession]) -> None:
        self._connection.submit_steps(sessions)

    def server_time(self) -> ServerTime:
        timed = self._connection
        return ServerTime(timed.calls_timed, timed.environment_ms / 1e3, timed.queue_ms / 1e3, timed.server_ms / 1e3)

    @property
    def messages_sent(self) -> int:
        """On the Stream."""
        return self._connection.messages_sent

    def _changed(self) -> None:
        if self._connection.ready:
            self._connection.queue.calls_allowed = 0  # how a server refuses what is too much is to be seen
            self._receiver.connected()

    # --- outcomes of steps (connection.StepReceiver) ------------------------------------------------------------

    def stepped(self, batch: StepBatch) -> None:
        self._receiver.stepped(self, batch.steps, batch.ends, clock())  # type: ignore[arg-type]

    def answered(self, step: Step, response: pb.StepResponse) -> None:
        assert isinstance(step, LoadSession)
        if self._receiver.sees:
            step.observation = response.transition.observation
        over = (0,) if response.transition.end_reason else ()
        self._receiver.stepped(self, [step], over, clock())

    def refused(self, step: Step, error: StarpodError) -> None:
        assert isinstance(step, LoadSession)
        self._receiver.failed(step, error, clock())


class _SessionCall(Call[Any, Any]):
    """Any call but a step."""

    __slots__ = ("_receiver", "_session")

    def __init__(self, receiver: Receiver, session: LoadSession) -> None:
        super().__init__(Method(session.call, METHODS[session.call]), session.request)
        self._receiver = receiver
        self._session = session

    def answered(self, response: Any) -> None:
        self._receiver.answered(self._session, response, clock())

    def refused(self, error: StarpodError) -> None:
        self._receiver.failed(self._session, error, clock())


# --- OpenEnv ----------------------------------------------------------------------------------------------------------

MAX_MESSAGE_BYTES = 100 * 1024 * 1024
"""What its own client takes."""

_ERRORS: dict[str, type[StarpodError]] = {
    "INVALID_JSON": BadArgument,
    "UNKNOWN_TYPE": BadArgument,
    "VALIDATION_ERROR": BadArgument,
    "EXECUTION_ERROR": EnvironmentBug,
    "CAPACITY_REACHED": Overloaded,
    "FACTORY_ERROR": EnvironmentBug,
    "SESSION_ERROR": SessionLost,
}


def websocket_url(url: str) -> str:
    """ws://host:port/ws for http://host:port. Raises ValueError if it is no URL."""
    scheme, separator, rest = url.rstrip("/").partition("://")
    if not separator or scheme not in ("http", "https", "ws", "wss") or not rest:
        raise ValueError(f"{url!r} is not the URL of an OpenEnv server, as in http://127.0.0.1:8000")
    return f"{scheme.replace('http', 'ws')}://{rest}/ws"


class OpenEnvServer(Server):
    """With OpenEnv a connection is a session: to open is to connect and to reset, to close is to disconnect."""

    def __init__(self, number: int, place: Place, plan: Plan, receiver: Receiver) -> None:
        super().__init__(number, place, plan, receiver)
        self._url = websocket_url(place.address)
        self._ready = False
        self._error: StarpodError | None = None
        self._lost = asyncio.Event()
        self._loop = asyncio.get_running_loop()
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def ready(self) -> bool:
        return self._ready

    @property
    def error(self) -> StarpodError | None:
        return self._error

    def start(self) -> None:
        self._spawn(self._connect_again())

    async def close(self) -> None:
        self._ready = False
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def send(self, session: LoadSession) -> None:
        self._spawn(self._ask(session))

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = self._loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _connect_again(self) -> None:
        backoff = Backoff(0.05, 0.5)
        while True:
            try:
                await (await self._connect()).close()
            except StarpodError as error:
                self._error = error
            else:
                backoff.reset()
                self._ready, self._error = True, None
                self._receiver.connected()
                self._lost.clear()
                await self._lost.wait()
            await asyncio.sleep(backoff.wait())

    async def _ask(self, session: LoadSession) -> None:
        try:
            async with asyncio.timeout(self._plan.timeout):
                done = await self._exchange(session)
        except TimeoutError:
            error: StarpodError = DeadlineExceeded(f"no reply within {self._plan.timeout:g} s")
        except StarpodError as failure:
            error = failure
        except (ConnectionClosed, OSError, WebSocketException) as failure:
            error = Unreachable(str(failure) or type(failure).__name__)
        else:
            if session.call == "step":
                self._receiver.stepped(self, [session], (0,) if done else (), clock())
            else:
                self._receiver.answered(session, None, clock())
            return
        if isinstance(error, Unreachable):
            self._ready, self._error = False, error
            self._lost.set()
        if session.socket is not None:
            # Replies carry no ids: after a failure it is unclear whose the next one is.
            await session.socket.close()
        self._receiver.failed(session, error, clock())

    async def _exchange(self, session: LoadSession) -> bool:
        """Whether the episode is over."""
        if session.call == "close":
            socket, session.socket = session.socket, None
            if socket is not None:
                await socket.send('{"type": "close"}')
                await socket.close()
            return False
        if session.call == "open":
            session.socket = await self._connect()
        if session.call == "step":
            message = f'{{"type": "step", "data": {session.actions[0]}}}'
        else:
            message = json.dumps({"type": "reset", "data": session.request})
        await session.socket.send(message)
        reply = json.loads(await session.socket.recv())
        data = reply.get("data", {})
        if reply.get("type") == "error":
            kind = _ERRORS.get(data.get("code", ""), SessionLost)
            raise kind(f"{data.get('message', 'no message')} ({data.get('code', 'no code')})")
        return bool(data.get("done"))

    async def _connect(self) -> websockets.ClientConnection:
        try:
            return await websockets.connect(
                self._url, open_timeout=self._plan.timeout, max_size=MAX_MESSAGE_BYTES, proxy=None
            )
        except (OSError, WebSocketException, TimeoutError) as error:
            raise Unreachable(f"no OpenEnv server answers at {self._url} ({error})") from None
