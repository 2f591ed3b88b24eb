"""A thread pool that abandons hanging threads, so that a caller waits for a limited time.

A thread cannot be killed. If a call takes too long, its thread is abandoned and replaced, up to a limit, and its
session is lost. If the thread ever returns, its result is dropped and it ends.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
import time
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any, TypeVar

from starpod.env_server.authoring.environment import Busy

logger = logging.getLogger(__name__)

R = TypeVar("R")
THREAD_NAME = "starpod pool"
"""Prefix of the names of all pool threads."""
REPLACEMENTS = 4
"""Maximum number of abandoned threads at a time, per thread of the pool."""
_LATE = 0.1
"""A timer that fires more than this many seconds late shows that this process was stalled."""
_RETRY_SECONDS = 5.0


class Hung(Exception):
    """The call did not end in time. Its thread continues, but nobody waits for it."""


class _Work:
    __slots__ = ("abandoned", "done", "function", "loop", "started")

    def __init__(self, function: Callable[[], Any]) -> None:
        self.function = function
        self.loop = asyncio.get_running_loop()
        self.done: asyncio.Future[Any] = self.loop.create_future()
        self.started: float | None = None
        self.abandoned = False


class ThreadPool:
    """Pool that runs functions on at most `size` threads, in order of arrival. Use it in a single event loop.

    A function counts as hung `seconds` after a thread has started it.
    """

    def __init__(self, size: int, seconds: float, name: str) -> None:
        self._size = size
        self._seconds = seconds
        self._name = name
        self._queue: SimpleQueue[_Work | None] = SimpleQueue()
        self._lock = threading.Lock()
        self._threads = 0
        self._busy = 0
        self.abandoned = 0
        """Number of abandoned threads that have not returned."""

    async def run(self, function: Callable[[], R]) -> R:
        """Return the function's result, or raise its exception.

        Raises:
            Hung: the function took too long.
            Busy: all threads hang.
        """
        work = _Work(function)
        with self._lock:
            room = self._size + REPLACEMENTS * self._size - self.abandoned
            if room <= 0:
                raise self._all_hang()
            self._busy += 1
            needs_thread = self._threads < min(self._size, room, self._busy)
            self._threads += needs_thread
        self._queue.put(work)
        if needs_thread:
            self._start()
        try:
            await self._watch(work)
        except asyncio.CancelledError:
            work.done.cancel()
            raise
        result: R = work.done.result()
        return result

    def shut_down(self) -> None:
        """End the idle threads now, and the others when they finish."""
        for _ in range(self._threads):
            self._queue.put(None)

    async def _watch(self, work: _Work) -> None:
        while not work.done.done():
            start_time = work.started
            deadline = (start_time or time.monotonic()) + self._seconds
            await asyncio.wait({work.done}, timeout=max(deadline - time.monotonic(), 0.0))
            if work.done.done() or start_time is None:
                continue
            if time.monotonic() - deadline > _LATE:
                work.started = time.monotonic()  # this process was stalled, and the thread may have been, too
                continue
            self._abandon(work)

    def _abandon(self, work: _Work) -> None:
        with self._lock:
            if work.done.done() or work.started is None:
                return
            work.abandoned = True
            self.abandoned += 1
            self._busy -= 1
            self._threads -= 1
            needs_thread = self.abandoned <= REPLACEMENTS * self._size
            self._threads += needs_thread
        logger.error("a thread hangs and is abandoned", extra={"pool": self._name, "left_behind": self.abandoned})
        if needs_thread:
            self._start()
        elif not self._threads:
            while not self._queue.empty():
                if (waiting := self._queue.get()) and not waiting.done.done():
                    waiting.done.set_exception(self._all_hang())
                    self._busy -= 1
        raise Hung(f"hung: it took longer than {self._seconds:g} s, so its thread was abandoned")

    def _all_hang(self) -> Busy:
        return Busy(f"all threads hang, {self.abandoned} of them; see the server's log", _RETRY_SECONDS)

    def _start(self) -> None:
        # A daemon thread, so that Python does not wait for it. `starpod serve` finds hanging threads by their name.
        threading.Thread(target=self._serve, name=f"{THREAD_NAME} {self._name}", daemon=True).start()

    def _serve(self) -> None:
        while (work := self._queue.get()) is not None:
            work.started = time.monotonic()
            result: Any = None
            error: BaseException | None = None
            if not work.done.cancelled():
                try:
                    result = work.function()
                except BaseException as raised:
                    error = raised
            with self._lock:
                if work.abandoned:
                    self.abandoned -= 1
                    return
                self._busy -= 1
                work.started = None  # it can no longer hang, even if the event loop learns of its end too late
            with contextlib.suppress(RuntimeError):  # the loop is closed, and nobody waits any more
                work.loop.call_soon_threadsafe(_settle, work.done, result, error)
            del work, result, error


def _settle(done: asyncio.Future[Any], result: Any, error: BaseException | None) -> None:
    if done.cancelled():
        return
    if error is None:
        done.set_result(result)
    else:
        done.set_exception(error)
