"""A server of the pool: its connection, its sessions, and whether it accepts more."""

from __future__ import annotations

import logging
from typing import Any
from weakref import WeakSet

from starpod.client.connection import FORK, OPEN, RESTORE, Method, ServerConnection, SessionStep
from starpod.client.connection.calls import Request, Response
from starpod.client.errors import Draining, Overloaded, StarpodError
from starpod.client.pool.closing import SessionCloser
from starpod.client.transport import Backoff
from starpod.v1 import environment_pb2 as pb

_PLACED = (OPEN, RESTORE)
"""Methods that another server can execute as well."""
_OPENING = (OPEN, FORK, RESTORE)

logger = logging.getLogger("starpod.client")


class Replica(ServerConnection):
    """A server of the pool.

    Attributes:
        sessions: this client's sessions on the server to which the program still holds a reference.
        closer: closes sessions on the server.
        placing: number of sessions that are being opened on it.
        overload: the server's last refusal of a new session. It is not asked for sessions before loop time
            `overload_end`.
    """

    def __init__(self, *arguments: Any, **settings: Any) -> None:
        super().__init__(*arguments, **settings)
        self.sessions: WeakSet[SessionStep] = WeakSet()
        self.closer = SessionCloser(self)
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
        self.closer.forget()
        self.overload_end = 0.0

    async def call(self, method: Method[Request, Response], message: Request, until: float) -> Response:
        """Send a call, as ServerConnection.call does, and close sessions that were opened for a cancelled caller.

        After an error with the advice "reopen", or Overloaded on opening, another server may accept the call.
        """
        calling = super().call(method, message, until)
        try:
            response = await (self.closer.open(calling) if method in _OPENING else calling)
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
