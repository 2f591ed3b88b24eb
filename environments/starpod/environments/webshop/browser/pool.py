"""The pool of a process's browsers. Each operation has a deadline, and all browsers end with the process."""

from __future__ import annotations

import atexit
import contextlib
import functools
import logging
import os
import queue
import threading
import time
from collections.abc import Callable
from typing import TypeVar

from starpod.env_server import Busy

from .chromium import BROKEN, Browser
from .config import BrowserConfig

logger = logging.getLogger(__name__)

Result = TypeVar("Result")

RETRY_SECONDS = 1.0
"""Seconds after which callers should retry when the pool is busy."""
_making = threading.Lock()


class Pool:
    """A pool of up to `config.browsers` browsers, which are started when they are needed. It is thread-safe."""

    def __init__(self, config: BrowserConfig) -> None:
        self.config = config
        # One place per browser; None if it has not been started. The browser that was used last is taken first.
        self._places: queue.LifoQueue[Browser | None] = queue.LifoQueue()
        for _ in range(config.browsers):
            self._places.put(None)
        self._running: set[Browser] = set()
        self._waiting = 0
        self._closed = False
        self._lock = threading.Lock()

    def run(self, work: Callable[[Browser], Result], undo: Callable[[], None] = lambda: None) -> Result:
        """Run `work` with a browser. If the browser breaks, call `undo` and try once more with a new one.

        Raises:
            Busy: the queue is full, no browser became free in time, or the second browser broke as well. If work had
                begun, `undo` was called.
            Exception: any other exception of `work`, after a call of `undo`.
        """
        limit = time.monotonic() + self.config.deadline
        for attempt in (1, 2):
            browser = self._take(limit)
            try:
                with browser.limited(limit - time.monotonic()):
                    if not browser.uses:
                        browser.start()
                    browser.uses += 1
                    result = work(browser)
            except BaseException as error:
                self._drop(browser)
                undo()
                if not isinstance(error, BROKEN):
                    raise
                cause = f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
                logger.warning("a browser broke and was ended", extra={"cause": cause, "attempt": attempt})
                if attempt == 2 or time.monotonic() >= limit:
                    raise Busy(f"the browser broke ({cause}); try again", RETRY_SECONDS) from error
            else:
                if browser.uses < self.config.uses:
                    self._places.put(browser)
                else:
                    self._drop(browser)
                return result
        raise AssertionError("unreachable")

    def close(self) -> None:
        """Kill all browsers. Running operations fail, and new ones raise Busy."""
        with self._lock:
            self._closed = True
        for browser in self.browsers:
            browser.kill()

    @property
    def browsers(self) -> list[Browser]:
        """The running browsers."""
        with self._lock:
            return list(self._running)

    def _take(self, limit: float) -> Browser:
        browser = self._await_place(limit)
        try:
            with self._lock:
                if self._closed:
                    raise Busy("the browsers are being closed", RETRY_SECONDS)
                if browser is None:
                    browser = Browser(self.config)
                    self._running.add(browser)
                return browser
        except BaseException:
            self._places.put(browser)
            raise

    def _await_place(self, limit: float) -> Browser | None:
        with contextlib.suppress(queue.Empty):
            return self._places.get_nowait()
        with self._lock:
            if self._waiting >= self.config.queue:
                raise Busy(f"all browsers are taken and {self._waiting} callers wait already", RETRY_SECONDS)
            self._waiting += 1
        try:
            return self._places.get(timeout=max(limit - time.monotonic(), 0.0))
        except queue.Empty:
            raise Busy(f"no browser became free within {self.config.deadline:g} s", RETRY_SECONDS) from None
        finally:
            with self._lock:
                self._waiting -= 1

    def _drop(self, browser: Browser) -> None:
        browser.kill()
        with self._lock:
            self._running.discard(browser)
        self._places.put(None)


@functools.cache
def _pool_of(process: int) -> Pool:
    pool = Pool(BrowserConfig.from_environment())
    atexit.register(lambda: pool.close() if os.getpid() == process else None)
    return pool


def shared_pool() -> Pool:
    """Return this process's pool. Its browsers end with the process. Raises Unavailable if there is no Chromium."""
    with _making:
        return _pool_of(os.getpid())  # a forked process must not use its parent's browsers
