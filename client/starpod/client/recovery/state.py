"""The state of one session, and where the results of calls go."""

from __future__ import annotations

import asyncio
from collections import deque
from typing import Generic, TypeVar

from starpod.client.connection import Step
from starpod.client.history import History
from starpod.client.observation import Actions, Limits, Observation, Transition, Want, observation_from_proto
from starpod.client.pool.replica import Replica
from starpod.client.transport import Backoff
from starpod.v1 import environment_pb2 as pb

CLOSED = "The session is closed: open another one."

T = TypeVar("T")


class BatchResult(Generic[T]):
    """Where the results of calls go that were made together: one future for all of them.

    future: gets `values` when all are in. values: by slot; an error stands in the place of the result.
    missing: how many are not in yet. failed: there is an error among them.
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
        """Every result. Raises the first error, once all are in."""
        values = await self.future
        if self.failed:
            raise next(value for value in values if isinstance(value, BaseException))
        return values


class RetryState:
    """What has happened to a call since it first failed. It may be tried until the loop time `until`."""

    __slots__ = ("actions", "backoff", "losses", "step_index", "until")

    def __init__(self, until: float, actions: Actions = (), step_index: int = 0) -> None:
        self.until = until
        self.actions = actions
        self.step_index = step_index
        self.losses = 0
        self.backoff = Backoff()


class SessionState(Step):
    """A session: where it lives, what it is, its log, and the step in flight.

    last: what the agent saw last. wanted: what its observations carry. show_key: its caller wants state keys;
    step_shows_key: so does the step in flight, where it wants something of its own.
    history: None where the session cannot be recovered. checkpoints: a snapshot is taken after every step.
    busy: a call is in flight. result, slot: where the result of the step in flight goes. single: that of a step that
    was made alone, used again and again.
    waiting: calls that wait for the one in flight to end.
    retry: of the step in flight, once it has failed. recoveries: how often the session was brought back.
    """

    __slots__ = (
        "__weakref__",
        "busy",
        "checkpoints",
        "closed",
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
        "wanted",
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
        self.wanted = want
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
        self.place(replica, message)

    def __repr__(self) -> str:
        where = self.replica.address
        return f"Session({self.environment_id} {self.version}, seed={self.seed}, step={self.step_index}, {where})"

    # --- the episode -----------------------------------------------------------------------------------------------

    def begin(self, message: pb.Session) -> None:
        """A new episode."""
        self.retry = None
        self.seed = message.seed
        self.dynamics_seed = message.dynamics_seed
        self.epoch, self.step_index = message.epoch, message.step_index
        self.show(message.observation)

    def show(self, observation: pb.Observation) -> None:
        key = observation.state_key if self.show_key else b""
        self.last: Observation | Transition = observation_from_proto(observation, key)

    @property
    def done(self) -> bool:
        """Whether the episode is over."""
        return isinstance(self.last, Transition) and self.last.done

    def place(self, replica: Replica, place: pb.Session) -> None:
        """It lives there, under this id, from now on."""
        self.replica.sessions.discard(self)
        self.replica = replica
        self.session_id, self.epoch, self.step_index = place.session_id, place.epoch, place.step_index
        replica.sessions.add(self)

    # --- one call at a time ----------------------------------------------------------------------------------------

    async def acquire(self) -> None:
        """Waits until all calls that were made before are over. The session is the caller's then: a step or a reset
        ends that with its reply, anything else with `release`."""
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
                self.release()  # its turn had come already
            raise

    def release(self) -> None:
        """Hands the session, busy as it is, to the call that has waited longest: none that comes later overtakes it."""
        while self.waiting:
            ticket = self.waiting.popleft()
            if not ticket.done():
                ticket.set_result(None)
                return
        self.waiting = None
        self.busy = False
