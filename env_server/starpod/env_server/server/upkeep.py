"""Periodic work of a server: expired leases, connections beyond limits, changed tokens, free memory."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence

from starpod.env_server.server import memory
from starpod.env_server.sessions.worker import Worker
from starpod.env_server.transports.auth import Authenticator
from starpod.env_server.transports.connections import Connections, address_of
from starpod.env_server.transports.service import EnvironmentService

logger = logging.getLogger(__name__)

_REAP_SECONDS = 1.0
_TRIM_BYTES = 16 * 2**20
"""Free memory is returned to the system after large requests of this many bytes in total. After fewer bytes, it is
returned once no more large requests arrive."""


class Upkeep:
    """The periodic work of a server. `ports` returns the ports whose connections are counted by address."""

    def __init__(
        self,
        worker: Worker,
        service: EnvironmentService,
        authenticator: Authenticator,
        ports: Callable[[], Sequence[int]],
    ) -> None:
        self._worker = worker
        self._service = service
        self._authenticator = authenticator
        self._ports = ports
        self._connections = Connections()

    async def run(self) -> None:
        """Work until cancelled."""
        last_bytes = 0
        while True:
            start = time.monotonic()
            await asyncio.sleep(_REAP_SECONDS)
            pause = time.monotonic() - start - _REAP_SECONDS
            try:
                self._authenticator.reload()
                if pause > _REAP_SECONDS:
                    logger.warning("this process stood still; leases continue from now", extra={"seconds": pause})
                    self._worker.extend_leases(list(self._service.tables.values()), pause)
                count = self._worker.reap(list(self._service.tables.values()))
                await self._bound_connections()  # last, because it needs descriptors, which may have run out
            except Exception:
                logger.exception("the reaper failed and will try again")
                continue
            if (large_bytes := self._worker.large_bytes) > _TRIM_BYTES or 0 < large_bytes == last_bytes:
                self._worker.large_bytes = large_bytes = 0
                await asyncio.to_thread(memory.give_back)
            last_bytes = large_bytes
            if count:
                logger.info("reaped sessions whose lease ran out", extra={"sessions": count})

    async def _bound_connections(self) -> None:
        limit = self._worker.limits.max_connections_per_address
        if limit:
            kept_addresses = frozenset(map(address_of, self._service.stream_peers))
            if count := await asyncio.to_thread(self._connections.shut_excess, self._ports(), limit, kept_addresses):
                logger.warning("closed connections beyond the limit of an address", extra={"connections": count})
