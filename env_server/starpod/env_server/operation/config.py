"""The configuration of a server."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import click

from starpod.env_server.sandbox.sandbox import UNTRUSTING, Sandbox
from starpod.serving.options import BYTES, SECONDS, Number, duration, show_quantity, size

MEBIBYTE = 2**20


_COUNT = click.IntRange(1)
_SECONDS = duration(0.001)
_PORT = click.IntRange(0, 65535)


def setting(default: Any, type: click.ParamType[Any] | type, help: str, *, option: str = "") -> Any:
    """Return a field of a dataclass that is also an option of `starpod serve`.

    Args:
        default: The field's default.
        type: Type and range of the option's value.
        help: Meaning of the field, which `--help` prints.
        option: Name of the option, if it is not the name of the field.
    """
    units = {"duration": SECONDS, "size": BYTES}.get(getattr(type, "name", ""))
    shown = show_quantity(default, units) if units else default
    return field(default=default, metadata={"type": type, "help": help, "option": option, "shown": shown})


@dataclass(frozen=True, slots=True)
class Quota:
    """Limits of one tenant on one worker. If a limit is 0, only the worker's own limit applies."""

    sessions: int = setting(
        0,
        click.IntRange(0),
        "Maximum sessions of a token; 0: no limit. A line of --token-file may set another value.",
        option="token-sessions",
    )
    calls_per_second: float = setting(
        0.0,
        Number(0),
        "Maximum calls per second of a token, in bursts of up to one second's worth; 0: no limit. A group counts as "
        "one call per session, and each 64 KiB of a request as one more. A line of --token-file may set another value.",
        option="token-calls-per-second",
    )
    streams: int = setting(
        0,
        click.IntRange(0),
        "Maximum streams of a token at a time; 0: no limit. A line of --token-file may set another value.",
        option="token-streams",
    )


UNLIMITED = Quota()


@dataclass(frozen=True, slots=True)
class ServerLimits:
    """Limits of one worker process."""

    max_sessions: int = setting(20_000, _COUNT, "Maximum open sessions. Further ones are refused.")
    max_message_bytes: int = setting(20 * MEBIBYTE, size(1024), "Maximum size of a message, in either direction.")
    max_calls_in_flight: int = setting(
        20_000, _COUNT, "Maximum calls in progress, including those whose caller no longer waits."
    )
    max_snapshot_bytes: int = setting(
        16 * MEBIBYTE,
        size(),
        "Maximum size of a snapshot. An environment that runs in its own process is also limited to 64MiB, and its "
        "forks are snapshots, too.",
    )
    max_processes: int = setting(256, _COUNT, "Maximum sessions of class process, each in its own process.")
    max_containers: int = setting(64, _COUNT, "Maximum sessions of class container, each in its own container.")
    max_group: int = setting(4_096, _COUNT, "Maximum sessions that one Open, Fork or Restore may make.")
    max_step_actions: int = setting(1_024, _COUNT, "Maximum actions of a turn.")
    max_step_bytes: int = setting(4 * MEBIBYTE, size(1024), "Maximum size of a turn's actions.")
    max_options_bytes: int = setting(65_536, size(), "Maximum size of the options of an Open or Reset.")
    max_values: int = setting(8_192, _COUNT, "Maximum values in the options of a session, or in the JSON of a turn.")
    default_lease_seconds: float = setting(
        600.0,
        _SECONDS,
        "Time without a call after which a session expires, unless its Open asked for another lease.",
        option="lease",
    )
    max_lease_seconds: float = setting(
        86_400.0, _SECONDS, "Longest lease that an Open can ask for.", option="max-lease"
    )
    max_connections: int = setting(4_096, _COUNT, "Maximum connections. Further ones are closed.")
    max_connections_per_address: int = setting(
        1_024,
        click.IntRange(0),
        "Maximum connections from one IPv4 address or IPv6 /64, on Linux. Further ones are closed within a second, "
        "those without a stream first. 0: no limit per address.",
    )
    max_health_calls: int = setting(
        1_024,
        _COUNT,
        "Maximum calls of health, reflection and HTTP pages at a time; at most a quarter from one address and 16 over "
        "one connection.",
    )
    max_streams: int = setting(1_024, _COUNT, "Maximum connected streams.")


@dataclass(frozen=True, slots=True)
class ServerTLS:
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
    port: int = setting(50051, _PORT, "Port for gRPC; 0: any free port. Worker i listens on port + i.")
    limits: ServerLimits = ServerLimits()
    endpoints: tuple[str, ...] = ()
    """Addresses, host:port, of all workers including this one; empty if there is only one worker."""
    metrics_port: int = setting(0, _PORT, "Port for Prometheus metrics; 0: none. Worker i listens on port + i.")
    health_port: int = setting(
        0, _PORT, "Second port for grpc.health.v1, without TLS, for probes; 0: none. Worker i listens on port + i."
    )
    drain_seconds: float = setting(
        30.0, duration(), "Time that open sessions may continue after SIGTERM; 0: none.", option="drain"
    )
    keepalive_seconds: float = setting(
        60.0,
        duration(0.1),
        "Time without traffic after which the server pings a client. A client that does not answer within half of it "
        "is disconnected.",
        option="keepalive",
    )
    threads: int = setting(16, _COUNT, "Threads for the steps of environments of class thread.")
    thread_seconds: float = setting(
        600.0,
        _SECONDS,
        "Time after which a step on a thread, or a slow reset, counts as hung. Its session is lost.",
        option="thread-timeout",
    )
    handshake_seconds: float = 20.0
    """Timeout for establishing a connection, including TLS."""
    token_file: Path | None = None
    """File with bearer tokens, one per line. If None, callers need no token."""
    quota: Quota = UNLIMITED
    """Quota of each token for which the file sets none."""
    snapshot_key_file: Path | None = setting(  # noqa: RUF009 - it calls `field`
        None,
        click.Path(path_type=Path),
        "File with keys, one per line. The server signs snapshots with the first key, and restores a snapshot that was "
        "signed with any of them. Give all servers of a fleet the same file. Without it, callers can forge snapshots.",
    )
    sandbox: Sandbox = UNTRUSTING
    """Confinement of processes of class `process`."""
    effects: Path | None = setting(  # noqa: RUF009
        None,
        click.Path(file_okay=False, path_type=Path),
        "Folder for the replies that environments get from judges and other services, so that a replay does not ask "
        "again. All servers of a fleet share it. Without it, the replies are lost with the process, and environments "
        "that ask services are not deterministic.",
    )
    tls: ServerTLS | None = None
    http: HTTP | None = None
    otlp_endpoint: str = setting("", str, "Address (host:port) of a collector of OpenTelemetry spans.")
