"""Fair sharing of a scarce resource among sessions: each session waits for its turn, in rotation."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import ParamSpec, TypeVar

Parameters = ParamSpec("Parameters")
Result = TypeVar("Result")


class Rotation:
    """Admits a few callers at the same time. Waiting sessions are served in rotation, each session's calls in order.

    Args:
        at_once: Maximum number of callers admitted at the same time.
    """

    def __init__(self, at_once: int = 1) -> None:
        self._free = at_once
        self._waiting: dict[str, deque[asyncio.Future[None]]] = {}

    @asynccontextmanager
    async def turn(self, session: str) -> AsyncIterator[None]:
        """Wait for a turn of the session, and keep it while the context lasts."""
        await self._enter(session)
        try:
            yield
        finally:
            self._leave()

    async def in_thread(
        self, session: str, function: Callable[Parameters, Result], *args: Parameters.args, **kwargs: Parameters.kwargs
    ) -> Result:
        """Wait for a turn of the session, and return the function's result from a thread.

        If the caller is cancelled, the thread continues and keeps the turn until it ends.
        """
        await self._enter(session)
        work = asyncio.ensure_future(asyncio.to_thread(function, *args, **kwargs))
        work.add_done_callback(self._end_turn)
        return await asyncio.shield(work)

    def _end_turn(self, work: asyncio.Future[Result]) -> None:
        if not work.cancelled():
            work.exception()  # mark it as retrieved: asyncio warns of exceptions that a cancelled caller left
        self._leave()

    async def _enter(self, session: str) -> None:
        if self._free:
            self._free -= 1
            return
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(session, deque()).append(turn)
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():
                self._leave()
            raise

    def _leave(self) -> None:
        while self._waiting:
            session = next(iter(self._waiting))
            queue = self._waiting.pop(session)
            turn = queue.popleft()
            if queue:
                self._waiting[session] = queue  # behind the other sessions
            if not turn.done():
                turn.set_result(None)
                return
        self._free += 1
