"""Ports, TLS files and file descriptors, which a server checks before it listens."""

from __future__ import annotations

import errno
import resource
import socket
import ssl

import grpc

from starpod.env_server.operation.config import ServerConfig, ServerTLS

_IDLE_KEEPALIVES = 2
"""A connection without a call for this many times `keepalive_seconds` is closed. Clients reconnect by themselves."""


class ServerError(RuntimeError):
    """The server cannot start. The message says why and how to fix it."""


def join_address(host: str, port: int) -> str:
    """Return host:port, with brackets around an IPv6 address."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def connection_options(config: ServerConfig) -> list[tuple[str, int]]:
    """Return options against connections that are never established or not used, and against floods of connections."""
    return [
        ("grpc.server_handshake_timeout_ms", int(config.handshake_seconds * 1000)),
        ("grpc.max_connection_idle_ms", int(_IDLE_KEEPALIVES * config.keepalive_seconds * 1000)),
        ("grpc.max_allowed_incoming_connections", config.limits.max_connections),
    ]


def check_port(host: str, port: int, option: str) -> None:
    """Check that a port can be bound. gRPC would write the cause of a failure to standard error instead of raising it.

    Args:
        port: the port; 0 means a free one.
        option: name of the command line's option for the port, without dashes, for messages.

    Raises:
        ServerError: the port cannot be used.
    """
    problems: list[OSError] = []
    try:
        addresses = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except OSError as error:
        raise ServerError(f"cannot listen on {host!r}: {error.strerror}; choose another --host") from error
    for family, socket_type, protocol, _, address in addresses:
        try:
            with socket.socket(family, socket_type, protocol) as probe:
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                probe.bind(address)
        except OSError as error:
            problems.append(error)
    if any(problem.errno == errno.EADDRINUSE for problem in problems):
        raise ServerError(f"port {port} of {host} is in use; choose another --{option}")
    if len(problems) == len(addresses):
        raise ServerError(
            f"cannot listen on {host} port {port}: {problems[0].strerror}; choose another --host or --{option}"
        )


def allow_descriptors(count: int) -> None:
    """Raise this process's limit on open files as much as permitted, because each connection takes one."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < count:
        allowed = count if hard == resource.RLIM_INFINITY else min(count, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (allowed, hard))


def credentials(tls: ServerTLS) -> grpc.ServerCredentials:
    try:
        key, certificate = tls.key.read_bytes(), tls.certificate.read_bytes()
        client_ca = tls.client_ca.read_bytes() if tls.client_ca else None
        trial = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        trial.load_cert_chain(tls.certificate, tls.key, password="")
        if tls.client_ca:
            trial.load_verify_locations(tls.client_ca)
    except ssl.SSLError as error:
        raise ServerError(
            f"cannot use the TLS files: {error.reason or error}; certificate, key and CA must be PEM, the key without "
            "a password and the certificate's own"
        ) from error
    except OSError as error:
        raise ServerError(f"cannot read the TLS file {error.filename}: {error.strerror}") from error
    return grpc.ssl_server_credentials([(key, certificate)], client_ca, require_client_auth=client_ca is not None)
