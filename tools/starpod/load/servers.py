"""Connections of a generator to servers, and its sessions on them."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from typing import Any

from starpod.client.connection import AwaitedCall, Method, Reset, ServerConnection, SessionStep, StartRow, StepBatch
from starpod.client.errors import StarpodError
from starpod.load.measurements import Log, ServerTime
from starpod.load.plan import LoadPlan, ServerAddress, SessionPolicy, Turn
from starpod.v1 import environment_pb2 as pb

HOLD_SECONDS = 0.001
"""Maximum seconds that a step waits for others, so that steps can share a message."""

EpisodeState = tuple[pb.Observation | None, bool]
"""The observation, if it came in a message of its own, and whether the episode has ended."""

clock = time.monotonic
"""Clock that all generators of a machine share, and that the event loop uses too."""


class LoadSession(SessionStep):
    """A session on a server, with at most one step or reset in flight.

    Attributes:
        server: the server.
        policy: chooses the next turns and seeds while the server is `continuous`.
        due: when the call in flight should have been made.
        sent: when it was sent.
        seeds: seed and dynamics seed of the episode.
        call: the latest call.
        reply: the state after it, or after a later call if the server is continuous.
    """

    __slots__ = ("call", "due", "policy", "reply", "seeds", "sent", "server")

    def __init__(self, server: LoadServer, policy: SessionPolicy, state: pb.Session) -> None:
        super().__init__(state.session_id, state.epoch, state.step_index)
        self.server = server
        self.policy = policy
        self.due = self.sent = 0.0
        self.seeds = state.seed, state.dynamics_seed
        self.call: SessionStep | Reset = self
        self.reply: asyncio.Future[EpisodeState] = server.loop.create_future()

    @property
    def latest_call(self) -> tuple[str, float]:
        """Name of the latest call, and when it was due."""
        return "reset" if isinstance(self.call, Reset) else "step", self.due

    def set_step(self, turn: Turn, due: float) -> None:
        """Let the next call be a step. due: when it should be made."""
        self.actions = turn  # type: ignore[assignment]
        self.plain = all(isinstance(action, str) for action in turn)
        self.due, self.call = due, self

    def set_reset(self, seed: int, dynamics_seed: int | None) -> None:
        """Let the next call be a reset, which is due now."""
        self.due, self.call = clock(), _EpisodeReset(self, seed, dynamics_seed)

    async def send(self) -> EpisodeState:
        """Make the latest call, for the first time or once more, and return the state after it. Raise StarpodError.

        If the server is continuous, further calls follow a step before this returns.
        """
        self.sent = clock()
        self.reply = self.server.loop.create_future()
        self.server.submit(self.call)
        return await self.reply

    def resolve(self, state: EpisodeState) -> None:
        """Let the player go on, unless it has been cancelled."""
        if not self.reply.done():
            self.reply.set_result(state)


class LoadServer(ServerConnection):
    """A connection to a server: one Stream for all sessions, or a unary call for each of their calls.

    It extends the connection of the client's fleet, but does not recover from failures. They are counted instead.

    Attributes:
        number: index of the server in the plan.
        sessions: number of this generator's sessions on it.
        paths: number of steps that were answered, by key of plan.PATHS.
        continuous: whether sessions step again as soon as a reply arrives, without their player.
    """

    def __init__(self, number: int, place: ServerAddress, plan: LoadPlan, log: Log) -> None:
        super().__init__(
            place.address,
            plan.transport,
            self,
            server_name=place.server_name,
            timeout=plan.timeout,
            patience=plan.timeout,  # missed deadlines are counted, and the player sends the call again
            grace=0.0,
            hold=HOLD_SECONDS,
            stream=plan.wire == "stream",
            on_change=self._changed,
        )
        self.number = number
        self.sessions = 0
        self.paths: Counter[str] = Counter()
        self.continuous = False
        self._single_path = "messages" if plan.wire == "stream" else "unary"
        self.log = log

    async def call_once(self, method: Method[Any, Any], request: Any, due: float) -> Any:
        """Make a call other than a step or reset and return its reply. Raise StarpodError.

        Args:
            due: instant at which the call should have been sent, in seconds of `time.monotonic`.
        """
        future, sent = self.loop.create_future(), clock()
        self.submit(AwaitedCall(method, request, future))
        reply = await future
        self.log.answered(self.number, method.field, due, sent, clock())
        return reply

    def server_time(self) -> ServerTime:
        """Return the sums of the times that the server has reported so far."""
        return ServerTime(self.calls_timed, self.environment_ms / 1e3, self.queue_ms / 1e3, self.server_ms / 1e3)

    def _changed(self) -> None:
        if self.ready:
            self.queue.calls_allowed = 0  # no client-side limit: the run must see how the server refuses overload

    # --- outcomes of steps (connection.StepReceiver) ------------------------------------------------------------

    def stepped(self, batch: StepBatch) -> None:
        """Pass the replies on, or send the next steps at once if the server is continuous.

        This is the hot path; measure it with `python -m benchmarks.serving.throughput --way "starpod load" --way
        "starpod, step_many"`.
        """
        sessions: list[LoadSession] = batch.steps  # type: ignore[assignment]
        now, ends = clock(), batch.ends
        self.paths["columns"] += len(sessions)
        if self.log.open_loop:
            for session in sessions:
                self.log.answered(self.number, "step", session.due, session.sent, now)
        else:
            self.log.answered_steps(self.number, [session.due for session in sessions], now)
        next_steps: list[LoadSession] = []
        for row, session in enumerate(sessions):
            session.step_index += 1
            if not self.continuous:
                session.resolve((None, row in ends))
            elif row not in ends and self.take_turn(session, now):
                next_steps.append(session)
            else:
                session.due = session.sent = now
                session.call = _EpisodeReset(session, *session.policy.begin(), is_continuous=True)
                self.submit(session.call)
        self.submit_steps(next_steps)

    def take_turn(self, session: LoadSession, now: float) -> bool:
        """Prepare the next step of a continuous session. Return False if its policy has no further turn."""
        turn = session.policy.next(None)
        if turn is not None:
            session.actions = turn  # type: ignore[assignment]
            session.due = session.sent = now
            session.call = session
        return turn is not None

    def answered(self, step: SessionStep, response: pb.StepResponse) -> None:
        assert isinstance(step, LoadSession)
        self.paths[self._single_path] += 1
        self.log.answered(self.number, "step", step.due, step.sent, clock())
        step.step_index += 1
        step.resolve((response.transition.observation, bool(response.transition.end_reason)))

    def refused(self, step: SessionStep, error: StarpodError) -> None:
        assert isinstance(step, LoadSession)
        if not step.reply.done():
            step.reply.set_exception(error)


class _EpisodeReset(Reset):
    """A reset of a session. If it is continuous, the next step follows it, and the player does not know of it."""

    __slots__ = ("_is_continuous",)

    session: LoadSession

    def __init__(
        self, session: LoadSession, seed: int, dynamics_seed: int | None, *, is_continuous: bool = False
    ) -> None:
        super().__init__(session, seed, dynamics_seed)
        self._is_continuous = is_continuous

    def started(self, start: StartRow) -> None:
        self._begin_episode((start.seed, start.dynamics_seed), None)

    def answered(self, response: pb.ResetResponse) -> None:
        state = response.session
        self._begin_episode((state.seed, state.dynamics_seed), state.observation)

    def _begin_episode(self, seeds: tuple[int, int], observation: pb.Observation | None) -> None:
        session, server, now = self.session, self.session.server, clock()
        server.log.answered(server.number, "reset", session.due, session.sent, now)
        session.epoch, session.step_index, session.seeds = session.epoch + 1, 0, seeds
        if server.continuous and self._is_continuous and server.take_turn(session, now):
            server.submit(session)
        else:
            session.resolve((observation, False))

    def refused(self, error: StarpodError) -> None:
        self.session.server.refused(self.session, error)
