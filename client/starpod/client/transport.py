"""gRPC channels to servers: credentials, message sizes, keepalive, back-off and addresses."""

from __future__ import annotations

import contextlib
import os
import random
import ssl
import sys
import time
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import grpc

from starpod.client.errors import Unreachable
from starpod.client.wire import GrpcWire
from starpod.serving.sockets import is_loopback

FORKED = (
    "This process was forked from one that was using gRPC, which cannot be used in it. Close all fleets before the "
    "fork; or start processes with the method spawn or forkserver, such as multiprocessing.get_context('spawn') or "
    "AsyncVectorEnv(..., context='spawn'); and make a fleet in each."
)
RISKY_FORK = (
    "This process uses gRPC and is forked, and the new process may die of signal 11, because gRPC was imported before "
    "starpod.client. Import starpod.client first, or set GRPC_ENABLE_FORK_SUPPORT=0."
)
_GRPC_THREADS = frozenset(("event_engine", "grpc_global_tim", "lifeguard"))
"""Names of the threads that gRPC runs while it has a channel or server. A forked process lacks these threads."""
_SETTLE_SECONDS = 5.0
"""Maximum wait for gRPC's threads to end after the last fleet was closed. They usually take a few milliseconds."""
_open_fleets: set[int] = set()
_settled_by = 0.0
_forks_grpc = _forked = False


def note_fleet(fleet: object, *, is_open: bool) -> None:
    """Note that a fleet was opened or closed, because a fork of this process waits until gRPC has ended."""
    global _settled_by
    if is_open:
        _open_fleets.add(id(fleet))
    elif id(fleet) in _open_fleets:
        _open_fleets.discard(id(fleet))
        _settled_by = time.monotonic() + _SETTLE_SECONDS


def _runs_grpc() -> bool:
    for task in Path("/proc/self/task").iterdir() if sys.platform == "linux" else ():
        with contextlib.suppress(OSError):  # a thread that has ended
            if (task / "comm").read_text().strip() in _GRPC_THREADS:
                return True
    return False


def _look_before_fork() -> None:
    global _forks_grpc
    while (_forks_grpc := _runs_grpc()) and not _open_fleets and time.monotonic() < _settled_by:
        time.sleep(0.005)
    if _forks_grpc and os.environ.get("GRPC_ENABLE_FORK_SUPPORT") != "0":
        warnings.warn(RISKY_FORK, RuntimeWarning, stacklevel=2)


def _note_fork() -> None:
    global _forked
    _forked |= _forks_grpc
    _open_fleets.clear()


if sys.platform != "win32":
    os.register_at_fork(before=_look_before_fork, after_in_child=_note_fork)


def expect_own_grpc() -> None:
    """Raise RuntimeError if this process was forked from a process that was using gRPC."""
    if _forked:
        raise RuntimeError(FORKED)


@dataclass(frozen=True, slots=True)
class TLS:
    """TLS certificates, as files in PEM format."""

    roots: str | Path | None = None
    """Certificate authorities to trust; None means those of the system."""
    certificate: str | Path | None = None
    """The client's certificate for servers that require one (mTLS). Give it together with `key`."""
    key: str | Path | None = None
    """The client's private key."""
    server_name: str = ""
    """The name in the server's certificate, if it differs from the host in the address."""

    def __post_init__(self) -> None:
        if (self.certificate is None) != (self.key is None):
            raise ValueError("A client certificate needs its key: give both or neither.")

    def credentials(self) -> grpc.ChannelCredentials:
        """Read the files, and return credentials for gRPC channels.

        Raises:
            OSError: a file cannot be read.
            ValueError: a file is not PEM, or the key does not belong to the certificate.
        """
        roots, key, certificate = _read(self.roots), _read(self.key), _read(self.certificate)
        trial = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        try:
            if self.roots is not None:
                trial.load_verify_locations(self.roots)
            if self.certificate is not None:
                trial.load_cert_chain(self.certificate, self.key, password="")
        except ssl.SSLError as error:
            raise ValueError(
                f"The TLS files cannot be used: {error.reason or 'not PEM'}. Authority, certificate and key must be "
                "PEM files, the key without a password and the certificate's own."
            ) from error
        return grpc.ssl_channel_credentials(roots, key, certificate)


def _read(path: str | Path | None) -> bytes | None:
    return None if path is None else Path(path).read_bytes()


@dataclass(frozen=True, slots=True)
class Transport:
    """Settings for creating gRPC channels."""

    token: str | Path | None = None
    """Bearer token, or the Path of its file. The file is read for each connection, so the token can be rotated."""
    tls: TLS | None = None
    max_message_bytes: int = 64 * 1024 * 1024
    """Maximum size of one message in either direction."""
    keepalive_seconds: float = 20.0
    """Interval between pings on an idle connection. The connection is closed if no answer comes within half of it."""

    def channel(self, address: str, server_name: str = "") -> grpc.aio.Channel:
        """Make a channel that shares no connections with other channels.

        Args:
            address: `host:port`.
            server_name: the host name that `address` was resolved from, for the check of the server's certificate.
        """
        expect_own_grpc()
        options: list[tuple[str, str | int]] = [
            ("grpc.max_receive_message_length", self.max_message_bytes),
            ("grpc.max_send_message_length", self.max_message_bytes),
            ("grpc.keepalive_time_ms", int(self.keepalive_seconds * 1000)),
            ("grpc.keepalive_timeout_ms", int(self.keepalive_seconds * 500)),
            # Without this option gRPC waits a minute for the answer to a ping, whatever the keepalive's timeout is.
            ("grpc.http2.ping_timeout_ms", int(self.keepalive_seconds * 500)),
            ("grpc.http2.max_pings_without_data", 0),
            # A channel that shares connections would also share their back-off after a failure.
            ("grpc.use_local_subchannel_pool", 1),
        ]
        host = address.removeprefix("dns:///").rpartition(":")[0].strip("[]")
        if is_loopback(host):  # it must not go through a proxy
            options.append(("grpc.enable_http_proxy", 0))
        if self.tls is None:
            return grpc.aio.insecure_channel(address, options=options)
        name = self.tls.server_name or server_name
        if name:
            options.append(("grpc.ssl_target_name_override", name))
        return grpc.aio.secure_channel(address, self.tls.credentials(), options=options)

    def connect(self, address: str, server_name: str = "") -> GrpcWire:
        """Make a channel, and return a Wire that uses it. Raises OSError or Unreachable for unusable TLS files."""
        try:
            channel = self.channel(address, server_name)
        except ValueError as error:
            raise Unreachable(str(error)) from error
        return GrpcWire(address, channel, self.metadata)

    def metadata(self) -> tuple[tuple[str, str], ...]:
        """Return the metadata of every call: the bearer token, if there is one."""
        if self.token is None:
            return ()
        token = self.token.read_text(encoding="utf-8-sig").strip() if isinstance(self.token, Path) else self.token
        return (("authorization", f"Bearer {token}"),)


_JITTER = random.Random()
"""Random state for the jitter of waits. It is separate from the global random state, so that seeded programs are
reproducible even if connections fail."""


class Backoff:
    """Exponentially growing waits with jitter, so that clients do not all reconnect at once.

    Each wait is a random part of a span in seconds. The span doubles with each wait, from `first` to `longest`.
    """

    __slots__ = ("_next", "first", "longest")

    def __init__(self, first: float = 0.05, longest: float = 5.0) -> None:
        self.first = first
        self.longest = longest
        self._next = first

    def reset(self) -> None:
        self._next = self.first

    def wait(self, retry_after: float = 0.0) -> float:
        """Return the seconds to wait now, and double the span for the next call.

        The wait is a random time between half of the span and the whole span, but at least `retry_after`, the
        seconds that the server asked for, times a random factor from 1 to 1.5.
        """
        span = self._next
        self._next = min(span * 2, self.longest)
        return max(span * _JITTER.uniform(0.5, 1.0), retry_after * _JITTER.uniform(1.0, 1.5))


def split_address(address: str) -> tuple[str, str]:
    """Split "host:port", "[v6]:port" or ":port" into host and port. Raises ValueError for any other form."""
    scheme, separator, host_port = address.partition("://")
    if separator:
        hint = ", and pass tls=TLS() for a server with TLS" if scheme == "https" else ""
        raise ValueError(f"{address!r} is not an address: write {host_port.rstrip('/')!r}, without {scheme}://{hint}.")
    host, colon, port = address.rpartition(":")
    if not colon or not port.isdigit() or (":" in host and not host.startswith("[")):
        example = f"[{host}]:{port}" if host.count(":") > 1 and port.isdigit() else "host:port, e.g. 127.0.0.1:50051"
        raise ValueError(f"{address!r} is not an address: write {example}.")
    return host, port


def join_endpoint(endpoint: str, host: str) -> str:
    """Return the address of an endpoint that a server lists. `host` is used if the endpoint has none."""
    listed_host, port = split_address(endpoint)
    return f"{host if listed_host in ('', '0.0.0.0', '[::]') else listed_host}:{port}"


def as_addresses(addresses: str | Sequence[str]) -> list[str]:
    """Return a list of addresses from a list or a comma-separated string. Raises ValueError if one is malformed."""
    items = addresses.split(",") if isinstance(addresses, str) else list(addresses)
    result = [item.strip() for item in items if item.strip()]
    if not result:
        raise ValueError("A fleet needs at least one address, e.g. 127.0.0.1:50051.")
    for item in result:
        split_address(item.removeprefix("dns:///"))
    return result
