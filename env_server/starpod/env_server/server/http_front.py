"""The HTTP side of a server: JSON, MCP and the Open Reward Standard on one port. Its packages are extras."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from starpod.env_server.operation.config import HTTP, ServerConfig
from starpod.env_server.server.listening import ServerError
from starpod.env_server.sessions.worker import Worker
from starpod.env_server.transports.admission import CallsInFlight, OpenAdmission
from starpod.env_server.transports.service import EnvironmentService

if TYPE_CHECKING:
    from starpod.env_server.transports.exchange import HTTPProtocol
    from starpod.env_server.transports.http.server import HTTPServer
    from starpod.env_server.transports.mcp.service import MCPService


class HTTPFront:
    """The HTTP server of a worker and the protocols that it carries."""

    def __init__(
        self, service: EnvironmentService, worker: Worker, open_calls: CallsInFlight, open_admission: OpenAdmission
    ) -> None:
        self._service = service
        self._worker = worker
        self._open_calls = open_calls
        self._open_admission = open_admission
        self._server: HTTPServer | None = None
        self._mcp: asyncio.Task[None] | None = None

    @property
    def port(self) -> int:
        """The port that it listens on; 0 before the start."""
        return self._server.port if self._server else 0

    async def start(self, config: ServerConfig, http: HTTP) -> None:
        """Start to listen and serve. Raises ServerError."""
        try:
            from starpod.env_server.transports.http.server import HTTPServer
            from starpod.env_server.transports.http.service import HTTPService
            from starpod.env_server.transports.ors import ORSService
        except ImportError as error:
            hint = "from a clone of the repository: pip install '.[http]'"
            raise ServerError(f"--http needs its extra; {hint}") from error
        protocols: list[HTTPProtocol] = [await self._start_mcp()] if http.mcp else []
        if http.ors:
            protocols.append(ORSService(self._service, self._worker))
        service = HTTPService(
            self._service,
            self._worker,
            self._open_calls,
            self._open_admission,
            hosts=(config.host, *http.hosts),
            endpoints=http.endpoints,
            protocols=protocols,
        )
        try:
            self._server = HTTPServer(service, config, http.port, self._count_hang_ups)
        except OSError as error:
            raise ServerError(f"cannot listen for HTTP on port {http.port}: {error}") from error
        await self._server.start()

    def _count_hang_ups(self, requests: int) -> None:
        self._worker.metrics.hang_ups["http"] += requests

    async def _start_mcp(self) -> MCPService:
        try:
            from starpod.env_server.transports.mcp.service import MCPService
        except ImportError as error:
            hint = "from a clone of the repository: pip install '.[mcp]'"
            raise ServerError(f"--mcp needs its extra; {hint}") from error
        service, ready = MCPService(self._service, self._worker), asyncio.Event()
        self._mcp = asyncio.create_task(service.run(ready))
        waiting = asyncio.create_task(ready.wait())
        await asyncio.wait((waiting, self._mcp), return_when=asyncio.FIRST_COMPLETED)
        if self._mcp.done():
            waiting.cancel()
            raise ServerError(f"MCP did not start: {self._mcp.exception() or 'its service ended'}")
        return service

    async def stop(self) -> None:
        """Close every connection, and end what it carries."""
        if self._server:
            await self._server.stop()
        if self._mcp:
            self._mcp.cancel()
            await asyncio.wait([self._mcp])
