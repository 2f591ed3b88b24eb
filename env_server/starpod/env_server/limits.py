"""What one tenant may take of a worker: sessions, calls per second, streams; and what he has taken of it."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from starpod.env_server.errors import CallError, overloaded

_RETRY_SECONDS = 0.5
UNNAMED = "unnamed"
"""How metrics call tenants without a name: nothing that is made of a token leaves the server."""


@dataclass(frozen=True, slots=True)
class Quota:
    """What one tenant may take of one worker; 0 means no limit but the worker's own.

    sessions: alive at once.
    calls_per_second: unary calls, calls on streams and rows of columns together; one second's worth may come at once.
    streams: connected at once.
    """

    sessions: int = 0
    calls_per_second: float = 0.0
    streams: int = 0


UNLIMITED = Quota()


class Tenant:
    """Whose sessions they are. `name` is for people and metrics; `id` tells tenants apart."""

    __slots__ = ("_level", "_refilled", "id", "name", "quota", "refused", "sessions", "streams")

    def __init__(self, id: str, name: str = UNNAMED, quota: Quota = UNLIMITED) -> None:
        self.id = id
        self.name = name
        self.quota = quota
        self.sessions = 0
        self.streams = 0
        self.refused: Counter[str] = Counter()
        self._level = max(1.0, quota.calls_per_second)
        self._refilled = time.monotonic()

    def check_sessions(self, count: int) -> None:
        """Raises OVERLOADED if `count` more sessions are more than the tenant may have."""
        limit = self.quota.sessions
        if limit and self.sessions + count > limit:
            raise self._refuse(
                "token_sessions", f"{self.sessions} of the {limit} sessions of this token are in use; close some"
            )

    def take_calls(self, count: int = 1) -> None:
        """Counts calls against the rate. Raises OVERLOADED with the seconds after which there is room again.

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
