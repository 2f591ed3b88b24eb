"""The configuration of a server."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from starpod.env_server.limits import UNLIMITED, Quota
from starpod.env_server.sandbox.sandbox import UNTRUSTING, Sandbox

MEBIBYTE = 2**20


@dataclass(frozen=True, slots=True)
class ServerLimits:
    """Limits of one worker process. Sizes are in bytes, times in seconds."""

    max_sessions: int = 20_000
    """Maximum number of live sessions of all tenants."""
    max_message_bytes: int = 20 * MEBIBYTE
    """Maximum size of a message in either direction; 0 means no limit."""
    max_calls_in_flight: int = 20_000
    """Maximum number of calls that are being executed."""
    max_snapshot_bytes: int = 16 * MEBIBYTE
    """Maximum size of a sealed state."""
    max_processes: int = 256
    """Maximum number of processes for environments of class `process`."""
    max_group: int = 4_096
    """Maximum number of sessions that one Open, Fork or Restore may create."""
    max_step_actions: int = 1_024
    """Maximum number of sub-actions in one Step."""
    max_step_bytes: int = 4 * MEBIBYTE
    """Maximum size of one Step's actions."""
    max_options_bytes: int = 65_536
    """Maximum size of the options in one request."""
    max_values: int = 8_192
    """Maximum number of JSON values in the options or actions of one request."""
    default_lease_seconds: float = 600.0
    """Lease of a session whose caller asks for none."""
    max_lease_seconds: float = 86_400.0
    """Longest lease that is granted."""
    max_connections: int = 4_096
    """Maximum number of connections to a port."""
    max_connections_per_address: int = 1_024
    """Maximum number of connections from one address to a port; 0 means no limit."""
    max_health_calls: int = 1_024
    """Maximum number of open calls that need no token."""
    max_streams: int = 1_024
    """Maximum number of connected streams of all tenants."""


@dataclass(frozen=True, slots=True)
class TLS:
    """Files for TLS. If `client_ca` is set, clients must present a certificate that it signed (mTLS)."""

    certificate: Path
    """PEM certificate chain."""
    key: Path
    """PEM private key, without a password."""
    client_ca: Path | None = None
    """PEM certificate of the CA that signs clients' certificates."""


@dataclass(frozen=True, slots=True)
class HTTP:
    """Configuration of JSON over HTTP."""

    port: int
    """Port for HTTP, which differs from gRPC's port; 0 means any free port."""
    endpoints: tuple[str, ...] = ()
    """HTTP addresses, host:port, of all workers including this one; empty if there is only one worker."""
    hosts: tuple[str, ...] = ()
    """Host names by which callers may reach the server, besides localhost and IP addresses."""
    mcp: bool = False
    """Whether MCP is served at /mcp."""
    ors: bool = False
    """Whether the Open Reward Standard is served. Its paths begin at the root."""


@dataclass(frozen=True, slots=True)
class ServerConfig:
    """Configuration of one worker process."""

    host: str = "127.0.0.1"
    port: int = 50051
    limits: ServerLimits = ServerLimits()
    endpoints: tuple[str, ...] = ()
    """Addresses, host:port, of all workers including this one; empty if there is only one worker."""
    drain_seconds: float = 30.0
    """Seconds for which live sessions may continue after SIGTERM."""
    keepalive_seconds: float = 60.0
    """Seconds without traffic after which a connection is probed. It is closed if no answer comes within half that
    time."""
    threads: int = 16
    """Number of threads for steps of class `thread` and for slow resets."""
    thread_seconds: float = 600.0
    """Seconds after which a call on a thread counts as hung."""
    metrics_port: int = 0
    """Port for Prometheus metrics; 0 means none."""
    health_port: int = 0
    """Additional port for grpc.health.v1, without TLS; 0 means none."""
    handshake_seconds: float = 20.0
    """Timeout for establishing a connection, including TLS."""
    token_file: Path | None = None
    """File with bearer tokens, one per line. If None, callers need no token."""
    quota: Quota = UNLIMITED
    """Quota of each token for which the file sets none."""
    snapshot_key_file: Path | None = None
    """File with keys that seal snapshots, one per line. All servers of a fleet need the same file."""
    sandbox: Sandbox = UNTRUSTING
    """Confinement of processes of class `process`."""
    effects: Path | None = None
    """Folder in which replies to environments' external calls are recorded, shared by all servers of a fleet.
    If None, the replies are lost with the process, and such environments are not deterministic."""
    tls: TLS | None = None
    http: HTTP | None = None
    otlp_endpoint: str = ""
    """Address, host:port, of the collector for OpenTelemetry spans; empty means no tracing."""
