"""Connections of a generator to servers, and the sessions whose calls they carry."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Container
from typing import Any, Protocol

from starpod.client.connection import (
    METHODS,
    Method,
    Reset,
    ServerCall,
    ServerConnection,
    SessionStep,
    StartRow,
    StepBatch,
)
from starpod.client.errors import StarpodError
from starpod.client.transport import Backoff
from starpod.load.measurements import ServerTime
from starpod.load.plan import LoadPlan, ServerAddress, SessionPolicy
from starpod.v1 import environment_pb2 as pb

HOLD_SECONDS = 0.001
"""Maximum seconds that a step waits for others, so that steps can share a message."""

clock = time.monotonic
"""Clock that all generators of a machine share, and that the event loop uses too."""


class LoadSession(SessionStep):
    """A session, the policy that plays it, and at most one call in flight.

    Attributes:
        actions: the turn that the policy chose: texts or Action messages.
        call: name of the call in flight; empty if there is none.
        due: when the call should have been sent.
        sent: when the call was sent.
        deadline_start: when the call was last sent or counted as missed; the next deadline counts from here.
        request: the request of a call other than a step or reset.
        seeds: the seed and the dynamics seed of the next episode.
        over: whether the episode has ended.
        observation: the latest observation, if the policy looks at it, else None.
        resend: whether the turn was refused and must be played again.
        failing: whether the latest call failed.
        abandoned: whether another session has replaced this one; late replies to it are ignored.
        recording: the turns of the episode, if they are recorded.
    """

    __slots__ = (
        "abandoned",
        "backoff",
        "call",
        "deadline_start",
        "due",
        "episodes",
        "failing",
        "missed",
        "number",
        "observation",
        "over",
        "policy",
        "recording",
        "request",
        "resend",
        "seeds",
        "sent",
        "server",
    )

    def __init__(self, number: int, policy: SessionPolicy) -> None:
        super().__init__("", 0, 0)
        self.number = number
        self.policy = policy
        self.server: LoadServer | None = None
        self.over = self.resend = self.failing = self.abandoned = False
        self.observation: pb.Observation | None = None
        self.call = ""
        self.due = self.sent = self.deadline_start = 0.0
        self.request: Any = None
        self.seeds: tuple[int, int | None] = (0, None)
        self.episodes = 0
        self.missed = 0
        self.recording: list[Any] | None = None
        self.backoff = Backoff(0.02, 1.0)


class Receiver(Protocol):
    """Receives the outcomes of calls. `sees` is True if the policies look at observations."""

    sees: bool

    def stepped(self, server: LoadServer, steps: list[LoadSession], ended: Container[int], now: float) -> None:
        """Continue after steps were answered; `ended` has the indices in `steps` whose episodes ended."""

    def answered(self, session: LoadSession, response: Any, now: float) -> None: ...

    def failed(self, session: LoadSession, error: StarpodError, now: float) -> None: ...

    def connected(self) -> None:
        """Handle that a server was connected, for the first time or again."""


class LoadServer(ServerConnection):
    """A connection to a server: one Stream for all sessions, or a unary call for each of their calls.

    It extends the connection of the client's fleet, but does not recover from failures. They are counted instead.

    Attributes:
        number: index of the server in the plan.
        sessions: number of this generator's sessions on it.
        paths: number of steps that were answered, by key of plan.PATHS.
    """

    def __init__(self, number: int, place: ServerAddress, plan: LoadPlan, receiver: Receiver) -> None:
        super().__init__(
            place.address,
            plan.transport,
            self,
            server_name=place.server_name,
            timeout=plan.timeout,
            patience=float("inf"),  # the receiver counts deadlines and gives up
            grace=0.0,
            hold=HOLD_SECONDS,
            stream=plan.wire == "stream",
            on_change=self._changed,
        )
        self.number = number
        self.sessions = 0
        self.paths: Counter[str] = Counter()
        self._single_path = "messages" if plan.wire == "stream" else "unary"
        self._session_receiver = receiver

    def send(self, session: LoadSession) -> None:
        """Send the session's call. Its outcome goes to the receiver."""
        match session.call:
            case "step":
                self.submit(session)
            case "reset":
                self.submit(_SessionReset(self._session_receiver, session))
            case _:
                self.submit(_SessionCall(self._session_receiver, session))

    def server_time(self) -> ServerTime:
        """Return the sums of the times that the server has reported so far."""
        return ServerTime(self.calls_timed, self.environment_ms / 1e3, self.queue_ms / 1e3, self.server_ms / 1e3)

    def _changed(self) -> None:
        if self.ready:
            self.queue.calls_allowed = 0  # no client-side limit: the run must see how the server refuses overload
            self._session_receiver.connected()

    # --- outcomes of steps (connection.StepReceiver) ------------------------------------------------------------

    def stepped(self, batch: StepBatch) -> None:
        self.paths["columns"] += len(batch.steps)
        self._session_receiver.stepped(self, batch.steps, batch.ends, clock())  # type: ignore[arg-type]

    def answered(self, step: SessionStep, response: pb.StepResponse) -> None:
        assert isinstance(step, LoadSession)
        self.paths[self._single_path] += 1
        if self._session_receiver.sees:
            step.observation = response.transition.observation
        ended_rows = (0,) if response.transition.end_reason else ()
        self._session_receiver.stepped(self, [step], ended_rows, clock())

    def refused(self, step: SessionStep, error: StarpodError) -> None:
        assert isinstance(step, LoadSession)
        self._session_receiver.failed(step, error, clock())


class _SessionCall(ServerCall[Any, Any]):
    """A call other than a step or reset."""

    __slots__ = ("_receiver", "_session")

    def __init__(self, receiver: Receiver, session: LoadSession) -> None:
        super().__init__(Method(session.call, METHODS[session.call]))
        self._receiver = receiver
        self._session = session

    def request(self) -> Any:
        return self._session.request

    def answered(self, response: Any) -> None:
        self._receiver.answered(self._session, response, clock())

    def refused(self, error: StarpodError) -> None:
        self._receiver.failed(self._session, error, clock())


class _SessionReset(Reset):
    """A reset of a session."""

    __slots__ = ("_receiver",)

    session: LoadSession

    def __init__(self, receiver: Receiver, session: LoadSession) -> None:
        super().__init__(session, *session.seeds)
        self._receiver = receiver

    def started(self, start: StartRow) -> None:
        session = pb.Session(
            session_id=self.session.session_id,
            epoch=self.session.epoch + 1,
            seed=start.seed,
            dynamics_seed=start.dynamics_seed,
            observation=pb.Observation(parts=[pb.Part(text=start.text)]) if self._receiver.sees else None,
        )
        self.answered(pb.ResetResponse(session=session))

    def answered(self, response: pb.ResetResponse) -> None:
        self._receiver.answered(self.session, response, clock())

    def refused(self, error: StarpodError) -> None:
        self._receiver.failed(self.session, error, clock())
