"""One worker process: a gRPC server and its parts, from start to drain."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterator

from grpc_health.v1 import health_pb2

from starpod.env_server.authoring.environment import Concurrency
from starpod.env_server.episodes.effects import Journal
from starpod.env_server.operation.config import UNLIMITED, ServerConfig
from starpod.env_server.operation.metrics import Metrics
from starpod.env_server.operation.tracing import OpenTelemetryTracer, Tracer
from starpod.env_server.processes.child_process import ChildProcess
from starpod.env_server.processes.host_factory import HostFactory
from starpod.env_server.processes.hosts import HostDied
from starpod.env_server.registry import Registry
from starpod.env_server.server.grpc_front import GRPCFront
from starpod.env_server.server.http_front import HTTPFront
from starpod.env_server.server.listening import (
    ServerError,
    allow_descriptors,
    check_port,
    join_address,
)
from starpod.env_server.server.upkeep import Upkeep
from starpod.env_server.sessions.calls import Calls
from starpod.env_server.sessions.seal import SnapshotSeal
from starpod.env_server.sessions.worker import Worker
from starpod.env_server.transports.admission import CallsInFlight, ContractAdmission, OpenAdmission
from starpod.env_server.transports.auth import Authenticator
from starpod.env_server.transports.service import EnvironmentService
from starpod.serving.sockets import is_loopback

logger = logging.getLogger(__name__)

_OTHER_DESCRIPTORS = 1_024


class EnvironmentServer:
    """Server of a registry's environments on one port. Use `await start()`, `await drain()` and `await stop()`."""

    def __init__(self, registry: Registry, config: ServerConfig) -> None:
        self.config = config
        self.metrics = Metrics()
        for environment in registry.ids:
            self.metrics.host(environment)
        seal = SnapshotSeal(config.snapshot_key_file)
        try:
            journal = Journal(config.effects)
        except OSError as error:
            raise ServerError(f"cannot record effects in {config.effects}: {error.strerror}") from error
        self.metrics.effects = journal.counts
        hosts = HostFactory(config.limits, config.threads, config.thread_seconds, config.sandbox, journal)
        self.worker = Worker(registry, config.limits, self.metrics, hosts, seal)
        self.calls = Calls(self.worker)
        if config.token_file and not config.snapshot_key_file:
            logger.warning("snapshots are not sealed: anyone with a token can forge one; see --snapshot-key-file")
        if config.token_file and not config.tls and not is_loopback(config.host):
            logger.warning(
                "tokens are sent unencrypted: %s is not a loopback address and TLS is off; see --tls-certificate",
                config.host,
            )
        self._authenticator = Authenticator(config.token_file, config.quota if config.token_file else UNLIMITED)
        self._tracer: Tracer = OpenTelemetryTracer(config.otlp_endpoint) if config.otlp_endpoint else Tracer()
        self._service = EnvironmentService(self.calls, self._authenticator, self._tracer, config.endpoints)
        self.metrics.tenants = self._authenticator
        max_calls = config.limits.max_calls_in_flight + config.limits.max_streams
        open_calls = CallsInFlight(self._authenticator, self.worker.share, max_calls)
        contract = ContractAdmission(self._service.handlers(), open_calls, self.metrics, self.worker.share)
        open_admission = OpenAdmission(config.limits.max_health_calls)
        self._grpc = GRPCFront(contract, open_admission, config, max_calls)
        self._http = HTTPFront(self._service, self.worker, open_calls, open_admission)
        self._upkeep: asyncio.Task[None] | None = None
        self._stop_metrics: Callable[[], None] | None = None

    @property
    def port(self) -> int:
        """The port of gRPC."""
        return self._grpc.port

    @property
    def address(self) -> str:
        """The address for clients, host:port."""
        return join_address(self.config.host, self.port)

    @property
    def http_address(self) -> str:
        """The URL for HTTP; empty if HTTP is not served."""
        scheme = "https" if self.config.tls else "http"
        return f"{scheme}://{join_address(self.config.host, self._http.port)}" if self._http.port else ""

    async def start(self) -> None:
        """Start to listen and serve. Raises ServerError."""
        limits = self.config.limits
        allow_descriptors(limits.max_connections + limits.max_processes + _OTHER_DESCRIPTORS)
        for option, port in self._ports():
            check_port(self.config.host, port, option)
        self._grpc.listen()
        if self.config.metrics_port:
            try:
                self._stop_metrics = self.metrics.serve(self.config.host, self.config.metrics_port)
            except OSError as error:
                raise ServerError(f"cannot serve metrics on port {self.config.metrics_port}: {error}") from error
        await self._try_sandbox()
        await self._grpc.start()
        if self.config.http:
            await self._http.start(self.config, self.config.http)
        upkeep = Upkeep(self.worker, self._service, self._authenticator, self._counted_ports)
        self._upkeep = asyncio.create_task(upkeep.run())
        await self._grpc.set_health(self.worker.registry.ids, health_pb2.HealthCheckResponse.SERVING)

    def _ports(self) -> Iterator[tuple[str, int]]:
        """Yield the option and port of each port to listen on."""
        yield "port", self.port
        http_port = self.config.http.port if self.config.http else 0
        for option, port in (
            ("metrics-port", self.config.metrics_port),
            ("health-port", self.config.health_port),
            ("http", http_port),
        ):
            if port:
                yield option, port

    def _counted_ports(self) -> list[int]:
        """Return the ports whose connections are counted by address."""
        return [port for port in (self.port, self.config.health_port, self._http.port) if port]

    async def _try_sandbox(self) -> None:
        """Start a process of each class, so that missing confinement is known now, and Describe reports it."""
        mode = self.config.sandbox.mode
        environments = [cls for cls in self.worker.registry if cls.spec.concurrency is Concurrency.PROCESS]
        if mode == "off" and environments:
            logger.warning("sandbox: off; environments of class process have all rights of this server")
        for environment in environments if mode != "off" else ():
            try:
                await ChildProcess(environment, self.config.sandbox).try_out()
            except HostDied as death:
                if mode == "require":
                    raise ServerError(f"a process of {environment.spec.id} {death}") from death
                logger.warning("a process of %s %s", environment.spec.id, death)

    async def drain(self) -> None:
        """Refuse new sessions and wait until the live ones are closed, for at most `drain_seconds`."""
        self.worker.draining = True
        await self._grpc.set_health(self.worker.registry.ids, health_pb2.HealthCheckResponse.NOT_SERVING)
        deadline = time.monotonic() + self.config.drain_seconds
        while (count := self._usable_sessions()) and time.monotonic() < deadline:
            await asyncio.sleep(0.05)
        if count:
            # Their clients notice the closed connection, open new sessions elsewhere and replay.
            logger.warning("handing back live sessions", extra={"sessions": count})

    def _usable_sessions(self) -> int:
        """Return the number of live sessions that are not lost. Lost ones count until they are closed or expire."""
        sessions = (session for table in self._service.tables.values() for session in table.values())
        return self.worker.live_sessions - sum(bool(session.lost) for session in sessions)

    async def stop(self, grace: float = 1.0) -> None:
        """Close every connection and session."""
        if self._upkeep:
            self._upkeep.cancel()
        await asyncio.gather(self._http.stop(), self._grpc.stop(grace))
        self.worker.shut_down(list(self._service.tables.values()))
        if self._stop_metrics:
            self._stop_metrics()
        self._tracer.close()
