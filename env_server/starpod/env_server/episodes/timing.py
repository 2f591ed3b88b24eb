"""Time of a call in the server: waiting, the environment's own code, and the rest."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TypeVar

R = TypeVar("R")

clock = time.perf_counter


class Timing:
    """Times of one call, in seconds of `clock`.

    Attributes:
        arrived: time at which its message arrived.
        began: time at which an environment first worked for the call; 0 if none has.
        environment: duration of environments' work for the call.
    """

    __slots__ = ("arrived", "began", "environment")

    def __init__(self, arrived: float) -> None:
        self.arrived = arrived
        self.began = 0.0
        self.environment = 0.0

    def trailer(self) -> tuple[tuple[str, str], ...]:
        """Return trailing metadata in the format of the Server-Timing header, with durations in milliseconds."""
        queue = self.began - self.arrived if self.began else 0.0
        total = clock() - self.arrived
        return (
            (
                "server-timing",
                f"environment;dur={1e3 * self.environment:.4f}, queue;dur={1e3 * queue:.4f}, "
                f"total;dur={1e3 * total:.4f}",
            ),
        )


_present: ContextVar[Timing | None] = ContextVar("timing", default=None)


def begin(arrived: float) -> Timing:
    """Start timing a call. Work in this context, and in tasks created in it, counts towards the call."""
    timing = Timing(arrived)
    _present.set(timing)
    return timing


@contextmanager
def environment_works() -> Iterator[None]:
    """Count the time in this context as the environment's work for the current call."""
    timing, start = _present.get(), clock()
    if timing is not None and not timing.began:
        timing.began = start
    try:
        yield
    finally:
        if timing is not None:
            timing.environment += clock() - start


def measured(function: Callable[[], R]) -> Callable[[], R]:
    """Wrap the function so that its time, on any thread, counts towards the current call."""
    timing = _present.get()
    if timing is None:
        return function

    def run() -> R:
        start = clock()
        if not timing.began:
            timing.began = start
        try:
            return function()
        finally:
            timing.environment += clock() - start

    return run
