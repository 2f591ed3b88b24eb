"""Restarts of a process that samples: calls that lose it wait for the next one."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from starpod.trainer.engines.base import EngineLost


class Restarts:
    """Starts the process again for all calls that lost it, up to a number of times.

    Args:
        most: Maximum number of restarts.
        start_again: Starts another process. Raises EngineError.

    Attributes:
        used: Number of restarts.
        process: Number of the process that runs now. A call compares it before and after, to tell which one answered.
    """

    def __init__(self, most: int, start_again: Callable[[], Awaitable[None]]) -> None:
        self.used = 0
        self.process = 0
        self._most = most
        self._start_again = start_again
        self._under_way: asyncio.Task[None] | None = None

    @property
    def under_way(self) -> bool:
        """Whether a process is being started."""
        return self._under_way is not None

    async def wait(self) -> None:
        """Wait for a start that is under way. Raises EngineError if it fails."""
        if self._under_way is not None:
            # Shield the start: if this waiter is cancelled, a half-started process must not be left without an owner.
            await asyncio.shield(self._under_way)

    async def recover(self, error: EngineLost, process: int) -> None:
        """Wait until a process with a higher number runs. Raises `error` if no restart is left."""
        if self.process != process:
            return
        if self._under_way is None:
            self.use(error)
            self._under_way = asyncio.create_task(self._start())
            self._under_way.add_done_callback(lambda task: task.cancelled() or task.exception())
        await self.wait()

    def use(self, error: Exception) -> None:
        """Count a restart. Raises `error` if none is left."""
        if self.used >= self._most:
            raise error
        self.used += 1

    async def repeat(self, call: Callable[[], Awaitable[None]]) -> None:
        """Make a call, and repeat it once if the process dies during it."""
        await self.wait()
        process = self.process
        try:
            await call()
        except EngineLost as error:
            await self.recover(error, process)
            await call()

    async def end(self) -> None:
        """Wait for a start that is under way, and allow no other one."""
        self._most = 0
        if self._under_way is not None:
            await asyncio.wait((self._under_way,))

    async def _start(self) -> None:
        try:
            await self._start_again()
            self.process += 1
        finally:
            self._under_way = None
