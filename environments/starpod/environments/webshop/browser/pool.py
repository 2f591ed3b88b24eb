"""The browsers of a process: few, shared, each operation within its deadline, and none left behind."""

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
"""What Busy asks for."""


class Pool:
    """At most `config.browsers` browsers, started when they are needed. Safe to use from threads."""

    def __init__(self, config: BrowserConfig) -> None:
        self.config = config
        self._free: list[Browser] = []
        self._all: set[Browser] = set()
        self._places = config.browsers
        self._waiting = 0
        self._closed = False
        self._change = threading.Condition()

    def run(self, work: Callable[[Browser], Result], undo: Callable[[], None] = lambda: None) -> Result:
        """Does something with a browser, and once more, after `undo`, with a new one if the browser breaks.

        Raises Busy, after `undo`, if the queue is full, no browser is free in time, or the second breaks too. Whatever
        else `work` raises passes through.
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
        """Ends all browsers. Operations that still run fail; no more are taken."""
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
                    there = self._change.wait_for(
                        lambda: self._free or self._places or self._closed, limit - time.monotonic()
                    )
                finally:
                    self._waiting -= 1
                if not there:
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


def once_per_process(make: Callable[[int], Result]) -> Callable[[], Result]:
    """Makes something when it is first asked for, told the process's id: a fork must not use what is its parent's."""
    made, making = functools.cache(make), threading.Lock()

    def shared() -> Result:
        with making:
            return made(os.getpid())

    return shared


@once_per_process
def shared_pool(process: int) -> Pool:
    """The pool of this process; its browsers end with it. Raises Unavailable where there is no Chromium."""
    pool = Pool(BrowserConfig.from_environment())
    atexit.register(lambda: pool.close() if os.getpid() == process else None)
    return pool
