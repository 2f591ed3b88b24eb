"""A server of the pool: its connection, the sessions that live there, and whether it takes more."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any
from weakref import WeakSet

from starpod.client.connection import CLOSE, FORK, OPEN, RESTORE, Connection, Method, Step
from starpod.client.connection.calls import Request, Response
from starpod.client.errors import Draining, Overloaded, StarpodError
from starpod.client.transport import Backoff
from starpod.v1 import environment_pb2 as pb

# Ids of sessions that are to be closed on a server that is away. The leases of those beyond end them.
MOST_UNCLOSED = 10_000
CLOSED_AT_ONCE = 1_000

# What any server can do as well as another.
_PLACED = (OPEN, RESTORE)
_OPENING = (OPEN, FORK, RESTORE)


class Replica(Connection):
    """A server of the pool. It is `lost` when it has been gone for longer than the grace: its sessions move elsewhere.

    sessions: those of this client that live there.
    unclosed: ids of sessions that nobody holds and that may be alive on it: closed while it was away, brought back
        elsewhere, or opened for a caller who has gone. They are closed when it can be reached.
    placing: sessions that are being opened on it.
    full: why it took no session when it was last asked for one. It is not asked again before the loop time
        `full_until`.
    """

    def __init__(self, *arguments: Any, **settings: Any) -> None:
        super().__init__(*arguments, **settings)
        self.sessions: WeakSet[Step] = WeakSet()
        self.unclosed: list[str] = []
        self.placing = 0
        self.full: Overloaded | None = None
        self.full_until = 0.0
        self._counted = 0
        self._room = Backoff()

    def __repr__(self) -> str:
        state = "ready" if self.ready else f"not ready: {self.error}"
        return f"Replica({self.address}, {len(self.sessions)} sessions, {state})"

    @property
    def draining(self) -> bool:
        return self.description.draining if self.description else False

    @property
    def accepting(self) -> bool:
        """It takes sessions, as far as is known."""
        return self.ready and not self.draining and self.loop.time() >= self.full_until

    @property
    def specs(self) -> list[pb.EnvironmentSpec]:
        return list(self.description.environments) if self.description else []

    @property
    def hosts(self) -> tuple[object, ...]:
        """What decides whether it gets sessions: its instance, the versions that it hosts, whether it drains."""
        return self.instance_id, self.draining, [(spec.id, spec.version) for spec in self.specs]

    @property
    def load(self) -> int:
        """Sessions alive there: what it last reported, and what we have added or taken away since."""
        reported = self.description.live_sessions if self.description else 0
        return reported + len(self.sessions) + self.placing - self._counted

    def adopt(self, description: pb.DescribeResponse) -> None:
        super().adopt(description)
        self._counted = len(self.sessions)

    def forget(self) -> None:
        super().forget()
        self.unclosed.clear()
        self.full_until = 0.0

    async def call(
        self,
        method: Method[Request, Response],
        message: Request,
        until: float,
        unclaimed: Callable[[Response], None] | None = None,
    ) -> Response:
        """As for a Connection. Where the advice is "reopen", or it is Overloaded by a session more, another replica
        may do better. Sessions that were opened for a caller who has gone are closed."""
        if method in _OPENING:
            unclaimed = self._close_opened
        try:
            response = await super().call(method, message, until, unclaimed)
        except Draining:
            if self.description is not None:
                # Now, and not when it is next asked how it is: the least loaded one would be chosen again.
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
        """Others are asked for sessions, as long as it says; what it refuses meanwhile does not prolong that."""
        now = self.loop.time()
        if now >= self.full_until:
            self.full, self.full_until = error, now + self._room.wait(error.retry_after)

    # --- sessions that nobody holds --------------------------------------------------------------------------------

    def _close_opened(self, response: Any) -> None:
        self.close_later(session.session_id for session in response.sessions)

    def close_later(self, session_ids: Iterable[str]) -> None:
        """Has sessions closed as soon as the server can be reached."""
        self.unclosed.extend(session_ids)
        del self.unclosed[:-MOST_UNCLOSED]

    async def close_sessions(self, session_ids: list[str], until: float) -> None:
        """Closes sessions, now or as soon as the server can be reached."""
        if self.ready:
            try:
                await self.call(CLOSE, pb.CloseRequest(session_ids=session_ids), until)
            except StarpodError:
                self.close_later(session_ids)
        else:
            self.close_later(session_ids)

    async def close_unclosed(self, until: float) -> None:
        """Closes what is left to be closed. Raises StarpodError."""
        while self.unclosed and self.ready:
            session_ids = set(self.unclosed[:CLOSED_AT_ONCE])
            await self.call(CLOSE, pb.CloseRequest(session_ids=session_ids), until)
            self.unclosed = [each for each in self.unclosed if each not in session_ids]
