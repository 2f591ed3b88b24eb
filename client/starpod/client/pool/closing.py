"""The closing of one server's sessions, now or once the server can be reached again."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Coroutine, Iterable
from typing import Any

from starpod.client.connection import CLOSE, ServerConnection
from starpod.client.connection.calls import Response
from starpod.client.errors import StarpodError
from starpod.v1 import environment_pb2 as pb

MOST_UNCLOSED = 10_000
"""Maximum number of sessions to remember for closing later. Any further ones end when their lease expires."""
CLOSED_AT_ONCE = 1_000
"""Maximum number of sessions that one Close call names."""


class SessionCloser:
    """The ids of the sessions that a server opened for this client, and their closing.

    Attributes:
        live: ids of all sessions that the server opened for this client and that have not been closed or lost.
        unclosed: ids of sessions that nobody uses and that may be alive: dropped by the program, closed while the
            server was unreachable, recovered elsewhere, or opened for a caller that was cancelled. They are closed
            once it can be reached.
    """

    def __init__(self, server: ServerConnection) -> None:
        self.live: set[str] = set()
        self.unclosed: list[str] = []
        self._server = server
        self._openings: set[asyncio.Task[Any]] = set()
        self._closing: asyncio.Task[None] | None = None

    def forget(self) -> None:
        """Forget all sessions, because the server's process was replaced."""
        self.live.clear()
        self.unclosed.clear()

    async def open(self, calling: Coroutine[Any, Any, Response]) -> Response:
        """Complete a call that opens sessions even if the caller is cancelled, because only its reply names them."""

        async def complete() -> Response:
            response: Any = await calling
            self.live.update(session.session_id for session in response.sessions)
            return response  # type: ignore[no-any-return]

        def close_opened(task: asyncio.Task[Any]) -> None:
            if not task.cancelled() and task.exception() is None:
                self.close_later(session.session_id for session in task.result().sessions)

        task = self._server.loop.create_task(complete())
        self._openings.add(task)
        task.add_done_callback(self._openings.discard)
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            task.add_done_callback(close_opened)
            raise

    def close_later(self, session_ids: Iterable[str]) -> None:
        """Close sessions as soon as the server can be reached."""
        self.unclosed.extend(session_ids)
        del self.unclosed[:-MOST_UNCLOSED]
        if self._server.ready and (self._closing is None or self._closing.done()):
            self._closing = self._server.spawn(self._close_soon())

    async def _close_soon(self) -> None:
        with contextlib.suppress(StarpodError):  # the pool's next check tries again
            await self.close_unclosed(self._server.loop.time() + self._server.timeout)

    async def close_all(self, seconds: float) -> None:
        """Close all live sessions.

        Calls that are opening sessions get `seconds` to finish first, and closing may take as long again.
        """
        if self._openings:
            await asyncio.wait(self._openings, timeout=seconds)
        if self._server.ready and (session_ids := [*{*self.live, *self.unclosed}]):
            await self.close(session_ids, self._server.loop.time() + seconds)

    async def close(self, session_ids: list[str], until: float) -> None:
        """Close sessions now, or else as soon as the server can be reached, even if the caller is cancelled."""
        if not self._server.ready:
            self.close_later(session_ids)
            return
        try:
            await self._server.call(CLOSE, pb.CloseRequest(session_ids=session_ids), until)
            self.live.difference_update(session_ids)
        except BaseException as error:
            self.close_later(session_ids)
            if not isinstance(error, StarpodError):
                raise

    async def close_unclosed(self, until: float) -> None:
        """Close the sessions in `unclosed`. Raises StarpodError."""
        while self.unclosed and self._server.ready:
            session_ids = set(self.unclosed[:CLOSED_AT_ONCE])
            await self._server.call(CLOSE, pb.CloseRequest(session_ids=session_ids), until)
            self.live -= session_ids
            self.unclosed = [session_id for session_id in self.unclosed if session_id not in session_ids]
