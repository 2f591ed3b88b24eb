"""The options of `starpod serve`, grouped by purpose. Each group is converted to fields of ServerConfig."""

from __future__ import annotations

import ipaddress
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Literal

import click

from starpod.env_server.config import HTTP, TLS, ServerLimits
from starpod.env_server.limits import Quota
from starpod.env_server.sandbox.sandbox import MEBIBYTE, MODES, UNTRUSTING, Sandbox
from starpod.env_server.sessions.requests import OTHER_BYTES

Fields = dict[str, Any]


def _option(*names: str, **settings: Any) -> click.Option:
    return click.Option(names, **settings)


@dataclass(frozen=True, slots=True)
class Group:
    """Options that configure one thing.

    `build` takes their values, checks their combination and returns fields of ServerConfig. It raises UsageError.
    """

    options: Sequence[click.Option]
    build: Callable[..., Fields]


def read_options(values: Fields) -> Fields:
    """Convert the values of all options to fields of ServerConfig and the field `stores`. Raises UsageError."""
    result = dict(values)
    for group in GROUPS:
        result |= group.build(**{str(option.name): result.pop(str(option.name)) for option in group.options})
    return result


# --- what is served, and where -----------------------------------------------------------------------------------


def _hosting(host: str, stores: tuple[str, ...], modules: tuple[str, ...]) -> Fields:
    if modules:
        raise click.UsageError(f"--environment-module is gone: write starpod serve {modules[0]}")
    if ":" in host and not _is_ipv6(host):
        address, _, port = host.rpartition(":")
        advice = f"--host {address} --port {port}" if port.isdecimal() else f"starpod serve {host}, without --host"
        raise click.UsageError(f"--host {host!r} is not an address to listen on: write {advice}")
    return {"host": host, "stores": stores}


def _is_ipv6(address: str) -> bool:
    try:
        return ipaddress.ip_address(address).version == 6
    except ValueError:
        return False


_HOSTING = (
    _option("--host", default="127.0.0.1", show_default=True, help="Address to listen on; 0.0.0.0 for all."),
    _option("--environment-module", "modules", multiple=True, hidden=True),
    _option(
        "--store",
        "stores",
        multiple=True,
        metavar="NAME=PATH",
        help="Data for environments that use stores, e.g. a shop that `starpod webshop build` built. Repeatable; the "
        "first is the default.",
    ),
)
_PLAIN = (
    _option("--port", default=50051, show_default=True, type=click.IntRange(0, 65535), help="0: any free port."),
    _option(
        "--metrics-port",
        default=0,
        show_default=True,
        type=click.IntRange(0, 65535),
        help="Serve Prometheus metrics here (worker i on port + i); 0: not at all.",
    ),
    _option(
        "--health-port",
        default=0,
        show_default=True,
        type=click.IntRange(0, 65535),
        help="Answer grpc.health.v1 here too, for probes without TLS (worker i on port + i); 0: not at all.",
    ),
    _option(
        "--drain",
        "drain_seconds",
        default=30.0,
        show_default=True,
        type=click.FloatRange(0),
        help="Seconds that live sessions may continue after SIGTERM.",
    ),
    _option(
        "--keepalive",
        "keepalive_seconds",
        default=60.0,
        show_default=True,
        type=click.FloatRange(0.1),
        help="Seconds without traffic after which a client is pinged; without an answer for half as long, it counts "
        "as gone.",
    ),
    _option(
        "--threads", default=16, show_default=True, type=click.IntRange(1), help="Threads for steps of class thread."
    ),
    _option(
        "--thread-timeout",
        "thread_seconds",
        default=600.0,
        show_default=True,
        type=click.FloatRange(0, min_open=True),
        help="Seconds after which a step of class thread or a slow reset counts as hung: its session is lost.",
    ),
    _option(
        "--snapshot-key-file",
        type=click.Path(path_type=Path),
        help="Seal snapshots with the first key of this file (one per line); all keys open them. All servers of a "
        "fleet need the same file.",
    ),
    _option(
        "--effects",
        type=click.Path(file_okay=False, path_type=Path),
        help="Record in this folder what judges and the like reply to environments, so that replays do not ask "
        "again. All servers of a fleet share it.",
    ),
    _option("--otlp-endpoint", default="", help="Send OpenTelemetry spans to this collector, host:port."),
)
"""Options that map directly to fields of ServerConfig."""


# --- HTTP --------------------------------------------------------------------------------------------------------


def _http(
    http_port: int | None,
    http_hosts: tuple[str, ...],
    mcp: bool,
    ors_server: bool,
    endpoints: str,
    http_endpoints: str,
) -> Fields:
    if (http_hosts or mcp or ors_server) and http_port is None:
        raise click.UsageError("--http-host, --mcp and --ors-server need --http PORT")
    http = None
    if http_port is not None:
        http = HTTP(http_port, _addresses(http_endpoints), http_hosts, mcp, ors_server)
    return {"http": http, "endpoints": _addresses(endpoints)}


def _addresses(text: str) -> tuple[str, ...]:
    return tuple(filter(None, text.split(",")))


_HTTP = (
    _option(
        "--http",
        "http_port",
        metavar="PORT",
        type=click.IntRange(0, 65535),
        help="Serve the same as JSON over HTTP here (worker i on port + i); 0: any free port.",
    ),
    _option(
        "--http-host",
        "http_hosts",
        multiple=True,
        metavar="NAME",
        help="A name by which callers reach HTTP, besides localhost and addresses: other Host headers are refused. "
        "Repeatable.",
    ),
    _option("--mcp", is_flag=True, help="Serve MCP, too: at /mcp/ENVIRONMENT/NAME of HTTP's address."),
    _option(
        "--ors-server",
        is_flag=True,
        help="Serve the Open Reward Standard, too, at HTTP's address: tasks are seeds, turns are calls of tools.",
    ),
    _option("--endpoints", default="", hidden=True, help="Set by the supervisor: addresses of all workers."),
    _option("--http-endpoints", default="", hidden=True, help="Set by the supervisor: HTTP addresses of all workers."),
)


# --- limits ------------------------------------------------------------------------------------------------------


_LIMIT_HELP = {
    "max_sessions": "Sessions per worker, open or being opened. The limits below are per worker, too.",
    "max_message_bytes": "Bytes of a message in either direction.",
    "max_calls_in_flight": "Calls in progress, including those whose caller gave up.",
    "max_snapshot_bytes": "Bytes of a snapshot; in class process at most 64 MiB, for forks too.",
    "max_processes": "Sessions of class process. Each has its own process.",
    "max_group": "Sessions made by one Open, Fork or Restore.",
    "max_step_actions": "Sub-actions of a turn.",
    "max_step_bytes": "Bytes of a turn's sub-actions.",
    "max_options_bytes": "Bytes of the options of an Open or Reset.",
    "max_values": "Values in the options, and in the JSON of a turn.",
    "max_connections": "Connections; further ones are closed.",
    "max_streams": "Streams connected.",
    "default_lease_seconds": "Seconds without a call before a session expires, unless Open sets another lease.",
    "max_lease_seconds": "Longest lease, in seconds, that Open can request.",
    "max_connections_per_address": "Connections from one IPv4 address or IPv6 /64, on Linux. Further ones are "
    "closed within a second, those without a stream first; 0: only --max-connections holds.",
    "max_health_calls": "Concurrent calls of health, reflection and HTTP pages; at most a quarter from one address "
    "and 16 over one connection.",
}
_LEAST = {"max_message_bytes": 1024, "max_step_bytes": 1024, "max_connections_per_address": 0}


def _limits(**values: Any) -> Fields:
    limits = ServerLimits(**values)
    if limits.max_lease_seconds < limits.default_lease_seconds:
        raise click.UsageError("--lease is longer than --max-lease")
    for name in ("max_snapshot_bytes", "max_step_bytes"):
        size, default = getattr(limits, name), getattr(ServerLimits(), name)
        if size > default and (bound := size + OTHER_BYTES) > limits.max_message_bytes:
            option = "--" + name.replace("_", "-")
            raise click.UsageError(f"{option} {size} does not fit into a message: raise --max-message-bytes to {bound}")
    return {"limits": limits}


_LIMITS = tuple(
    _option(
        "--" + limit.name.removesuffix("_seconds").removeprefix("default_").replace("_", "-"),
        limit.name,
        default=limit.default,
        show_default=True,
        type=click.FloatRange(0, min_open=True)
        if limit.name.endswith("_seconds")
        else click.IntRange(_LEAST.get(limit.name, 1)),
        help=_LIMIT_HELP[limit.name],
    )
    for limit in fields(ServerLimits)
)


# --- who may call, and what processes may do -----------------------------------------------------------------------


def _tokens(token_file: Path | None, token_sessions: int, token_calls_per_second: float, token_streams: int) -> Fields:
    if (token_sessions or token_calls_per_second or token_streams) and not token_file:
        raise click.UsageError("--token-sessions, --token-calls-per-second and --token-streams need --token-file")
    return {"token_file": token_file, "quota": Quota(token_sessions, token_calls_per_second, token_streams)}


_TOKENS = (
    _option(
        "--token-file",
        type=click.Path(path_type=Path),
        help="Bearer tokens, one per line, optionally with limits. The file is read again when it changes.",
    ),
    _option(
        "--token-sessions",
        default=0,
        show_default=True,
        type=click.IntRange(0),
        help="Sessions of a token whose line sets no limit; 0: no limit. The next two options are alike.",
    ),
    _option(
        "--token-calls-per-second",
        default=0.0,
        show_default=True,
        type=click.FloatRange(0),
        help="A group counts as one call per session, and each 64 KiB of a request as one more.",
    ),
    _option("--token-streams", default=0, show_default=True, type=click.IntRange(0), help="Streams connected."),
)


def _tls(tls_certificate: Path | None, tls_key: Path | None, tls_client_ca: Path | None) -> Fields:
    if bool(tls_certificate) != bool(tls_key) or (tls_client_ca and not tls_certificate):
        raise click.UsageError("--tls-certificate and --tls-key go together; --tls-client-ca needs both")
    return {"tls": TLS(tls_certificate, tls_key, tls_client_ca) if tls_certificate and tls_key else None}


_TLS = (
    _option("--tls-certificate", type=click.Path(path_type=Path), help="PEM certificate chain."),
    _option("--tls-key", type=click.Path(path_type=Path), help="PEM private key."),
    _option("--tls-client-ca", type=click.Path(path_type=Path), help="Clients must show a certificate of this CA."),
)


def _sandbox(
    sandbox: Literal["require", "best-effort", "off"],
    sandbox_memory: int,
    sandbox_cpu: int,
    sandbox_read: tuple[str, ...],
) -> Fields:
    return {"sandbox": Sandbox(sandbox, sandbox_memory * MEBIBYTE, sandbox_cpu, readable=sandbox_read)}


_SANDBOX = (
    _option(
        "--sandbox",
        default=UNTRUSTING.mode,
        show_default=True,
        type=click.Choice(MODES),
        help="Confine processes of class process. require: fully, or do not serve; best-effort: as far "
        "as the system can.",
    ),
    _option(
        "--sandbox-memory",
        default=UNTRUSTING.memory_bytes // MEBIBYTE,
        show_default=True,
        type=click.IntRange(1),
        help="MiB that such a process may use beyond its initial size.",
    ),
    _option(
        "--sandbox-cpu",
        default=UNTRUSTING.cpu_seconds,
        show_default=True,
        type=click.IntRange(1),
        help="CPU seconds of such a process in its lifetime.",
    ),
    _option(
        "--sandbox-read",
        multiple=True,
        type=click.Path(exists=True, resolve_path=True),
        help="A file or folder that such a process may read besides its own and Python's. Repeatable.",
    ),
)


GROUPS = (
    Group(_HOSTING, _hosting),
    Group(_PLAIN, dict),
    Group(_HTTP, _http),
    Group(_LIMITS, _limits),
    Group(_TOKENS, _tokens),
    Group(_TLS, _tls),
    Group(_SANDBOX, _sandbox),
)
OPTIONS = [option for group in GROUPS for option in group.options]
