"""A server process: the state that its calls share and the start and end of sessions."""

from __future__ import annotations

import asyncio
import functools
import secrets
import time
from collections.abc import Sequence
from typing import Any

from google.protobuf import struct_pb2

from starpod.env_server.authoring.environment import Busy, Environment, EnvironmentOptions
from starpod.env_server.episodes import convert
from starpod.env_server.episodes.errors import CallError, overloaded
from starpod.env_server.operation.config import ServerLimits
from starpod.env_server.operation.metrics import Metrics
from starpod.env_server.operation.tenants import RECEIVED_SECONDS, LoopShare, Tenant
from starpod.env_server.processes.host_factory import HostFactory
from starpod.env_server.processes.threads import Hung
from starpod.env_server.registry import Registry
from starpod.env_server.sessions.failures import SessionFailures
from starpod.env_server.sessions.requests import LARGE_BYTES, check_options, parse_options
from starpod.env_server.sessions.seal import SnapshotSeal
from starpod.env_server.sessions.session import ServedSession
from starpod.env_server.sessions.table import SessionTable

_RETRY_SECONDS = 0.5


class Worker:
    """The sessions of one event loop. Nothing is locked except single sessions.

    Attributes:
        draining: whether new sessions are refused.
        live_sessions: number of sessions of all tenants, including those being created.
        large_bytes: bytes of large requests received since free memory was last returned to the system.
    """

    def __init__(
        self,
        registry: Registry,
        limits: ServerLimits,
        metrics: Metrics,
        hosts: HostFactory,
        seal: SnapshotSeal | None = None,
    ) -> None:
        self.registry = registry
        self.limits = limits
        self.metrics = metrics
        self.failures = SessionFailures(metrics)
        self.hosts = hosts
        self.seal = seal or SnapshotSeal()
        self.instance_id = secrets.token_hex(8)
        self.draining = False
        self.live_sessions = 0
        self.share = LoopShare()
        self.large_bytes = 0
        self._tasks: set[asyncio.Task[Any]] = set()

    # --- admission -------------------------------------------------------------------------------------------------

    def admit(self, table: SessionTable, count: int) -> None:
        """Reserve `count` sessions before their creation, which may take long. Raises DRAINING or OVERLOADED."""
        if self.draining:
            raise CallError("DRAINING", "this server is going away and takes no new sessions; use another one")
        if self.live_sessions + count > self.limits.max_sessions:
            raise overloaded(
                "max_sessions",
                f"{self.live_sessions} of {self.limits.max_sessions} sessions are in use; "
                "close some, try again later or use another server",
                _RETRY_SECONDS,
            )
        table.tenant.check_sessions(count)
        self.discount(table, -count)

    def discount(self, table: SessionTable, count: int) -> None:
        """Uncount sessions that have ended or whose creation failed."""
        self.live_sessions -= count
        table.tenant.sessions -= count

    def check_in_flight(self) -> None:
        """Raise OVERLOADED if the maximum number of calls is in flight."""
        limit = self.limits.max_calls_in_flight
        if self.metrics.calls_in_flight >= limit:
            raise overloaded("max_calls_in_flight", f"{limit} calls are in progress; try again later", 0.1)

    async def read_options(self, environment: type[Environment], message: struct_pb2.Struct) -> EnvironmentOptions:
        """Return an environment's options. Raises BAD_ARGUMENT."""
        check_options(message, self.limits)
        values = convert.options_from(message)
        if values and environment.spec.slow_reset:
            # Validators may search as long as resets do.
            try:
                return await self.hosts.pools.computing.run(functools.partial(parse_options, environment, values))
            except Hung as hung:
                raise CallError("ENVIRONMENT_BUG", f"checking the options {hung}", {"session": "intact"}) from hung
            except Busy as busy:
                raise overloaded("environment", busy.message, busy.retry_after) from busy
        return parse_options(environment, values)

    def count_received(self, tenant: Tenant, size: int) -> None:
        """Charge a tenant for receiving a large request, which takes the event loop's time before any handler runs."""
        if size > LARGE_BYTES:
            self.large_bytes += size
            tenant.spent += size * RECEIVED_SECONDS

    def keep(self, task: asyncio.Task[Any]) -> None:
        """Keep a call running if its caller goes away, and count it as in flight until it finishes."""
        self._tasks.add(task)
        self.metrics.calls_in_flight += 1
        task.add_done_callback(self._finished)

    def _finished(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        self.metrics.calls_in_flight -= 1

    # --- the end of sessions ---------------------------------------------------------------------------------------

    def drop(self, table: SessionTable, session: ServedSession) -> None:
        """Remove a session from the table, and free its resources after its earlier calls, without waiting for them."""
        if table.pop(session.id, None) is not None:
            self.discount(table, 1)
            self.metrics.count_live(session.environment.spec.id, -1)
            if not session.pending:
                session.close()
                return
            task = asyncio.get_running_loop().create_task(_close_in_turn(session))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    def extend_leases(self, tables: Sequence[SessionTable], seconds: float) -> None:
        """Extend all leases by the seconds for which this process was stalled and no call could renew them."""
        now = time.monotonic()
        for table in tables:
            for session in table.values():
                session.last_call = min(now, session.last_call + seconds)

    def reap(self, tables: Sequence[SessionTable]) -> int:
        """Drop sessions whose lease has expired, and return their number."""
        now = time.monotonic()
        count = 0
        for table in tables:
            for session in table.expired(now):
                self.metrics.count_reaped(session.environment.spec.id)
                self.drop(table, session)
                count += 1
            table.forget_reservations(now)
        return count

    def shut_down(self, tables: Sequence[SessionTable]) -> None:
        """Drop every session and stop the thread pools."""
        for table in tables:
            for session in list(table.values()):
                self.drop(table, session)
        self.hosts.pools.shut_down()


async def _close_in_turn(session: ServedSession) -> None:
    async with session:
        session.close()
