"""Opening of sessions, each on the least loaded server that can hold it."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, TypeVar

from starpod.client.connection import OPEN, RESTORE, Method
from starpod.client.errors import BadArgument, Overloaded, SessionLost, StarpodError
from starpod.client.history import History, Opened, Restored, first_reply
from starpod.client.nearest import explain_options
from starpod.client.observation import Limits, Want
from starpod.client.pool.placement import Host
from starpod.client.pool.pool import ServerPool
from starpod.client.recovery.rebuild import new_key
from starpod.client.recovery.recovery import Recovery
from starpod.client.recovery.state import RetryState, SessionState
from starpod.client.snapshot import Snapshot
from starpod.v1 import environment_pb2 as pb

Reply = TypeVar("Reply", pb.OpenResponse, pb.RestoreResponse)


class Opener:
    """Opens and restores sessions, asking another server if one cannot hold them. checkpoints: as in Fleet."""

    def __init__(self, pool: ServerPool, recovery: Recovery, *, checkpoints: bool) -> None:
        self._pool = pool
        self._recovery = recovery
        self._checkpoints = checkpoints

    async def open(
        self,
        environment_id: str,
        version: str,
        request: pb.OpenRequest,
        *,
        want: Want,
        options: Mapping[str, Any] | None,
    ) -> list[SessionState]:
        """Open a group of sessions on one server.

        Args:
            environment_id, version, want, options: as in Fleet.open.
            request: the call without these and without its key.
        """

        def choose(until: float) -> Awaitable[Host]:
            return self._pool.choose(environment_id, version, until)

        host, response = await self._place(choose, OPEN, request, want, options)
        _, spec = host
        request_options = request.options if request.HasField("options") else None
        states = []
        for message in response.sessions:
            origin = Opened(
                spec.id,
                response.environment_version,
                request_options,
                message.seed,
                message.dynamics_seed,
                response.limits,
                request.want,
                request.lease_seconds,
            )
            states.append(self._state(host, message, response, want, origin))
        await self._recovery.checkpoints.new(states)
        return states

    async def restore(self, snapshot: Snapshot, *, want: Want, lease_seconds: float) -> SessionState:
        """Open a session that continues from a snapshot; see Fleet.restore."""

        def choose(until: float) -> Awaitable[Host]:
            return self._pool.choose_for(snapshot, until)

        request = pb.RestoreRequest(snapshot=snapshot.to_proto(), lease_seconds=lease_seconds)
        host, response = await self._place(choose, RESTORE, request, want)
        origin = Restored(request.snapshot, response.environment_version, request.want, lease_seconds)
        return self._state(host, response.sessions[0], response, want, origin)

    async def _place(
        self,
        choose: Callable[[float], Awaitable[Host]],
        method: Method[Any, Reply],
        request: pb.OpenRequest | pb.RestoreRequest,
        want: Want,
        options: Mapping[str, Any] | None = None,
    ) -> tuple[Host, Reply]:
        """Complete the request and send it to one server after another, until one accepts it."""
        loop = asyncio.get_running_loop()
        retry = RetryState(loop.time() + self._recovery.patience)
        count = request.count if isinstance(request, pb.OpenRequest) else 1
        while True:
            replica, spec = host = await choose(retry.until)
            if isinstance(request, pb.OpenRequest):
                request.environment_id, request.version = spec.id, f"=={spec.version}"
            request.key = new_key()
            recoverable = self._recovery.enabled and spec.capabilities.deterministic
            request.want.CopyFrom(want.to_proto(state_key=recoverable and spec.capabilities.state_key))
            replica.placing += count
            try:
                response = await replica.call(method, request, retry.until)
            except BadArgument as error:
                raise explain_options(error, spec, options) from None
            except StarpodError as error:
                if isinstance(error, Overloaded) and error.advice == "retry":
                    continue  # the pool waits if all servers are full
                if error.advice != "reopen" or loop.time() > retry.until:
                    raise
                if isinstance(error, SessionLost):
                    retry.count_loss(error)
                await asyncio.sleep(retry.backoff.wait())
            else:
                self._pool.upkeep.renew_within(response.lease_seconds)
                return host, response
            finally:
                replica.placing -= count

    def _state(
        self,
        host: Host,
        message: pb.Session,
        response: pb.OpenResponse | pb.RestoreResponse,
        want: Want,
        origin: Opened | Restored,
    ) -> SessionState:
        replica, spec = host
        enabled, deterministic = self._recovery.enabled, spec.capabilities.deterministic
        checkpoints = enabled and not deterministic and self._checkpoints and spec.capabilities.snapshot
        history = None
        if enabled and (deterministic or checkpoints):
            start_reply = None if checkpoints else first_reply(message.observation, response.instructions)
            history = History(origin, start_reply)
        return SessionState(
            replica,
            message,
            environment_id=spec.id,
            version=response.environment_version,
            instructions=response.instructions,
            limits=Limits.from_proto(response.limits),
            want=want,
            history=history,
            checkpoints=checkpoints,
        )
