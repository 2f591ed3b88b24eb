"""What a server is told at start."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from starpod.env_server.limits import UNLIMITED, Quota
from starpod.env_server.sandbox.sandbox import UNTRUSTING, Sandbox

MEBIBYTE = 2**20


@dataclass(frozen=True, slots=True)
class ServerLimits:
    """Limits of one worker process. Sizes in bytes, times in seconds."""

    max_sessions: int = 20_000
    max_message_bytes: int = 20 * MEBIBYTE
    max_calls_in_flight: int = 20_000
    max_snapshot_bytes: int = 16 * MEBIBYTE
    max_processes: int = 256
    max_group: int = 4_096
    max_step_actions: int = 1_024
    max_step_bytes: int = 4 * MEBIBYTE
    max_options_bytes: int = 65_536
    max_values: int = 8_192
    default_lease_seconds: float = 600.0
    max_lease_seconds: float = 86_400.0
    max_connections: int = 4_096
    max_connections_per_address: int = 1_024
    max_health_calls: int = 1_024
    max_streams: int = 1_024


@dataclass(frozen=True, slots=True)
class TLS:
    """Files for TLS; with `client_ca`, clients must show a certificate that it signed (mTLS)."""

    certificate: Path
    key: Path
    client_ca: Path | None = None


@dataclass(frozen=True, slots=True)
class HTTP:
    """JSON over HTTP on a port of its own (0: any free one).

    endpoints: host:port of all workers' HTTP, this one's included; empty if there is one.
    hosts: names by which callers may reach it, besides localhost and addresses.
    mcp: serves MCP at /mcp, too. ors: serves the Open Reward Standard, whose paths stand at the root.
    """

    port: int
    endpoints: tuple[str, ...] = ()
    hosts: tuple[str, ...] = ()
    mcp: bool = False
    ors: bool = False


@dataclass(frozen=True, slots=True)
class ServerConfig:
    """One worker process.

    endpoints: host:port of all workers of this server, this one included; empty if there is one.
    drain_seconds: how long live sessions may go on after SIGTERM.
    keepalive_seconds: a connection without traffic is probed this often; no answer for half as long ends it.
    handshake_seconds: how long a connection may take to become one, TLS included.
    quota: what a token of the file may take that says nothing else there.
    snapshot_key_file: seals snapshots, one key per line, the same for all servers of a fleet.
    sandbox: what processes of class `process` give up.
    effects: folder in which the replies of environments' calls are recorded, the same for all servers of a fleet; None:
        they go with the process, and environments that call out are not deterministic.
    thread_seconds: how long a call may take on one of them before it counts as hung.
    threads: size of the pool for steps of class `thread` and for slow resets.
    metrics_port: 0 serves no metrics. health_port: answers grpc.health.v1 there too, without TLS; 0: nowhere else.
    """

    host: str = "127.0.0.1"
    port: int = 50051
    limits: ServerLimits = ServerLimits()
    endpoints: tuple[str, ...] = ()
    drain_seconds: float = 30.0
    keepalive_seconds: float = 60.0
    threads: int = 16
    thread_seconds: float = 600.0
    metrics_port: int = 0
    health_port: int = 0
    handshake_seconds: float = 20.0
    token_file: Path | None = None
    quota: Quota = UNLIMITED
    snapshot_key_file: Path | None = None
    sandbox: Sandbox = UNTRUSTING
    effects: Path | None = None
    tls: TLS | None = None
    http: HTTP | None = None
    otlp_endpoint: str = ""
