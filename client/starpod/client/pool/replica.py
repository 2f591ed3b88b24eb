"""A server of the pool: its connection, its sessions, and whether it accepts more."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Coroutine, Iterable
from typing import Any
from weakref import WeakSet

from starpod.client.connection import CLOSE, FORK, OPEN, RESTORE, Method, ServerConnection, SessionStep
from starpod.client.connection.calls import Request, Response
from starpod.client.errors import Draining, Overloaded, StarpodError
from starpod.client.transport import Backoff
from starpod.v1 import environment_pb2 as pb

MOST_UNCLOSED = 10_000
"""Maximum number of sessions to remember for closing later. Any further ones end when their lease expires."""
CLOSED_AT_ONCE = 1_000
"""Maximum number of sessions that one Close call names."""

_PLACED = (OPEN, RESTORE)
"""Methods that another server can execute as well."""
_OPENING = (OPEN, FORK, RESTORE)


logger = logging.getLogger("starpod.client")


class Replica(ServerConnection):
    """A server of the pool.

    Attributes:
        sessions: this client's sessions on the server to which the program still holds a reference.
        live: ids of all sessions that the server opened for this client and that have not been closed or lost.
        unclosed: ids of sessions that nobody uses and that may be alive: dropped by the program, closed while the
            server was unreachable, recovered elsewhere, or opened for a caller that was cancelled. They are closed
            once it can be reached.
        placing: number of sessions that are being opened on it.
        full: the server's last refusal of a new session. It is not asked for sessions before loop time `full_until`.
    """

    def __init__(self, *arguments: Any, **settings: Any) -> None:
        super().__init__(*arguments, **settings)
        self.sessions: WeakSet[SessionStep] = WeakSet()
        self.live: set[str] = set()
        self.unclosed: list[str] = []
        self._openings: set[asyncio.Task[Any]] = set()
        self._closing: asyncio.Task[None] | None = None
        self.placing = 0
        self.overload: Overloaded | None = None
        self.overload_end = 0.0
        self._sessions_at_report = 0
        self._room = Backoff()
        self._missed_check = False

    def __repr__(self) -> str:
        state = "ready" if self.ready else f"not ready: {self.error}"
        return f"Replica({self.address}, {len(self.sessions)} sessions, {state})"

    @property
    def draining(self) -> bool:
        return self.description.draining if self.description else False

    @property
    def accepting(self) -> bool:
        """Whether the server probably accepts new sessions."""
        return self.ready and not self.draining and self.loop.time() >= self.overload_end

    @property
    def specs(self) -> list[pb.EnvironmentSpec]:
        return list(self.description.environments) if self.description else []

    @property
    def hosts(self) -> tuple[object, ...]:
        """Everything that placement depends on: the server's process, whether it drains, and its environments."""
        return self.instance_id, self.draining, [(spec.id, spec.version) for spec in self.specs]

    @property
    def load(self) -> int:
        """Estimated number of live sessions: the last reported number, adjusted by this client's later changes."""
        reported_count = self.description.live_sessions if self.description else 0
        return reported_count + len(self.sessions) + self.placing - self._sessions_at_report

    def adopt(self, description: pb.DescribeResponse) -> None:
        super().adopt(description)
        self._sessions_at_report = len(self.sessions)
        if self._missed_check:
            self._missed_check = False
            logger.warning("the server at %s is back", self.address)

    def _lose(self) -> None:
        if self.description is not None:
            self._miss("does not answer")
        super()._lose()

    def _miss(self, reason: str) -> None:
        if not self._missed_check:
            self._missed_check = True
            logger.warning("the server at %s %s: recovering its %d sessions", self.address, reason, len(self.sessions))

    def forget(self) -> None:
        self._miss("was restarted")
        super().forget()
        self.live.clear()
        self.unclosed.clear()
        self.overload_end = 0.0

    async def call(self, method: Method[Request, Response], message: Request, until: float) -> Response:
        """Send a call, as ServerConnection.call does, and close sessions that were opened for a cancelled caller.

        After an error with the advice "reopen", or Overloaded on opening, another server may accept the call."""
        calling = super().call(method, message, until)
        try:
            response = await (self._open(calling) if method in _OPENING else calling)
        except Draining:
            if self.description is not None:
                # Do not wait for the next health check: until then this server would be chosen again and again.
                self.description.draining = True
            raise
        except Overloaded as error:
            if error.advice == "retry" and method in _PLACED:
                self._fill(error)
            raise
        if method in _PLACED:
            self._room.reset()
        return response

    def retries(self, method: Method[Any, Any], error: StarpodError) -> bool:
        return super().retries(method, error) and not (isinstance(error, Overloaded) and method in _PLACED)

    def _fill(self, error: Overloaded) -> None:
        """Do not ask this server for sessions for a while.

        Calls that were already in flight may also be refused, but their refusals do not prolong the pause.
        """
        now = self.loop.time()
        if now >= self.overload_end:
            self.overload, self.overload_end = error, now + self._room.wait(error.retry_after)

    # --- sessions that nobody uses ---------------------------------------------------------------------------------

    async def _open(self, calling: Coroutine[Any, Any, Response]) -> Response:
        """Complete a call that opens sessions even if the caller is cancelled, because only its reply names them."""

        async def complete() -> Response:
            response: Any = await calling
            self.live.update(session.session_id for session in response.sessions)
            return response  # type: ignore[no-any-return]

        def close_opened(task: asyncio.Task[Any]) -> None:
            if not task.cancelled() and task.exception() is None:
                self.close_later(session.session_id for session in task.result().sessions)

        task = self.loop.create_task(complete())
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
        if self.ready and (self._closing is None or self._closing.done()):
            self._closing = self._spawn(self._close_soon())

    async def _close_soon(self) -> None:
        with contextlib.suppress(StarpodError):  # the pool's next check tries again
            await self.close_unclosed(self.loop.time() + self.timeout)

    async def close_all(self, seconds: float) -> None:
        """Close all live sessions.

        Calls that are opening sessions get `seconds` to finish first, and closing may take as long again.
        """
        if self._openings:
            await asyncio.wait(self._openings, timeout=seconds)
        if self.ready and (session_ids := [*{*self.live, *self.unclosed}]):
            await self.close_sessions(session_ids, self.loop.time() + seconds)

    async def close_sessions(self, session_ids: list[str], until: float) -> None:
        """Close sessions now, or else as soon as the server can be reached, even if the caller is cancelled."""
        try:
            if not self.ready:
                raise self._lost_error()
            await self.call(CLOSE, pb.CloseRequest(session_ids=session_ids), until)
            self.live.difference_update(session_ids)
        except BaseException as error:
            self.close_later(session_ids)
            if not isinstance(error, StarpodError):
                raise

    async def close_unclosed(self, until: float) -> None:
        """Close the sessions in `unclosed`. Raises StarpodError."""
        while self.unclosed and self.ready:
            session_ids = set(self.unclosed[:CLOSED_AT_ONCE])
            await self.call(CLOSE, pb.CloseRequest(session_ids=session_ids), until)
            self.live -= session_ids
            self.unclosed = [session_id for session_id in self.unclosed if session_id not in session_ids]
