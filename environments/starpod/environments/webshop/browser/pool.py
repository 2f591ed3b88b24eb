"""The pool of a process's browsers. Each operation has a deadline, and all browsers end with the process."""

from __future__ import annotations

import atexit
import functools
import logging
import os
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
        self._free: list[Browser] = []
        self._all: set[Browser] = set()
        self._places = config.browsers
        self._waiting = 0
        self._closed = False
        self._change = threading.Condition()

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
            except BROKEN as error:
                self._drop(browser)
                undo()
                cause = f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
                logger.warning("a browser broke and was ended", extra={"cause": cause, "attempt": attempt})
                if attempt == 2 or time.monotonic() >= limit:
                    raise Busy(f"the browser broke ({cause}); try again", RETRY_SECONDS) from error
            except BaseException:
                self._drop(browser)
                undo()
                raise
            else:
                self._give_back(browser)
                return result
        raise AssertionError("unreachable")

    def close(self) -> None:
        """Kill all browsers. Running operations fail, and new ones raise Busy."""
        with self._change:
            self._closed = True
            browsers, self._free = list(self._all), []
            self._change.notify_all()
        for browser in browsers:
            browser.kill()

    @property
    def browsers(self) -> list[Browser]:
        """The running browsers."""
        with self._change:
            return list(self._all)

    def _take(self, limit: float) -> Browser:
        with self._change:
            if not self._free and not self._places:
                if self._waiting >= self.config.queue:
                    raise Busy(f"all browsers are taken and {self._waiting} callers wait already", RETRY_SECONDS)
                self._waiting += 1
                try:
                    is_available = self._change.wait_for(
                        lambda: self._free or self._places or self._closed, limit - time.monotonic()
                    )
                finally:
                    self._waiting -= 1
                if not is_available:
                    raise Busy(f"no browser became free within {self.config.deadline:g} s", RETRY_SECONDS)
            if self._closed:
                raise Busy("the browsers are being closed", RETRY_SECONDS)
            if self._free:
                return self._free.pop()
            self._places -= 1
            try:
                browser = Browser(self.config)
            except BaseException:
                self._places += 1
                raise
            self._all.add(browser)
            return browser

    def _give_back(self, browser: Browser) -> None:
        if browser.uses >= self.config.uses:
            self._drop(browser)
            return
        with self._change:
            self._free.append(browser)
            self._change.notify()

    def _drop(self, browser: Browser) -> None:
        browser.kill()
        with self._change:
            self._all.discard(browser)
            self._places += 1
            self._change.notify()


@functools.cache
def _pool_of(process: int) -> Pool:
    pool = Pool(BrowserConfig.from_environment())
    atexit.register(lambda: pool.close() if os.getpid() == process else None)
    return pool


def shared_pool() -> Pool:
    """Return this process's pool. Its browsers end with the process. Raises Unavailable if there is no Chromium."""
    with _making:
        return _pool_of(os.getpid())  # a forked process must not use its parent's browsers
