"""The configuration of a server."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import click

from starpod.env_server.sandbox.sandbox import UNTRUSTING, Sandbox

MEBIBYTE = 2**20


_COUNT = click.IntRange(1)
_SECONDS = click.FloatRange(0, min_open=True)
_PORT = click.IntRange(0, 65535)


def setting(default: Any, type: click.ParamType[Any] | type, help: str, *, option: str = "") -> Any:
    """Return a field of a dataclass that is also an option of `starpod serve`.

    Args:
        default: The field's default.
        type: Type and range of the option's value.
        help: Meaning of the field, which `--help` prints.
        option: Name of the option, if it is not the name of the field.
    """
    return field(default=default, metadata={"type": type, "help": help, "option": option})


@dataclass(frozen=True, slots=True)
class Quota:
    """Limits of one tenant on one worker. If a limit is 0, only the worker's own limit applies."""

    sessions: int = setting(
        0,
        click.IntRange(0),
        "Sessions of a token whose line in --token-file sets no limit; 0: no limit.",
        option="token-sessions",
    )
    calls_per_second: float = setting(
        0.0,
        click.FloatRange(0),
        "Calls per second of a token whose line in --token-file sets no limit, unary and on streams, in bursts of up "
        "to one second's worth; 0: no limit. A row of columns counts as a call, a group as one call per session, and "
        "each 64 KiB of a request as one more.",
        option="token-calls-per-second",
    )
    streams: int = setting(
        0,
        click.IntRange(0),
        "Connected streams of a token whose line in --token-file sets no limit; 0: no limit.",
        option="token-streams",
    )


UNLIMITED = Quota()


@dataclass(frozen=True, slots=True)
class ServerLimits:
    """Limits of one worker process."""

    max_sessions: int = setting(
        20_000, _COUNT, "Sessions per worker, open or being opened. The limits below are per worker, too."
    )
    max_message_bytes: int = setting(20 * MEBIBYTE, click.IntRange(1024), "Bytes of a message in either direction.")
    max_calls_in_flight: int = setting(20_000, _COUNT, "Calls in progress, including those whose caller gave up.")
    max_snapshot_bytes: int = setting(
        16 * MEBIBYTE, _COUNT, "Bytes of a snapshot; in class process at most 64 MiB, for forks too."
    )
    max_processes: int = setting(256, _COUNT, "Sessions of class process. Each has its own process.")
    max_group: int = setting(4_096, _COUNT, "Sessions made by one Open, Fork or Restore.")
    max_step_actions: int = setting(1_024, _COUNT, "Sub-actions of a turn.")
    max_step_bytes: int = setting(4 * MEBIBYTE, click.IntRange(1024), "Bytes of a turn's sub-actions.")
    max_options_bytes: int = setting(65_536, _COUNT, "Bytes of the options of an Open or Reset.")
    max_values: int = setting(8_192, _COUNT, "Values in the options, and in the JSON of a turn.")
    default_lease_seconds: float = setting(
        600.0,
        _SECONDS,
        "Seconds without a call before a session expires, unless Open sets another lease.",
        option="lease",
    )
    max_lease_seconds: float = setting(
        86_400.0, _SECONDS, "Longest lease, in seconds, that Open can request.", option="max-lease"
    )
    max_connections: int = setting(4_096, _COUNT, "Connections; further ones are closed.")
    max_connections_per_address: int = setting(
        1_024,
        click.IntRange(0),
        "Connections from one IPv4 address or IPv6 /64, on Linux. Further ones are closed within a second, those "
        "without a stream first; 0: only --max-connections holds.",
    )
    max_health_calls: int = setting(
        1_024,
        _COUNT,
        "Concurrent calls of health, reflection and HTTP pages; at most a quarter from one address and 16 over one "
        "connection.",
    )
    max_streams: int = setting(1_024, _COUNT, "Streams connected.")


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
    port: int = setting(50051, _PORT, "0: any free port.")
    limits: ServerLimits = ServerLimits()
    endpoints: tuple[str, ...] = ()
    """Addresses, host:port, of all workers including this one; empty if there is only one worker."""
    metrics_port: int = setting(0, _PORT, "Serve Prometheus metrics here (worker i on port + i); 0: not at all.")
    health_port: int = setting(
        0,
        _PORT,
        "Answer grpc.health.v1 here too, for probes without TLS (worker i on port + i); 0: not at all.",
    )
    drain_seconds: float = setting(
        30.0, click.FloatRange(0), "Seconds that live sessions may continue after SIGTERM.", option="drain"
    )
    keepalive_seconds: float = setting(
        60.0,
        click.FloatRange(0.1),
        "Seconds without traffic after which a client is pinged; without an answer for half as long, it counts as "
        "gone.",
        option="keepalive",
    )
    threads: int = setting(16, _COUNT, "Threads for steps of class thread.")
    thread_seconds: float = setting(
        600.0,
        _SECONDS,
        "Seconds after which a step of class thread or a slow reset counts as hung: its session is lost.",
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
        "Seal snapshots with the first key of this file (one per line); all keys open them. All servers of a fleet "
        "need the same file.",
    )
    sandbox: Sandbox = UNTRUSTING
    """Confinement of processes of class `process`."""
    effects: Path | None = setting(  # noqa: RUF009
        None,
        click.Path(file_okay=False, path_type=Path),
        "Record in this folder what judges and the like reply to environments, so that replays do not ask again. All "
        "servers of a fleet share it. By default, the replies are lost with the process, and such environments are not "
        "deterministic.",
    )
    tls: ServerTLS | None = None
    http: HTTP | None = None
    otlp_endpoint: str = setting("", str, "Send OpenTelemetry spans to this collector, host:port.")
