"""The gRPC side of a server: the contract, health and reflection on one port, and health on another one."""

from __future__ import annotations

from collections.abc import Iterable

import grpc
from grpc_health.v1 import health, health_pb2
from grpc_reflection.v1alpha import reflection, reflection_pb2

from starpod.env_server.operation.config import ServerConfig
from starpod.env_server.server.listening import ServerError, connection_options, credentials, join_address
from starpod.env_server.transports.admission import ContractAdmission, OpenAdmission
from starpod.v1 import environment_pb2 as pb

SERVICE_NAME = pb.DESCRIPTOR.services_by_name["EnvironmentService"].full_name
_SHORT_LIVED_CALLS = 1_000
"""Number of concurrent calls that gRPC accepts beyond the calls with their own limits, so that excess calls can be
refused with a reason."""
_CALLS_PER_CONNECTION = 2_048


class GRPCFront:
    """The gRPC servers of a worker. `max_calls` is the number of calls that are open before others are refused."""

    def __init__(
        self, contract: ContractAdmission, open_admission: OpenAdmission, config: ServerConfig, max_calls: int
    ) -> None:
        self.port = config.port
        self._config = config
        self._max_calls = max_calls
        self._handlers = contract, open_admission
        self._health = health.aio.HealthServicer()
        services = (SERVICE_NAME, health.SERVICE_NAME, reflection.SERVICE_NAME)
        open_admission.add(health_pb2.DESCRIPTOR, self._health)
        open_admission.add(reflection_pb2.DESCRIPTOR, reflection.aio.ReflectionServicer(services))
        self._servers: list[grpc.aio.Server] = []

    def listen(self) -> None:
        """Bind the port. Connections are accepted from `start` on. Raises ServerError."""
        limits = self._config.limits
        limit = limits.max_message_bytes or -1
        server = grpc.aio.server(
            options=[
                ("grpc.max_receive_message_length", limit),
                ("grpc.max_send_message_length", limit),
                # Otherwise two servers on one port would silently share its connections.
                ("grpc.so_reuseport", 0),
                # A client whose host or network is down sends nothing, and its streams would stay forever.
                ("grpc.keepalive_time_ms", int(self._config.keepalive_seconds * 1000)),
                ("grpc.keepalive_timeout_ms", int(self._config.keepalive_seconds * 500)),
                ("grpc.http2.ping_timeout_ms", int(self._config.keepalive_seconds * 500)),
                ("grpc.http2.max_pings_without_data", 0),
                # Clients may ping through long model turns.
                ("grpc.http2.min_ping_interval_without_data_ms", 5_000),
                ("grpc.keepalive_permit_without_calls", 1),
                # Our own limit on calls in flight answers with RetryInfo; gRPC's cancels random calls.
                ("grpc.server.max_pending_requests", 2**31 - 1),
                ("grpc.server.max_pending_requests_hard_limit", 2**31 - 1),
                *connection_options(self._config),
                # Further calls of a client wait in the client.
                ("grpc.max_concurrent_streams", _CALLS_PER_CONNECTION),
            ],
            # Only floods reach this limit, because calls have lower limits of their own, which give a reason.
            maximum_concurrent_rpcs=self._max_calls + 2 * limits.max_health_calls + _SHORT_LIVED_CALLS,
        )
        server.add_generic_rpc_handlers(self._handlers)
        address = join_address(self._config.host, self.port)
        tls = credentials(self._config.tls) if self._config.tls else None
        try:
            self.port = server.add_secure_port(address, tls) if tls else server.add_insecure_port(address)
        except RuntimeError as error:
            raise ServerError(f"cannot listen on {address}: {error}") from error
        self._servers.append(server)

    async def start(self) -> None:
        """Serve. Raises ServerError if the port for health cannot be used."""
        await self._servers[0].start()
        if port := self._config.health_port:
            server = grpc.aio.server(options=[("grpc.so_reuseport", 0), *connection_options(self._config)])
            server.add_generic_rpc_handlers(self._handlers[1:])
            try:
                server.add_insecure_port(join_address(self._config.host, port))
            except RuntimeError as error:
                raise ServerError(f"cannot answer for health on port {port}: {error}") from error
            await server.start()
            self._servers.append(server)

    async def stop(self, grace: float) -> None:
        """Close idle connections at once, and others after `grace` seconds. Health is answered until then."""
        for server, seconds in zip(self._servers, (grace, None), strict=False):
            await server.stop(seconds)

    async def set_health(self, environments: Iterable[str], status: int) -> None:
        """Set the health of the server, of the contract and of the environments."""
        for service in ("", SERVICE_NAME, *environments):
            await self._health.set(service, status)
