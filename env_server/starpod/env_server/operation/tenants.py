"""The limits and usage of one tenant on a worker: sessions, calls per second, streams, and time of the event loop."""

from __future__ import annotations

import asyncio
import math
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

from starpod.env_server.episodes.errors import CallError, overloaded
from starpod.env_server.operation.config import UNLIMITED, Quota

loop_time = time.thread_time
"""Clock for tenants' usage: CPU time of the event-loop thread, so that tenants are not charged while the OS preempts
the server."""
_RETRY_SECONDS = 0.5
SLICE_SECONDS = 0.01
"""A long call yields to the event loop after this many seconds."""
UNNAMED = "unnamed"
"""Name of tenants without a name in metrics. Nothing derived from a token leaves the server."""
RECEIVED_SECONDS = 4e-9
"""Approximate time of the event loop for receiving one byte of a request, before any code of ours runs."""
BYTES_OF_A_CALL = 65_536
"""This many bytes of a request count as one more call."""


class Working:
    """Context manager that charges the event loop's time inside it to the tenant. Code inside must not await."""

    __slots__ = ("_started", "_tenant")

    def __init__(self, tenant: Tenant) -> None:
        self._tenant = tenant
        self._started = 0.0

    def __enter__(self) -> None:
        self._started = loop_time()

    def __exit__(self, *_: object) -> None:
        self._tenant.spent += loop_time() - self._started


class Tenant:
    """The owner of sessions. `id` identifies the tenant; `name` is for people and metrics.

    Attributes:
        spent: seconds of the event loop's time that the tenant has used, plus an offset. LoopShare compares it.
        free: value of `spent` up to which the tenant need not wait for others.
        seen: monotonic time of the latest call, in seconds.
    """

    __slots__ = (
        "_level",
        "_refill_time",
        "free",
        "id",
        "last_call",
        "name",
        "queue",
        "quota",
        "reading",
        "refused",
        "sessions",
        "spent",
        "streams",
        "working",
    )

    def __init__(self, id: str, name: str = UNNAMED, quota: Quota = UNLIMITED) -> None:
        self.id = id
        self.name = name
        self.quota = quota
        self.sessions = 0
        self.streams = 0
        self.refused: Counter[str] = Counter()
        self.spent = 0.0
        self.free = 0.0
        self.last_call = -math.inf
        self.queue = asyncio.Lock()
        self.reading = asyncio.Lock()
        self.working = Working(self)
        self._level = max(1.0, quota.calls_per_second)
        self._refill_time = time.monotonic()

    def change_quota(self, quota: Quota) -> None:
        """Apply a new quota. The time until the tenant may call again stays the same."""
        before, after = self.quota.calls_per_second, quota.calls_per_second
        if before and after:
            self._level *= after / before
        elif after:  # calls without a limit leave no debt
            self._level = max(1.0, after)
        self.quota = quota

    def check_sessions(self, count: int) -> None:
        """Raise OVERLOADED if `count` more sessions would exceed the quota."""
        limit = self.quota.sessions
        if limit and self.sessions + count > limit:
            raise self._refuse(
                "token_sessions", f"{self.sessions} of the {limit} sessions of this token are in use; close some"
            )

    def take_calls(self, count: int = 1, size: int = 0) -> None:
        """Count calls of `size` bytes in total against the rate. Raises OVERLOADED with the seconds to wait.

        A batch is accepted whole if any budget is left. It may exceed a second's worth, and later calls then wait
        longer.
        """
        rate = self.quota.calls_per_second
        if not rate:
            return
        now = time.monotonic()
        self._level = min(max(1.0, rate), self._level + (now - self._refill_time) * rate)
        self._refill_time = now
        if self._level <= 0.0:
            wait = max(-self._level / rate, 0.001)
            raise self._refuse("token_calls_per_second", f"this token may make {rate:g} calls per second", wait)
        self._level -= count + size // BYTES_OF_A_CALL

    def charge(self, count: int) -> None:
        """Count additional calls that a request, once parsed, turned out to contain."""
        self._level -= count

    @contextmanager
    def stream(self) -> Iterator[None]:
        """Count a stream while the context lasts. Raises OVERLOADED if the tenant has too many."""
        limit = self.quota.streams
        if limit and self.streams >= limit:
            raise self._refuse("token_streams", f"all {limit} streams of this token are connected; end one")
        self.streams += 1
        try:
            yield
        finally:
            self.streams -= 1

    def _refuse(self, limit: str, problem: str, retry_after: float = _RETRY_SECONDS) -> CallError:
        self.refused[limit] += 1
        return overloaded(limit, f"{problem}, or try again later", retry_after)


class LoopShare:
    """Fair division of the event loop's time among tenants that call concurrently.

    A tenant that calls alone gets the whole loop. If several tenants call, heavy ones take turns of one slice each, and
    the tenant that has used least goes next. gRPC accepts only one call per round of the event loop. All calls that
    have arrived are therefore accepted before each turn. As a result, a light tenant waits for few turns of others,
    however many calls arrived before its own.
    """

    _WINDOW_SECONDS = 0.1
    _OTHERS_SECONDS = 1.0
    """A tenant that has not called for this many seconds no longer counts as calling concurrently."""
    _LITTLE_SECONDS = 0.01
    """Seconds per window that a tenant may use without waiting."""
    _MOST_SECONDS = 0.1
    """Maximum debt in seconds (`spent` - `free`) that a tenant carries into the next window. Also the maximum by which
    the `spent` of a tenant may be below that of another."""
    _QUIET_SECONDS = 0.002
    """If no call was accepted for this many seconds, no call is assumed to be waiting for acceptance."""
    _HELD_SECONDS = 0.02
    """Maximum delay of a turn, so that a tenant that only sends calls cannot block the turns of others."""
    _ROUNDS = 3
    """Number of event-loop rounds from the arrival of data on a connection until its coroutine has run."""

    def __init__(self) -> None:
        self._ends = 0.0
        self._alone = True
        self._tenants: set[Tenant] = set()
        self._last_acceptance = 0.0
        self._waiting: dict[Tenant, asyncio.Future[None]] = {}
        self._turns: asyncio.Task[None] | None = None

    def note_accepted_call(self) -> None:
        """Note that a call of any tenant has been accepted."""
        self._last_acceptance = time.monotonic()

    def exceeded(self, tenant: Tenant) -> bool:
        """Note a call of the tenant, and return whether the tenant has to `wait`."""
        now = time.monotonic()
        tenant.last_call = now
        self._tenants.add(tenant)
        if now >= self._ends:
            self._begin_window(now)
        return tenant.spent > tenant.free and not self._alone

    async def wait(self, tenant: Tenant) -> None:
        """Wait for the tenant's turn if it has exceeded its share. Its calls continue in the order of arrival."""
        if not self.exceeded(tenant):
            return
        async with tenant.queue:
            if not self.exceeded(tenant):
                return
            turn = self._waiting[tenant] = asyncio.get_running_loop().create_future()
            if self._turns is None:
                self._turns = asyncio.get_running_loop().create_task(self._take_turns())
            try:
                await turn
            finally:
                self._waiting.pop(tenant, None)

    async def pause(self, tenant: Tenant) -> None:
        """Let others use the event loop in the middle of a long call."""
        await asyncio.sleep(0)
        await self.wait(tenant)

    async def _take_turns(self) -> None:
        while self._waiting:
            deadline = time.monotonic() + self._HELD_SECONDS
            for _ in range(self._ROUNDS):
                await asyncio.sleep(0)
            while (now := time.monotonic()) < deadline and now - self._last_acceptance < self._QUIET_SECONDS:
                await asyncio.sleep(self._QUIET_SECONDS)
            if self._waiting:
                tenant = min(self._waiting, key=lambda tenant: tenant.spent)
                turn = self._waiting.pop(tenant)
                if not turn.done():
                    turn.set_result(None)
                await asyncio.sleep(0)  # the tenant uses its slice
        self._turns = None

    def _begin_window(self, now: float) -> None:
        self._ends = now + self._WINDOW_SECONDS
        self._tenants = {tenant for tenant in self._tenants if now - tenant.last_call < self._OTHERS_SECONDS}
        self._alone = len(self._tenants) < 2
        most_spent = max(tenant.spent for tenant in self._tenants)
        for each in self._tenants:
            lag = max(0.0, most_spent - self._MOST_SECONDS - each.spent)
            each.spent += lag
            each.free = min(max(each.free + lag, each.spent - self._MOST_SECONDS), each.spent) + self._LITTLE_SECONDS
