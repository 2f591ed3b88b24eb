"""The upkeep of a pool's servers: health checks, renewal of leases, resolution of names."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, Protocol

from starpod.client.connection import RENEW
from starpod.client.errors import StarpodError, Unreachable
from starpod.client.pool.replica import Replica
from starpod.v1 import environment_pb2 as pb

RESOLVE_SECONDS = 30.0

logger = logging.getLogger("starpod.client")


class Members(Protocol):
    """The servers of a pool."""

    @property
    def replicas(self) -> Sequence[Replica]: ...
    @property
    def has_names(self) -> bool: ...

    async def resolve(self) -> Unreachable | None:
        """Resolve the names again. Returns the error of the last name that could not be resolved."""

    def changed(self, address: str) -> None:
        """Handle a server that came, went or changed."""

    def spawn(self, coroutine: Coroutine[Any, Any, None]) -> object:
        """Run a coroutine until the pool is closed."""


class ServerUpkeep:
    """The regular work for the servers of a pool. timeout: seconds for one call.

    All of it runs in separate tasks, because a server that does not answer must not delay the renewal of leases on
    other servers.
    """

    def __init__(self, members: Members, *, timeout: float, health_seconds: float) -> None:
        self._members = members
        self._timeout = timeout
        self._health_seconds = health_seconds
        self._renew_seconds = float("inf")
        self._lease_shortened = asyncio.Event()
        self._running_keys: set[int] = set()

    def renew_within(self, lease_seconds: float) -> None:
        """Renew leases often enough for a new session with this lease: at least three times per `lease_seconds`."""
        if 0 < lease_seconds / 3 < self._renew_seconds:
            self._renew_seconds = lease_seconds / 3
            self._lease_shortened.set()

    async def run(self) -> None:
        """Do the work, forever."""
        loop = asyncio.get_running_loop()
        last_renewal = last_probe = last_resolution = loop.time()
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(min(self._health_seconds, self._renew_seconds / 2)):
                    await self._lease_shortened.wait()
                    self._lease_shortened.clear()
                    continue
            now = loop.time()
            if now - last_renewal >= self._renew_seconds / 2:
                last_renewal = now
                self._renew(now + self._timeout)
            if now - last_probe < self._health_seconds:
                continue
            last_probe = now
            for replica in self._members.replicas:
                if replica.ready:
                    self._spawn_once(replica, self._probe, replica)
            has_lost = any(replica.lost and replica.server_name for replica in self._members.replicas)
            if self._members.has_names and (has_lost or now - last_resolution >= RESOLVE_SECONDS):
                last_resolution = now
                self._spawn_once(self._members, self._resolve)

    def _renew(self, until: float) -> None:
        """Renew the leases of all sessions that the program still references."""
        for replica in self._members.replicas:
            ids = [session.session_id for session in replica.sessions] if replica.ready else []
            if ids:
                call = replica.call(RENEW, pb.RenewRequest(session_ids=ids), until)
                self._members.spawn(ignore_errors(call))

    async def _probe(self, replica: Replica) -> None:
        before = replica.hosts
        await ignore_errors(replica.probe())
        await ignore_errors(replica.closer.close_unclosed(replica.loop.time() + self._timeout))
        if replica.hosts != before:
            self._members.changed(replica.address)

    async def _resolve(self) -> None:
        resolve_error = await self._members.resolve()
        if resolve_error is not None:
            logger.warning("%s", resolve_error)

    def _spawn_once(self, key: object, work: Callable[..., Coroutine[Any, Any, None]], *arguments: Any) -> None:
        """Spawn the work, unless earlier work with the same key still runs."""
        if id(key) in self._running_keys:
            return
        self._running_keys.add(id(key))

        async def run() -> None:
            try:
                await work(*arguments)
            finally:
                self._running_keys.discard(id(key))

        self._members.spawn(run())


async def ignore_errors(call: Coroutine[Any, Any, object]) -> None:
    """Await a call whose failure the next round makes up for."""
    try:
        await call
    except StarpodError as error:
        logger.debug("ignored: %s", error)
