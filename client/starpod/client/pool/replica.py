"""A server of the pool: its connection, its sessions, and whether it accepts more."""

from __future__ import annotations

import logging
from collections import defaultdict
from dataclasses import dataclass, field
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
_LIMITS_OF_ONE_ENVIRONMENT = ("environment", "max_containers", "max_processes")
"""Limits at which a server refuses sessions of some environments only. It may have room for the others."""

logger = logging.getLogger("starpod.client")


@dataclass(slots=True)
class Pause:
    """A time until loop time `end`, during which a server is not asked for sessions, because it refused one."""

    error: Overloaded | None = None
    """The last refusal."""
    end: float = 0.0
    backoff: Backoff = field(default_factory=Backoff)


class Replica(ServerConnection):
    """A server of the pool.

    Attributes:
        sessions: this client's sessions on the server to which the program still holds a reference.
        closer: closes sessions on the server.
        placing: number of sessions that are being opened on it.
    """

    def __init__(self, *arguments: Any, **settings: Any) -> None:
        super().__init__(*arguments, **settings)
        self.sessions: WeakSet[SessionStep] = WeakSet()
        self.closer = SessionCloser(self)
        self.placing = 0
        # By environment id; "" is the pause of all environments.
        self._pauses: defaultdict[str, Pause] = defaultdict(Pause)
        self._sessions_at_report = 0
        self._missed_check = False

    def __repr__(self) -> str:
        state = "ready" if self.ready else f"not ready: {self.error}"
        return f"Replica({self.address}, {len(self.sessions)} sessions, {state})"

    @property
    def draining(self) -> bool:
        return self.description.draining if self.description else False

    def accepts(self, environment_id: str) -> bool:
        """Return whether the server probably accepts new sessions of an environment."""
        return self.ready and not self.draining and self.loop.time() >= self.pause(environment_id).end

    def pause(self, environment_id: str) -> Pause:
        """Return the pause until which the server is not asked for sessions of an environment."""
        all_environments, this_environment = self._pauses[""], self._pauses[environment_id]
        return this_environment if this_environment.end > all_environments.end else all_environments

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
        self._pauses.clear()

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
                self._fill(_environment_of(message), error)
            raise
        if method in _PLACED:
            for key in ("", _environment_of(message)):
                self._pauses[key].backoff.reset()
        return response

    def retries(self, method: Method[Any, Any], error: StarpodError) -> bool:
        return super().retries(method, error) and not (isinstance(error, Overloaded) and method in _PLACED)

    def _fill(self, environment_id: str, error: Overloaded) -> None:
        """Begin a pause in asking this server for sessions of this environment, or of any if all of them are refused.

        Calls that were already in flight may also be refused, but their refusals do not prolong the pause.
        """
        one_environment = error.metadata.get("limit") in _LIMITS_OF_ONE_ENVIRONMENT
        pause, now = self._pauses[environment_id if one_environment else ""], self.loop.time()
        if now >= pause.end:
            pause.error, pause.end = error, now + pause.backoff.wait(error.retry_after)


def _environment_of(message: object) -> str:
    """Return the id of the environment whose session an Open or Restore makes."""
    assert isinstance(message, pb.OpenRequest | pb.RestoreRequest)
    return (message if isinstance(message, pb.OpenRequest) else message.snapshot).environment_id
