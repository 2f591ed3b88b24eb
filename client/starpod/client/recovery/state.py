"""The state of one session, and the results of calls."""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from typing import Generic, TypeVar

from starpod.client.connection import SessionStep
from starpod.client.errors import SessionLost, StarpodError
from starpod.client.history import History
from starpod.client.observation import Actions, Limits, Observation, Transition, Want, observation_from_proto
from starpod.client.pool.replica import Replica
from starpod.client.transport import Backoff
from starpod.v1 import environment_pb2 as pb

CLOSED = "The session is closed: open another one."
MAX_LOSSES = 3
"""Give up on a call after it has lost its session this many times: the call itself probably ends the session."""
MAX_CRASHES = 10
"""Give up on a call after it has lost its server this many times. Servers also end for reasons other than the call."""

T = TypeVar("T")


class BatchResult(Generic[T]):
    """The results of calls that were made together, with one future for all of them.

    Attributes:
        future: resolves to `values` when no result is missing.
        values: results or errors by slot.
        missing: number of results that have not arrived.
        failed: whether there is an error among them.
    """

    __slots__ = ("failed", "future", "missing", "values")

    def __init__(self, future: asyncio.Future[list[T]], count: int = 1) -> None:
        self.values: list[T] = [None] * count  # type: ignore[list-item]
        self.missing = count
        self.failed = False
        self.future = future

    def put(self, slot: int, value: T) -> None:
        self.values[slot] = value
        self.missing -= 1
        if not self.missing and not self.future.done():
            self.future.set_result(self.values)

    def fail(self, slot: int, error: BaseException) -> None:
        self.failed = True
        self.put(slot, error)  # type: ignore[arg-type]

    async def all(self) -> list[T]:
        """Wait for all results and return them. Raises the first error, if there is one."""
        values = await self.future
        if self.failed:
            raise next(value for value in values if isinstance(value, BaseException))
        return values


class RetryState:
    """The retries of a failed call, which end at the loop time `until`."""

    __slots__ = ("actions", "backoff", "losses", "step_index", "until")

    def __init__(self, until: float, actions: Actions = (), step_index: int = 0) -> None:
        self.until = until
        self.actions = actions
        self.step_index = step_index
        self.losses = 0
        self.backoff = Backoff()

    def count_loss(self, error: StarpodError) -> None:
        """Count a loss of the session. Raises SessionLost after too many, because the call itself seems to cause it."""
        self.losses += 1
        if isinstance(error, SessionLost) and self.losses >= MAX_LOSSES:
            raise error
        if self.losses >= MAX_CRASHES:
            raise SessionLost(
                f"The session was lost {self.losses} times during the same call, which seems to crash its server "
                f"each time: {error}",
                metadata={"advice": "give_up"},
            ) from error


class SessionState(SessionStep):
    """The state of a session: its server, episode, log and step in flight.

    Attributes:
        last: the last transition, or the first observation.
        wanted: optional fields of observations.
        show_key: whether the caller wants state keys.
        step_shows_key: `show_key` for a step in flight that has its own `want`.
        history: the log; None if the session cannot be recovered.
        checkpoints: whether a snapshot is taken after every step.
        busy: whether a call is in flight.
        result, slot: receive the result of the step in flight.
        single: the result of steps made by `Session.step`, reused for each of them.
        waiting: calls that wait until the call in flight is over.
        retry: retries of the step in flight; None until it fails.
        recoveries: number of times that the session was recovered.
    """

    __slots__ = (
        "__weakref__",
        "busy",
        "checkpoints",
        "closed",
        "default_want",
        "dynamics_seed",
        "environment_id",
        "history",
        "instructions",
        "last",
        "limits",
        "member",
        "recoveries",
        "replica",
        "result",
        "retry",
        "seed",
        "show_key",
        "single",
        "slot",
        "step_shows_key",
        "version",
        "waiting",
    )

    result: BatchResult[Transition]

    def __init__(
        self,
        replica: Replica,
        message: pb.Session,
        *,
        environment_id: str,
        version: str,
        instructions: str,
        limits: Limits,
        want: Want,
        history: History | None,
        checkpoints: bool,
    ) -> None:
        super().__init__(message.session_id, message.epoch, message.step_index)
        self.replica = replica
        self.environment_id = environment_id
        self.version = version
        self.instructions = instructions
        self.limits = limits
        self.default_want = want
        self.history = history
        self.checkpoints = checkpoints
        self.member = message.member
        self.closed = False
        self.recoveries = 0
        self.show_key = want.state_key
        self.step_shows_key = False
        self.busy = False
        self.single: BatchResult[Transition] = BatchResult(replica.loop.create_future())
        self.slot = 0
        self.retry: RetryState | None = None
        self.waiting: deque[asyncio.Future[None]] | None = None
        self.begin(message)
        self.move_to(replica, message)

    def __del__(self) -> None:
        self.drop()

    def drop(self) -> None:
        """Close the session, which the program no longer uses. Any thread may call this: the event loop closes it."""
        if not self.closed:
            self.closed = True
            with contextlib.suppress(RuntimeError):  # the loop is closed
                self.replica.loop.call_soon_threadsafe(self.replica.closer.close_later, [self.session_id])

    def __repr__(self) -> str:
        address = self.replica.address
        return f"Session({self.environment_id} {self.version}, seed={self.seed}, step={self.step_index}, {address})"

    # --- the episode -----------------------------------------------------------------------------------------------

    def begin(self, message: pb.Session) -> None:
        """Begin a new episode."""
        self.retry = None
        self.seed = message.seed
        self.dynamics_seed = message.dynamics_seed
        self.epoch, self.step_index = message.epoch, message.step_index
        self.show(message.observation)

    def show(self, observation: pb.Observation) -> None:
        key = observation.state_key if self.show_key else b""
        self.last: Observation | Transition = observation_from_proto(observation, key)

    def message_of(self, want: Want) -> pb.Want:
        """Return a `want` as a message, which also asks for state keys if the log has them."""
        return want.to_proto(state_key=self.history is not None and self.history.origin.want.state_key)

    @property
    def done(self) -> bool:
        """Whether the episode is over."""
        return isinstance(self.last, Transition) and self.last.done

    def move_to(self, replica: Replica, message: pb.Session) -> None:
        """Continue with another session, which `replica` holds and `message` describes."""
        self.replica.sessions.discard(self)
        self.replica.closer.live.discard(self.session_id)
        self.replica = replica
        self.session_id, self.epoch, self.step_index = message.session_id, message.epoch, message.step_index
        replica.sessions.add(self)
        replica.closer.live.add(self.session_id)

    # --- one call at a time ----------------------------------------------------------------------------------------

    async def acquire(self) -> None:
        """Wait until all earlier calls are over, and reserve the session. The reply to a step or reset releases it;
        other calls must call `release`."""
        if not self.busy:
            self.busy = True
            return
        if self.waiting is None:
            self.waiting = deque()
        ticket = self.replica.loop.create_future()
        self.waiting.append(ticket)
        try:
            await ticket
        except BaseException:
            if not ticket.cancel() and not ticket.cancelled():
                self.release()  # the session had just been passed to this call
            raise

    def release(self) -> None:
        """Pass the session to the call that has waited longest. The session stays busy, so no later call overtakes."""
        while self.waiting:
            ticket = self.waiting.popleft()
            if not ticket.done():
                ticket.set_result(None)
                return
        self.waiting = None
        self.busy = False
