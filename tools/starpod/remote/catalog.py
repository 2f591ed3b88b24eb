"""Access to one server for commands: connection options, look-up of environments by name, and readable errors."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import click
import grpc

from starpod.client.arguments import expect_exact
from starpod.client.errors import StarpodError
from starpod.client.nearest import option_type
from starpod.client.programs import ServiceFailed, ServiceRefused, start_server
from starpod.client.sync import SyncFleet
from starpod.client.transport import TLS, Transport
from starpod.client.versions import latest_name, satisfies
from starpod.v1 import environment_pb2 as pb
from starpod.v1.environment_word import EnvironmentWord, WordError
from starpod.v1.spelling import nearest

PATIENCE_SECONDS = 20.0
"""Seconds to wait for a reply to a call, unless a command says otherwise."""
FILE = click.Path(exists=True, dir_okay=False, path_type=Path)

_NO_CONNECTION = {
    "Connection refused": "no server answers at {address}: connection refused; start one with: starpod serve",
    "Misformatted domain name": "no server can be at {address}: {host} is not a host name",
    "errors resolving": "no server answers at {address}: there is no host {host}",
    "WRONG_VERSION_NUMBER": "the server at {address} speaks without TLS: leave --ca out",
    "CERTIFICATE_VERIFY_FAILED": "the certificate of the server at {address} is not signed by --ca",
    "Peer name": "the certificate of the server at {address} is for another host than {host}",
    "Failed parsing HTTP/2": "the process at {address} does not speak gRPC: is this the port of an environment server?",
    "Socket closed": "the server at {address} closes the connection: if it wants TLS, give --ca, and for mTLS "
    "--certificate and --key",
}
"""Messages to the user, keyed by a phrase in gRPC's description of the failed connection."""


def connection_options(command: Callable[..., None]) -> Callable[..., None]:
    """Add ENVIRONMENT and the connection options to a command.

    The command receives `word`, and `connection`, a context manager of a fleet, which starts what is not served yet.
    """

    @click.argument("word", metavar="ENVIRONMENT", type=WORD)
    @access_options
    @functools.wraps(command)
    def wrapper(word: EnvironmentWord, access: Transport, **arguments: Any) -> None:
        command(connection=_connect_word(word, access), word=word, **arguments)

    return wrapper


class _WordType(click.ParamType["EnvironmentWord"]):
    name = "environment"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> EnvironmentWord:
        try:
            return value if isinstance(value, EnvironmentWord) else EnvironmentWord.parse(value)
        except WordError as error:
            if "://" in value:
                expect_address(value)
            self.fail(str(error), param, ctx)


WORD = _WordType()
"""The type of a command's argument that names an environment."""


@contextlib.contextmanager
def service_errors() -> Iterator[None]:
    """Report a server that does not start as the error of this command."""
    try:
        yield
    except ServiceRefused as error:
        raise click.UsageError(error.stderr) from error
    except ServiceFailed as error:
        raise click.ClickException(error.stderr) from error


@contextlib.contextmanager
def serving(word: EnvironmentWord) -> Iterator[str]:
    """Yield the addresses of an environment's servers. Start one for the context if the environment is not served."""
    with service_errors(), contextlib.nullcontext(word.addresses) if word.addresses else start_server(word.serve) as at:
        yield at


@contextlib.contextmanager
def _connect_word(word: EnvironmentWord, access: Transport) -> Iterator[SyncFleet]:
    with serving(word) as address, connect(address, access, patience=PATIENCE_SECONDS) as fleet:
        yield fleet


def expect_address(address: str) -> None:
    """Raise BadParameter if an ADDRESS is not host:port."""
    scheme, _, host_port = address.rpartition("://")
    if scheme in ("http", "https", "grpc", "grpcs"):
        raise click.BadParameter(
            f"{address!r} is not host:port: write {host_port.rstrip('/')}"
            + (", with --ca for TLS" if scheme.endswith("s") else ""),
            param_hint="ADDRESS",
        )
    if not re.fullmatch(r"\S+:\d+", address):
        raise click.BadParameter(f"{address!r} is not host:port, e.g. 127.0.0.1:50051", param_hint="ADDRESS")


def expect_writable(*files: str | Path | None) -> None:
    """Raise UsageError if a report cannot be written to one of the files. Empty names and `-` are skipped."""
    for file in files:
        if not file or file == "-":
            continue
        folder = os.path.dirname(file) or "."
        if os.path.isdir(file):
            raise click.UsageError(f"{file} cannot be written: it is a folder")
        if not os.path.isdir(folder):
            raise click.UsageError(f"{file} cannot be written: there is no folder {folder}")
        if not os.access(place := file if os.path.exists(file) else folder, os.W_OK):
            raise click.UsageError(f"{file} cannot be written: you have no permission to write to {place}")


VERSION = click.option(
    "--version",
    default="",
    show_default="the newest",
    metavar="RANGE",
    help="Version of the environment, such as 1.2.0, or a range such as '>=1,<2', of which the newest is used.",
)
OPTIONS = click.option(
    "--option",
    "assignments",
    multiple=True,
    metavar="KEY=VALUE",
    help="Option of the environment, as JSON; a text needs no quotes. Repeatable.",
)


def report_option(name: str, content: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Return an option such as --json, whose value the command receives as `json_file`. content: for the help."""
    help = f"File for {content}; -: standard output."
    return click.option(name, f"{name.strip('-')}_file", metavar="FILE", default="", show_default=False, help=help)


JSON = report_option("--json", "the report as JSON")
ACCESS = ("token_file", "ca", "certificate", "key")
"""Names of the options of `access_options`, for a heading."""


def write_report(file: str, text: str) -> None:
    """Write the text to the file, or to standard output if `file` is `-`. Do nothing if `file` is empty."""
    if file == "-":
        click.echo(text, nl=False)
    elif file:
        Path(file).write_text(text, encoding="utf-8")


def access_options(command: Callable[..., None]) -> Callable[..., None]:
    """Add the options for tokens and certificates to a command. The command receives them as `access`, a Transport."""

    @click.option("--token-file", type=FILE, help="File with the bearer token that the server asks for.")
    @click.option("--ca", type=FILE, help="PEM file of the server's certificate authority; turns TLS on.")
    @click.option("--certificate", type=FILE, help="PEM file of the client's certificate, if the server wants mTLS.")
    @click.option("--key", type=FILE, help="PEM file of the key of --certificate.")
    @functools.wraps(command)
    def wrapper(
        token_file: Path | None, ca: Path | None, certificate: Path | None, key: Path | None, **arguments: Any
    ) -> None:
        if (certificate or key) and not (ca and certificate and key):
            raise click.UsageError("--certificate and --key go together, and with --ca")
        access = Transport(token_file, TLS(ca, certificate, key) if ca else None)
        try:
            access.metadata(), access.tls and access.tls.credentials()
        except (ValueError, OSError) as error:
            raise click.UsageError(str(error)) from error
        command(access=access, **arguments)

    return wrapper


@contextlib.contextmanager
def connect(addresses: str, access: Transport, *, patience: float, discover: bool = False) -> Iterator[SyncFleet]:
    """Connect to servers. Calls that fail inside the context raise a ClickException with a readable message.

    Args:
        addresses: `host:port`, or several with commas between them.
        patience: seconds to wait for a reply. Within them, a session continues on a server that has restarted.
        discover: whether to connect to the other processes of a server, too.
    """
    options = {"token": access.token, "tls": access.tls, "patience": patience, "discover": discover}
    try:
        with SyncFleet(addresses, **options) as fleet:
            yield fleet
    except StarpodError as error:
        raise explain_failure(error, addresses) from error


def explain_failure(error: StarpodError, address: str) -> click.ClickException:
    """Return the error to show for a failed call. It is a UsageError if the server rejected an argument."""
    details = error.message
    match error.code:
        case grpc.StatusCode.INVALID_ARGUMENT:
            return click.UsageError(details)
        case grpc.StatusCode.UNAVAILABLE:
            details = f"{address} refuses: {details}" if error.reason else no_answer(address, details)
        case grpc.StatusCode.DEADLINE_EXCEEDED:
            details = f"{address} gave no answer in time: {details}"
        case grpc.StatusCode.UNIMPLEMENTED:
            details = f"{address} is not an environment server, or lacks this: {details}"
    return click.ClickException(details)


def no_answer(address: str, details: str) -> str:
    """Return a message that says why gRPC could not reach `address`, from the details of its UNAVAILABLE error."""
    if "failed to connect" not in details and "errors resolving" not in details:
        return f"the server at {address} ended the connection ({details})"
    for sign, sentence in _NO_CONNECTION.items():
        if sign in details:
            return sentence.format(address=address, host=address.rpartition(":")[0])
    return f"no server answers at {address} ({details})"


def find_environment(specs: Sequence[pb.EnvironmentSpec], name: str, version: str = "") -> pb.EnvironmentSpec:
    """Return the spec of an environment.

    Args:
        specs: what the server hosts, the newest version of an environment first.
        name: an id; `sokoban` means the highest `sokoban-vN`, and "" the only environment.
        version: a version or a range such as `>=1,<2`, of which the newest is returned; "" means all versions.

    Raises:
        BadParameter: the environment or version is not hosted, or the range is malformed. The message suggests names.
    """
    ids = list(dict.fromkeys(spec.id for spec in specs))
    if not name and len(ids) > 1:
        raise click.BadParameter(f"say which environment: {', '.join(ids)}", param_hint="ENVIRONMENT")
    name = name or "".join(ids)
    if name not in ids:
        name = latest_name(name, ids)
    specs = [spec for spec in specs if spec.id == name]
    if not specs:
        raise click.BadParameter(f"no environment {name!r} here{nearest(name, ids)}", param_hint="ENVIRONMENT")
    try:
        for spec in specs:
            if spec.version == version or satisfies(spec.version, version):
                return spec
    except ValueError as error:
        raise click.BadParameter(str(error), param_hint="--version") from None
    versions = [spec.version for spec in specs]
    raise click.BadParameter(
        f"no version {version!r} of {specs[0].id}{nearest(version, versions)}", param_hint="--version"
    )


def options_schema(spec: pb.EnvironmentSpec) -> dict[str, dict[str, Any]]:
    """Return the JSON Schema of each option by name."""
    properties = json.loads(spec.options_schema_json or "{}").get("properties", {})
    return {name: schema for name, schema in properties.items() if isinstance(schema, dict)}


def parse_options(spec: pb.EnvironmentSpec, assignments: Sequence[str]) -> dict[str, Any]:
    """Parse `key=value` pairs as options. Values are JSON, and strings may omit their quotes.

    Raises:
        BadParameter: an option is unknown. The message suggests a similar one and lists all options.
    """
    schema = options_schema(spec)
    options: dict[str, Any] = {}
    for assignment in assignments:
        key, equals_sign, text = assignment.partition("=")
        if not equals_sign:
            raise click.BadParameter(f"{assignment!r} is not key=value", param_hint="--option")
        if schema and key not in schema:
            options_text = "; ".join(f"{name}: {option_type(schema[name])}" for name in schema)
            raise click.BadParameter(
                f"{spec.id} has no option {key!r}{nearest(key, list(schema))} Its options: {options_text}",
                param_hint="--option",
            )
        value = _json_or_text(text)
        is_unquoted = schema.get(key, {}).get("type") == "string" and not isinstance(value, str)
        options[key] = text if is_unquoted else value  # 7 is the text "7" if the option is a string
        try:
            expect_exact(options[key])
        except ValueError as error:
            raise click.BadParameter(f"{assignment!r}: {error}", param_hint="--option") from None
    return options


def _json_or_text(text: str) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError:
        return text
