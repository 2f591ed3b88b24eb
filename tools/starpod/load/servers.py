"""Servers as a generator drives them, and the sessions whose calls they carry."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Container
from typing import Any, Protocol

from starpod.client.connection import METHODS, Call, Connection, Method, Step, StepBatch
from starpod.client.errors import StarpodError
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
    played: the turns of the episode, where they are recorded.
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


class Receiver(Protocol):
    """Is told what became of calls. sees: the policies look at observations."""

    sees: bool

    def stepped(self, server: Server, steps: list[LoadSession], ended: Container[int], now: float) -> None:
        """Steps came back; `ended` has the places of those that ended their episodes."""

    def answered(self, session: LoadSession, response: Any, now: float) -> None: ...

    def failed(self, session: LoadSession, error: StarpodError, now: float) -> None: ...

    def connected(self) -> None:
        """A server is there, again."""


class Server(Connection):
    """A server over the fleet's connection: one Stream for all sessions, or a unary call for each.

    Unlike a fleet it recovers nothing: what fails is counted. number: its place in the plan. sessions: how many of ours
    it has. paths: steps that came back, by plan.PATHS.
    """

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
        self.paths: Counter[str] = Counter()
        self._singly = "messages" if plan.wire == "stream" else "unary"
        self._owner = receiver

    def send(self, session: LoadSession) -> None:
        """Sends the session's call; the receiver is told what becomes of it."""
        self.submit(session if session.call == "step" else _SessionCall(self._owner, session))

    def server_time(self) -> ServerTime:
        """Sums of what the server has said of its time so far."""
        return ServerTime(self.calls_timed, self.environment_ms / 1e3, self.queue_ms / 1e3, self.server_ms / 1e3)

    def _changed(self) -> None:
        if self.ready:
            self.queue.calls_allowed = 0  # how a server refuses what is too much is to be seen
            self._owner.connected()

    # --- outcomes of steps (connection.StepReceiver) ------------------------------------------------------------

    def stepped(self, batch: StepBatch) -> None:
        self.paths["columns"] += len(batch.steps)
        self._owner.stepped(self, batch.steps, batch.ends, clock())  # type: ignore[arg-type]

    def answered(self, step: Step, response: pb.StepResponse) -> None:
        assert isinstance(step, LoadSession)
        self.paths[self._singly] += 1
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
