"""What one tenant may take of a worker: sessions, work per second, streams, the event loop's time; and what it has."""

from __future__ import annotations

import asyncio
import math
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from starpod.env_server.errors import CallError, overloaded

loop_time = time.thread_time
"""What tenants take of the event loop is CPU time: a machine that lets the server wait is not their doing."""
_RETRY_SECONDS = 0.5
SLICE_SECONDS = 0.01
"""For so long a call that has much to do keeps the event loop before others have it."""
UNNAMED = "unnamed"
"""How metrics call tenants without a name: nothing that is made of a token leaves the server."""
RECEIVED_SECONDS = 4e-9
"""Of the event loop's time that a byte of a request takes before anybody sees it, about."""
BYTES_OF_A_CALL = 65_536
"""So many bytes of a request count as one more call."""


@dataclass(frozen=True, slots=True)
class Quota:
    """What one tenant may take of one worker; 0 means no limit but the worker's own.

    sessions: alive at once.
    calls_per_second: unary calls, calls on streams and rows of columns together. A call that makes a group counts as
        its members, and each 64 KiB of a request as one call more. One second's worth may come at once.
    streams: connected at once.
    """

    sessions: int = 0
    calls_per_second: float = 0.0
    streams: int = 0


UNLIMITED = Quota()


class Working:
    """Counts what happens inside, which must not wait, as the tenant's time of the event loop."""

    __slots__ = ("_started", "_tenant")

    def __init__(self, tenant: Tenant) -> None:
        self._tenant = tenant
        self._started = 0.0

    def __enter__(self) -> None:
        self._started = loop_time()

    def __exit__(self, *_: object) -> None:
        self._tenant.spent += loop_time() - self._started


class Tenant:
    """Whose sessions they are. `name` is for people and metrics; `id` tells tenants apart.

    spent: seconds of the event loop's time, of any beginning: LoopShare compares tenants by it.
    free: up to where it may be spent without waiting for others.
    seen: when it last called, in seconds of the monotonic clock.
    """

    __slots__ = (
        "_level",
        "_refilled",
        "free",
        "id",
        "name",
        "queue",
        "quota",
        "reading",
        "refused",
        "seen",
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
        self.seen = -math.inf
        self.queue = asyncio.Lock()
        self.reading = asyncio.Lock()
        self.working = Working(self)
        self._level = max(1.0, quota.calls_per_second)
        self._refilled = time.monotonic()

    def change_quota(self, quota: Quota) -> None:
        """Apply other limits. Calls that were taken at the old rate cost as many seconds at the new one."""
        before, after = self.quota.calls_per_second, quota.calls_per_second
        if before and after:
            self._level *= after / before
        elif after:  # what was taken without a limit is no debt
            self._level = max(1.0, after)
        self.quota = quota

    def check_sessions(self, count: int) -> None:
        """Raises OVERLOADED if `count` more sessions are more than the tenant may have."""
        limit = self.quota.sessions
        if limit and self.sessions + count > limit:
            raise self._refuse(
                "token_sessions", f"{self.sessions} of the {limit} sessions of this token are in use; close some"
            )

    def take_calls(self, count: int = 1, size: int = 0) -> None:
        """Counts calls of `size` bytes against the rate. Raises OVERLOADED with the seconds after which there is room.

        A batch is taken whole as long as anything is left, so that it may be larger than what a second allows: the
        calls after it wait the longer.
        """
        rate = self.quota.calls_per_second
        if not rate:
            return
        now = time.monotonic()
        self._level = min(max(1.0, rate), self._level + (now - self._refilled) * rate)
        self._refilled = now
        if self._level <= 0.0:
            wait = max(-self._level / rate, 0.001)
            raise self._refuse("token_calls_per_second", f"this token may make {rate:g} calls per second", wait)
        self._level -= count + size // BYTES_OF_A_CALL

    def charge(self, count: int) -> None:
        """Counts what a call that was let in turns out to ask for besides."""
        self._level -= count

    @contextmanager
    def stream(self) -> Iterator[None]:
        """Counts one stream while it lasts. Raises OVERLOADED if the tenant has too many."""
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
    """Shares the event loop's time among the tenants that call at the same time.

    While others call too, the calls of a tenant that wants much take turns of a slice each, and among such tenants
    whoever has had least is next. gRPC accepts one call in a round of the loop, so before each turn the loop works off
    the calls that have come: who wants little waits for few turns of others, however many calls came before. A tenant
    that is alone has all of the loop.
    """

    _WINDOW_SECONDS = 0.1
    _OTHERS_SECONDS = 1.0
    """A tenant that has not called for so long takes nothing from others."""
    _LITTLE_SECONDS = 0.01
    """Who takes no more of a window wants little."""
    _MOST_SECONDS = 0.1
    """For so much at most a tenant pays later that it took at once, and as much may it be ahead of another."""
    _QUIET_SECONDS = 0.002
    """No call has been accepted for so long: none waits."""
    _HELD_SECONDS = 0.02
    """Turns are held back for so long at most, or who only makes calls would keep others from theirs."""
    _ROUNDS = 3
    """From what comes on a connection until its coroutine has gone on."""

    def __init__(self) -> None:
        self._ends = 0.0
        self._alone = True
        self._tenants: set[Tenant] = set()
        self._accepted = 0.0
        self._waiting: dict[Tenant, asyncio.Future[None]] = {}
        self._turns: asyncio.Task[None] | None = None

    def accepted(self) -> None:
        """A call has been accepted, whosever it is."""
        self._accepted = time.monotonic()

    def exceeded(self, tenant: Tenant) -> bool:
        """Whether a call of the tenant, which comes now, has to `wait`."""
        now = time.monotonic()
        tenant.seen = now
        self._tenants.add(tenant)
        if now >= self._ends:
            self._begin_window(now)
        return tenant.spent > tenant.free and not self._alone

    async def wait(self, tenant: Tenant) -> None:
        """Waits until it is the tenant's turn, if it has to. Its calls go on in the order in which they came."""
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
        """Lets others have the event loop in the middle of a long call."""
        await asyncio.sleep(0)
        await self.wait(tenant)

    async def _take_turns(self) -> None:
        while self._waiting:
            held = time.monotonic() + self._HELD_SECONDS
            for _ in range(self._ROUNDS):
                await asyncio.sleep(0)
            while (now := time.monotonic()) < held and now - self._accepted < self._QUIET_SECONDS:
                await asyncio.sleep(self._QUIET_SECONDS)
            if self._waiting:
                tenant = min(self._waiting, key=lambda each: each.spent)
                turn = self._waiting.pop(tenant)
                if not turn.done():
                    turn.set_result(None)
                await asyncio.sleep(0)  # it has its slice
        self._turns = None

    def _begin_window(self, now: float) -> None:
        self._ends = now + self._WINDOW_SECONDS
        self._tenants = {each for each in self._tenants if now - each.seen < self._OTHERS_SECONDS}
        self._alone = len(self._tenants) < 2
        ahead = max(each.spent for each in self._tenants)
        for each in self._tenants:
            lag = max(0.0, ahead - self._MOST_SECONDS - each.spent)
            each.spent += lag
            each.free = min(max(each.free + lag, each.spent - self._MOST_SECONDS), each.spent) + self._LITTLE_SECONDS
