"""The options of `starpod serve`, grouped by purpose. Each group is converted to fields of ServerConfig."""

from __future__ import annotations

import ipaddress
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Literal

import click

from starpod.env_server.operation.config import HTTP, Quota, ServerConfig, ServerLimits, ServerTLS
from starpod.env_server.sandbox.sandbox import MEBIBYTE, MODES, UNTRUSTING, Sandbox
from starpod.env_server.sessions.requests import OTHER_BYTES

Fields = dict[str, Any]


def _option(*names: str, **settings: Any) -> click.Option:
    return click.Option(names, **settings)


def _settings(owner: type[ServerConfig | ServerLimits | Quota]) -> tuple[click.Option, ...]:
    """Return an option for each field of a dataclass that is a setting."""
    return tuple(
        _option(
            "--" + (setting.metadata["option"] or setting.name.replace("_", "-")),
            setting.name,
            default=setting.default,
            show_default=setting.default not in (None, ""),
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
    """Convert the values of all options to fields of ServerConfig, `stores` and `modules`. Raises UsageError."""
    result = dict(values)
    for group in GROUPS:
        result |= group.build(**{str(option.name): result.pop(str(option.name)) for option in group.options})
    return result


# --- what is served, and where -----------------------------------------------------------------------------------


def _hosting(host: str, stores: tuple[str, ...], modules: tuple[str, ...]) -> Fields:
    if ":" in host and not _is_ipv6(host):
        address, _, port = host.rpartition(":")
        advice = f"--host {address} --port {port}" if port.isdecimal() else f"starpod serve {host}, without --host"
        raise click.UsageError(f"--host {host!r} is not an address to listen on: write {advice}")
    return {"host": host, "stores": stores, "modules": modules}


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
        help="Bearer tokens, one per line, optionally with limits. The file is read again when it changes.",
    ),
    *_settings(Quota),
)


def _tls(tls_certificate: Path | None, tls_key: Path | None, tls_client_ca: Path | None) -> Fields:
    if bool(tls_certificate) != bool(tls_key) or (tls_client_ca and not tls_certificate):
        raise click.UsageError("--tls-certificate and --tls-key go together; --tls-client-ca needs both")
    return {"tls": ServerTLS(tls_certificate, tls_key, tls_client_ca) if tls_certificate and tls_key else None}


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
        help="Confine processes of class process. With require, the server does not start unless the system can "
        "confine them fully; with best-effort, they are confined as far as the system can.",
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
    OptionGroup(_HOSTING, _hosting),
    OptionGroup(_settings(ServerConfig), dict),
    OptionGroup(_HTTP, _http),
    OptionGroup(_settings(ServerLimits), _limits),
    OptionGroup(_TOKENS, _tokens),
    OptionGroup(_TLS, _tls),
    OptionGroup(_SANDBOX, _sandbox),
)
OPTIONS = [option for group in GROUPS for option in group.options]
