"""Supervision of calls to another process, which are never answered if that process is dead or hangs."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, NoReturn, TypeVar

from starpod.trainer.engines.base import EngineError

T = TypeVar("T")


class Watch:
    """Raises an error in pending calls if the process dies, hangs, or completes no call for too long.

    Args:
        name: Name of the process in messages.
        interval: Seconds between two checks.
        check: Raises EngineError if the process is dead.
        health_check: Health check that the process answers at once unless it hangs; None disables health checks.
        is_working: Returns whether the process is working although it has not answered the health check yet.
        health_timeout: Seconds without an answer or work after which the process counts as hanging.
        hang_error: Error that is raised if the process hangs.
        reply_timeout: Seconds without a completed call after which EngineError is raised.
    """

    def __init__(
        self,
        name: str,
        *,
        interval: float,
        check: Callable[[], None] = lambda: None,
        health_check: Callable[[], Awaitable[object]] | None = None,
        is_working: Callable[[], bool] = lambda: False,
        health_timeout: float = math.inf,
        hang_error: type[EngineError] = EngineError,
        reply_timeout: float = math.inf,
    ) -> None:
        self._name = name
        self._interval = interval
        self._check = check
        self._health_check = health_check
        self._is_working = is_working
        self._health_timeout = health_timeout
        self._hang_error = hang_error
        self._reply_timeout = reply_timeout
        self._calls_in_flight = 0
        self._seconds_since_reply = 0.0
        self._checker: asyncio.Future[NoReturn] | None = None

    async def guard(self, call: Coroutine[Any, Any, T]) -> T:
        """Await a call and return its result. Raises EngineError if the process will not answer it."""
        task = asyncio.ensure_future(call)
        if self._checker is None:
            self._seconds_since_reply = 0.0
            self._checker = asyncio.ensure_future(self._check_repeatedly())
        checker = self._checker
        self._calls_in_flight += 1
        try:
            await asyncio.wait((task, checker), return_when=asyncio.FIRST_COMPLETED)
            if not task.done():
                checker.result()
            self._seconds_since_reply = 0.0
            return task.result()
        finally:
            task.cancel()
            self._calls_in_flight -= 1
            if not self._calls_in_flight:
                checker.cancel()
                self._checker = None

    async def _check_repeatedly(self) -> NoReturn:
        """Check the process until it fails.

        Time is counted in checks and not by a clock, because answers may arrive unnoticed while the event loop stalls.
        """
        silent_seconds = 0.0
        answer: asyncio.Future[object] | None = None
        try:
            while True:
                if answer is None and self._health_check is not None:
                    answer = asyncio.ensure_future(_awaited(self._health_check()))
                await asyncio.sleep(self._interval)
                self._check()
                self._seconds_since_reply += self._interval
                silent_seconds += self._interval
                if answer is None or answer.done():
                    if answer is None or answer.exception() is None:
                        silent_seconds = 0.0
                    answer = None
                elif self._is_working():
                    silent_seconds = 0.0
                if silent_seconds >= self._health_timeout:
                    raise self._hang_error(
                        f"{self._name} hangs: it has answered no health check for {self._health_timeout:g} s "
                        "(engine.health_timeout)"
                    )
                if self._seconds_since_reply >= self._reply_timeout:
                    raise EngineError(
                        f"{self._name} is alive, but completed no call in {self._reply_timeout:g} s (engine.timeout)"
                    )
        finally:
            if answer is not None:
                answer.cancel()


async def _awaited(question: Awaitable[object]) -> object:
    return await question
