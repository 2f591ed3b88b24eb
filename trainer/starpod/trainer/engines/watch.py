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
        look: Seconds between two checks.
        check: Raises EngineError if the process is dead.
        ask: Health check that the process answers at once unless it hangs; None disables health checks.
        working: Returns whether the process is working although it has not answered the health check yet.
        health: Seconds without an answer or work after which the process counts as hanging.
        hung: Error that is raised if the process hangs.
        reply: Seconds without a completed call after which EngineError is raised.
    """

    def __init__(
        self,
        name: str,
        *,
        look: float,
        check: Callable[[], None] = lambda: None,
        ask: Callable[[], Awaitable[object]] | None = None,
        working: Callable[[], bool] = lambda: False,
        health: float = math.inf,
        hung: type[EngineError] = EngineError,
        reply: float = math.inf,
    ) -> None:
        self._name = name
        self._look = look
        self._check = check
        self._ask = ask
        self._working = working
        self._health = health
        self._hung = hung
        self._reply = reply
        self._guarded = 0
        self._since_reply = 0.0
        self._looking: asyncio.Future[NoReturn] | None = None

    async def guard(self, call: Coroutine[Any, Any, T]) -> T:
        """Await a call and return its result. Raises EngineError if the process will not answer it."""
        task = asyncio.ensure_future(call)
        if self._looking is None:
            self._since_reply = 0.0
            self._looking = asyncio.ensure_future(self._keep_looking())
        checker = self._looking
        self._guarded += 1
        try:
            await asyncio.wait((task, checker), return_when=asyncio.FIRST_COMPLETED)
            if not task.done():
                checker.result()
            self._since_reply = 0.0
            return task.result()
        finally:
            task.cancel()
            self._guarded -= 1
            if not self._guarded:
                checker.cancel()
                self._looking = None

    async def _keep_looking(self) -> NoReturn:
        """Check the process until it fails.

        Time is counted in checks and not by a clock, because answers may arrive unnoticed while the event loop stalls.
        """
        silent_seconds = 0.0
        answer: asyncio.Future[object] | None = None
        try:
            while True:
                if answer is None and self._ask is not None:
                    answer = asyncio.ensure_future(_awaited(self._ask()))
                await asyncio.sleep(self._look)
                self._check()
                self._since_reply += self._look
                silent_seconds += self._look
                if answer is None or answer.done():
                    if answer is None or answer.exception() is None:
                        silent_seconds = 0.0
                    answer = None
                elif self._working():
                    silent_seconds = 0.0
                if silent_seconds >= self._health:
                    raise self._hung(
                        f"{self._name} hangs: it has answered no health check for {self._health:g} s "
                        "(engine.health_timeout)"
                    )
                if self._since_reply >= self._reply:
                    raise EngineError(
                        f"{self._name} is alive, but completed no call in {self._reply:g} s (engine.timeout)"
                    )
        finally:
            if answer is not None:
                answer.cancel()


async def _awaited(question: Awaitable[object]) -> object:
    return await question
