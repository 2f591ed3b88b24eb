"""Servers as a generator drives them, and the sessions whose calls they carry."""

from __future__ import annotations

import asyncio
import json
import time
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


class Server(Protocol):
    """A server as a generator drives it. Unlike a fleet it recovers nothing: what fails is counted.

    number: its place in the plan. sessions: how many of ours it has. ready: calls can be sent. error: why they cannot.
    """

    number: int
    address: str
    sessions: int
    ready: bool
    error: StarpodError | None

    def start(self) -> None:
        """Connects, and again whenever the connection is lost."""

    async def close(self) -> None: ...

    def send(self, session: LoadSession) -> None:
        """Sends the session's call; the receiver is told what becomes of it."""

    def send_steps(self, sessions: Sequence[LoadSession]) -> None:
        """Sends many steps of plain text."""

    def server_time(self) -> ServerTime:
        """Sums of what the server has said of its time so far."""
        ...


class GrpcServer(Connection):
    """A Starpod server over the fleet's connection: one Stream for all sessions, or a unary call for each."""

    def __init__(self, number: int, place: Place, plan: Plan, receiver: Receiver) -> None:
        super().__init__(
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
        self.number = number
        self.sessions = 0
        self._owner = receiver

    def send(self, session: LoadSession) -> None:
        self.submit(session if session.call == "step" else _SessionCall(self._owner, session))

    def send_steps(self, sessions: Sequence[LoadSession]) -> None:
        self.submit_steps(sessions)

    def server_time(self) -> ServerTime:
        return ServerTime(self.calls_timed, self.environment_ms / 1e3, self.queue_ms / 1e3, self.server_ms / 1e3)

    def _changed(self) -> None:
        if self.ready:
            self.queue.calls_allowed = 0  # how a server refuses what is too much is to be seen
            self._owner.connected()

    # --- outcomes of steps (connection.StepReceiver) ------------------------------------------------------------

    def stepped(self, batch: StepBatch) -> None:
        self._owner.stepped(self, batch.steps, batch.ends, clock())  # type: ignore[arg-type]

    def answered(self, step: Step, response: pb.StepResponse) -> None:
        assert isinstance(step, LoadSession)
        if self._owner.sees:
            step.observation = response.transition.observation
        over = (0,) if response.transition.end_reason else ()
        self._owner.stepped(self, [step], over, clock())

    def refused(self, step: Step, error: StarpodError) -> None:
        assert isinstance(step, LoadSession)
        self._owner.failed(step, error, clock())


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


class OpenEnvServer:
    """With OpenEnv a connection is a session: to open is to connect and to reset, to close is to disconnect."""

    def __init__(self, number: int, place: Place, plan: Plan, receiver: Receiver) -> None:
        self.number = number
        self.address = place.address
        self.sessions = 0
        self.ready = False
        self.error: StarpodError | None = None
        self._plan = plan
        self._receiver = receiver
        self._url = websocket_url(place.address)
        self._lost = asyncio.Event()
        self._loop = asyncio.get_running_loop()
        self._tasks: set[asyncio.Task[None]] = set()

    def start(self) -> None:
        self._spawn(self._connect_again())

    async def close(self) -> None:
        self.ready = False
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def send(self, session: LoadSession) -> None:
        self._spawn(self._ask(session))

    def send_steps(self, sessions: Sequence[LoadSession]) -> None:
        for session in sessions:
            self.send(session)

    def server_time(self) -> ServerTime:
        return ServerTime()

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
                self.error = error
            else:
                backoff.reset()
                self.ready, self.error = True, None
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
            self.ready, self.error = False, error
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
            message = json.dumps({"type": "reset", "data": {"seed": session.request.seed}})
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
