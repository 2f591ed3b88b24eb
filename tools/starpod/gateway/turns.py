"""Sharing of a scarce resource among sessions: each waits for its turn, and no session delays another by many turns."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import ParamSpec, TypeVar

Given = ParamSpec("Given")
Result = TypeVar("Result")


class Turns:
    """Lets a few callers in at once. The sessions that wait are served in rotation, each one's calls in order.

    Args:
        at_once: Number of callers that may be inside.
    """

    def __init__(self, at_once: int = 1) -> None:
        self._free = at_once
        self._waiting: dict[str, deque[asyncio.Future[None]]] = {}

    @asynccontextmanager
    async def turn(self, session: str) -> AsyncIterator[None]:
        """Wait for a turn of the session, and hold it while the context lasts."""
        await self._enter(session)
        try:
            yield
        finally:
            self._leave()

    async def in_thread(
        self, session: str, function: Callable[Given, Result], *args: Given.args, **kwargs: Given.kwargs
    ) -> Result:
        """Wait for a turn of the session, and return what the function returns in a thread.

        A caller that is cancelled leaves the thread running, which keeps the turn until it ends.
        """
        await self._enter(session)
        work = asyncio.ensure_future(asyncio.to_thread(function, *args, **kwargs))
        work.add_done_callback(self._finished)
        return await asyncio.shield(work)

    def _finished(self, work: asyncio.Future[Result]) -> None:
        if not work.cancelled():
            work.exception()  # the caller may be gone: asyncio would report an exception that nobody retrieved
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
