"""How servers are reached: credentials, message sizes, keepalive."""

from __future__ import annotations

import ipaddress
import os
import random
import ssl
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import grpc

FORKED = (
    "This process was forked from one that had used gRPC, which cannot be used in it. Start processes with the method "
    "spawn or forkserver, such as multiprocessing.get_context('spawn') or AsyncVectorEnv(..., context='spawn'), and "
    "make a fleet in each."
)
_user: int | None = None
"""The process that made the first channel. Its threads and locks do not survive a fork."""


def expect_own_grpc() -> None:
    """Raise RuntimeError in a process that was forked from one that had used gRPC."""
    global _user
    _user = _user or os.getpid()
    if _user != os.getpid():
        raise RuntimeError(FORKED)


@dataclass(frozen=True, slots=True)
class TLS:
    """Certificates as files in PEM format.

    roots: whom to trust; None: the system's authorities.
    certificate, key: who we are, for servers that ask (mTLS); both or neither.
    server_name: the name that the server's certificate must bear, where it is not the address.
    """

    roots: str | Path | None = None
    certificate: str | Path | None = None
    key: str | Path | None = None
    server_name: str = ""

    def __post_init__(self) -> None:
        if (self.certificate is None) != (self.key is None):
            raise ValueError("A client certificate and its key come together: give both or neither.")

    def credentials(self) -> grpc.ChannelCredentials:
        """Reads the files. Raises OSError if one cannot be read, ValueError if one is not what it should be."""
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
    """How a channel is made.

    token: bearer token as text, or a Path: then the file is read anew for each connection, so that it can be rotated.
    max_message_bytes: of one message in either direction.
    keepalive_seconds: a connection without traffic is probed this often, so that a dead host is noticed: no answer for
        half as long ends it.
    """

    token: str | Path | None = None
    tls: TLS | None = None
    max_message_bytes: int = 64 * 1024 * 1024
    keepalive_seconds: float = 20.0

    def channel(self, address: str, server_name: str = "") -> grpc.aio.Channel:
        """A new channel with connections of its own. `server_name`: whom a resolved address stands for."""
        expect_own_grpc()
        options: list[tuple[str, str | int]] = [
            ("grpc.max_receive_message_length", self.max_message_bytes),
            ("grpc.max_send_message_length", self.max_message_bytes),
            ("grpc.keepalive_time_ms", int(self.keepalive_seconds * 1000)),
            ("grpc.keepalive_timeout_ms", int(self.keepalive_seconds * 500)),
            # gRPC waits for the answer to a ping itself, for a minute by default, whatever the keepalive's timeout is.
            ("grpc.http2.ping_timeout_ms", int(self.keepalive_seconds * 500)),
            ("grpc.http2.max_pings_without_data", 0),
            # A channel that shares connections would also share their back-off after a failure.
            ("grpc.use_local_subchannel_pool", 1),
        ]
        if is_loopback(address):
            options.append(("grpc.enable_http_proxy", 0))
        if self.tls is None:
            return grpc.aio.insecure_channel(address, options=options)
        name = self.tls.server_name or server_name
        if name:
            options.append(("grpc.ssl_target_name_override", name))
        return grpc.aio.secure_channel(address, self.tls.credentials(), options=options)

    def metadata(self) -> tuple[tuple[str, str], ...]:
        """What every call carries."""
        if self.token is None:
            return ()
        token = self.token.read_text(encoding="utf-8-sig").strip() if isinstance(self.token, Path) else self.token
        return (("authorization", f"Bearer {token}"),)


_JITTER = random.Random()
"""Not the global stream: a program that seeds that one repeats its run, whenever connections fail."""


class Backoff:
    """Exponentially growing waits with full jitter, so that clients do not come back all at once."""

    __slots__ = ("_next", "first", "longest")

    def __init__(self, first: float = 0.05, longest: float = 5.0) -> None:
        self.first = first
        self.longest = longest
        self._next = first

    def reset(self) -> None:
        self._next = self.first

    def wait(self, asked: float = 0.0) -> float:
        """Seconds to wait now: between half of the current span and all of it, and longer than a server `asked` for by
        up to half of that. The next span is twice as long.
        """
        span = self._next
        self._next = min(span * 2, self.longest)
        return max(span * _JITTER.uniform(0.5, 1.0), asked * _JITTER.uniform(1.0, 1.5))


def split_address(address: str) -> tuple[str, str]:
    """Host and port of "host:port", "[v6]:port" or ":port". Raises ValueError if it is not of that form."""
    scheme, mark, rest = address.partition("://")
    if mark:
        secure = ", and pass tls=TLS() for a server with TLS" if scheme == "https" else ""
        raise ValueError(f"{address!r} is not an address: write {rest.rstrip('/')!r}, without {scheme}://{secure}.")
    host, colon, port = address.rpartition(":")
    if not colon or not port.isdigit() or (":" in host and not host.startswith("[")):
        example = f"[{host}]:{port}" if host.count(":") > 1 and port.isdigit() else "host:port, e.g. 127.0.0.1:50051"
        raise ValueError(f"{address!r} is not an address: write {example}.")
    return host, port


def is_loopback(address: str) -> bool:
    """Return whether an address, as `split_address` reads it, is on this machine: no proxy reaches it."""
    host = address.removeprefix("dns:///").rpartition(":")[0].strip("[]")
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def join_endpoint(endpoint: str, host: str) -> str:
    """A sibling's address as seen from here: an endpoint without a host of its own is on the host that we used."""
    own, port = split_address(endpoint)
    return f"{host if own in ('', '0.0.0.0', '[::]') else own}:{port}"


def as_addresses(addresses: str | Sequence[str]) -> list[str]:
    """One address, several, or several in one string with commas."""
    items = addresses.split(",") if isinstance(addresses, str) else list(addresses)
    result = [item.strip() for item in items if item.strip()]
    if not result:
        raise ValueError("A fleet needs at least one address, e.g. 127.0.0.1:50051.")
    for item in result:
        split_address(item.removeprefix("dns:///"))
    return result
