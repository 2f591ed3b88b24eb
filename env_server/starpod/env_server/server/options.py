"""The options of `starpod serve`. Groups of them are converted to fields of ServerConfig."""

from __future__ import annotations

import ipaddress
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Literal

import click

from starpod.env_server.operation.config import HTTP, Quota, ServerConfig, ServerLimits, ServerTLS
from starpod.env_server.sandbox.sandbox import MODES, UNTRUSTING, Sandbox
from starpod.env_server.sessions.requests import OTHER_BYTES
from starpod.serving.options import BYTES, SECONDS, duration, show_quantity, size

Fields = dict[str, Any]


def _option(*names: str, **settings: Any) -> click.Option:
    return click.Option(names, **settings)


def _settings(owner: type[ServerConfig | ServerLimits | Quota]) -> tuple[click.Option, ...]:
    """Return an option for each field of a dataclass that is a setting."""
    return tuple(
        _option(
            "--" + (setting.metadata["option"] or setting.name.replace("_", "-")),
            setting.name,
            default=setting.metadata["shown"],
            show_default=setting.default != "",
            type=setting.metadata["type"],
            help=setting.metadata["help"],
        )
        for setting in fields(owner)
        if setting.metadata
    )


@dataclass(frozen=True, slots=True)
class OptionGroup:
    """Options that configure one thing.

    `build` takes their values, checks their combination and returns fields of ServerConfig. It raises UsageError.
    """

    options: Sequence[click.Option]
    build: Callable[..., Fields]


def read_options(values: Fields) -> Fields:
    """Convert the values of all options to fields of ServerConfig, and `stores`. Raises UsageError."""
    result = dict(values)
    for group in GROUPS:
        result |= group.build(**{str(option.name): result.pop(str(option.name)) for option in group.options})
    return result


# --- what is served, and where -----------------------------------------------------------------------------------


def _hosting(host: str, stores: tuple[str, ...]) -> Fields:
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
    _option("--host", default="127.0.0.1", help="Address to listen on; 0.0.0.0: all addresses of this machine."),
    _option(
        "--store",
        "stores",
        multiple=True,
        metavar="NAME=PATH",
        help="Folder of data that environments can open by NAME, such as a shop that `starpod webshop build` built. "
        "Repeatable; the first one is the default.",
    ),
)
# --- HTTP --------------------------------------------------------------------------------------------------------


def _http(
    http_port: int | None, http_hosts: tuple[str, ...], mcp: bool, ors_server: bool, endpoints: str, http_endpoints: str
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
        help="Also serve JSON over HTTP at this port; 0: any free port. Worker i listens on port + i. Without it, "
        "only gRPC is served.",
    ),
    _option(
        "--http-host",
        "http_hosts",
        multiple=True,
        metavar="NAME",
        help="Name by which callers reach the HTTP port. Requests for other names, except localhost and IP addresses, "
        "are refused. Repeatable.",
    ),
    _option("--mcp", is_flag=True, help="Also serve MCP, at /mcp/ENVIRONMENT/NAME of the HTTP port."),
    _option(
        "--ors-server",
        is_flag=True,
        help="Also serve the Open Reward Standard, at the HTTP port. A task is a seed, and a turn is a call of a tool.",
    ),
    _option("--endpoints", default="", hidden=True, help="Set by the supervisor: addresses of all workers."),
    _option("--http-endpoints", default="", hidden=True, help="Set by the supervisor: HTTP addresses of all workers."),
)


# --- limits ------------------------------------------------------------------------------------------------------


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


# --- who may call, and what processes may do -----------------------------------------------------------------------


def _tokens(token_file: Path | None, **limits: Any) -> Fields:
    if any(limits.values()) and not token_file:
        raise click.UsageError(f"{', '.join(option.opts[0] for option in _settings(Quota))} need --token-file")
    return {"token_file": token_file, "quota": Quota(**limits)}


_TOKENS = (
    _option(
        "--token-file",
        type=click.Path(path_type=Path),
        help="File with bearer tokens, one per line, each with its own limits if you want. The file is read again when "
        "it changes. Without it, callers need no token.",
    ),
    *_settings(Quota),
)


def _tls(tls_certificate: Path | None, tls_key: Path | None, tls_client_ca: Path | None) -> Fields:
    if bool(tls_certificate) != bool(tls_key) or (tls_client_ca and not tls_certificate):
        raise click.UsageError("--tls-certificate and --tls-key go together; --tls-client-ca needs both")
    return {"tls": ServerTLS(tls_certificate, tls_key, tls_client_ca) if tls_certificate and tls_key else None}


_TLS = (
    _option(
        "--tls-certificate",
        type=click.Path(path_type=Path),
        help="PEM file of the server's certificate chain; turns TLS on.",
    ),
    _option("--tls-key", type=click.Path(path_type=Path), help="PEM file of the server's private key."),
    _option(
        "--tls-client-ca",
        type=click.Path(path_type=Path),
        help="PEM file of a certificate authority; clients must present a certificate that it signed (mTLS).",
    ),
)


def _sandbox(
    sandbox: Literal["require", "best-effort", "off"],
    sandbox_memory: int,
    sandbox_cpu: float,
    sandbox_read: tuple[str, ...],
) -> Fields:
    return {"sandbox": Sandbox(sandbox, sandbox_memory, math.ceil(sandbox_cpu), readable=sandbox_read)}


_SANDBOX = (
    _option(
        "--sandbox",
        default=UNTRUSTING.mode,
        type=click.Choice(MODES),
        help="Confinement of environments of class process. require: the server starts only if the system can confine "
        "them fully. best-effort: confines them as well as the system allows.",
    ),
    _option(
        "--sandbox-memory",
        default=show_quantity(UNTRUSTING.memory_bytes, BYTES),
        type=size(bare="MiB"),
        help="Memory that a confined process may use beyond its initial size; a number alone is in MiB.",
    ),
    _option(
        "--sandbox-cpu",
        default=show_quantity(UNTRUSTING.cpu_seconds, SECONDS),
        type=duration(1),
        help="CPU time that a confined process may use in its lifetime.",
    ),
    _option(
        "--sandbox-read",
        multiple=True,
        type=click.Path(exists=True, resolve_path=True),
        help="File or folder that confined processes may read, besides the environment's own and Python's. Repeatable.",
    ),
)


GROUPS = (
    OptionGroup(_HOSTING, _hosting),
    OptionGroup(_settings(ServerConfig), dict),
    OptionGroup(_HTTP, _http),
    OptionGroup(_settings(ServerLimits), _limits),
    OptionGroup(_TOKENS, _tokens),
    OptionGroup(_TLS, _tls),
    OptionGroup(_SANDBOX, _sandbox),
)
OPTIONS = [option for group in GROUPS for option in group.options]


def _names(options: Sequence[click.Option]) -> list[str]:
    return [str(option.name) for option in options if not option.hidden]


HEADINGS = {
    "Address and processes": ["host", "port", "workers", "threads", "thread_seconds", "drain_seconds"],
    "Data of environments": ["stores", "effects", "snapshot_key_file"],
    "HTTP": _names(_HTTP),
    "Access": _names((*_TOKENS, *_TLS)),
    "Sandbox": _names(_SANDBOX),
    "Limits of each worker": [*_names(_settings(ServerLimits)), "keepalive_seconds"],
    "Monitoring": ["metrics_port", "health_port", "otlp_endpoint", "log_format", "log_level"],
}
"""Names of the options below each heading of the help."""
