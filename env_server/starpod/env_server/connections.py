"""Connections of one address: no more than its share, so that one stranger cannot take all that there is room for.

gRPC bounds connections in all and closes idle ones, but tells nobody who they are of. The sockets are this process's
own, so they are counted there, and those beyond the share are shut down, which gRPC takes for a caller who hung up.
"""

from __future__ import annotations

import contextlib
import ipaddress
import os
import socket
from collections import defaultdict
from urllib.parse import unquote

_DESCRIPTORS = "/proc/self/fd"


def address_of(peer: str) -> tuple[str, int]:
    """The address (of IPv6 its network of 64 bits, which one host has) and the port in gRPC's name of a connection."""
    address, _, port = unquote(peer).partition(":")[2].rpartition(":")
    return _network(address.strip("[]")), int(port) if port.isdecimal() else 0


def shut_excess(port: int, limit: int, kept: frozenset[tuple[str, int]]) -> int:
    """Shuts down the connections to `port` that an address has beyond `limit`; returns how many.

    kept: address and port of those that go last, because a Stream is on them. Linux alone: elsewhere none is.
    """
    try:
        descriptors = sorted(map(int, os.listdir(_DESCRIPTORS)))
    except FileNotFoundError:
        return 0
    if len(descriptors) <= limit:
        return 0  # the usual case costs one look at a folder
    by_address: dict[str, list[tuple[bool, int, tuple[str, int]]]] = defaultdict(list)
    for descriptor in descriptors:
        with contextlib.suppress(OSError), _duplicate(descriptor) as connection:
            if connection.getsockname()[1] == port:
                remote = connection.getpeername()[:2]
                network = _network(remote[0])
                by_address[network].append(((network, remote[1]) not in kept, descriptor, remote))
    shut = 0
    for connections in by_address.values():
        connections.sort(key=lambda each: each[0])  # stable: the oldest first
        for _, descriptor, remote in connections[limit:]:
            with contextlib.suppress(OSError), _duplicate(descriptor) as connection:
                if connection.getpeername()[:2] == remote:
                    connection.shutdown(socket.SHUT_RDWR)
                    shut += 1
    return shut


def _duplicate(descriptor: int) -> socket.socket:
    """A descriptor of our own for the same socket: gRPC may close its own meanwhile. Raises OSError if it is none."""
    if not os.readlink(f"{_DESCRIPTORS}/{descriptor}").startswith("socket:"):
        raise OSError("no socket")
    copy = os.dup(descriptor)
    try:
        connection = socket.socket(fileno=copy)
    except OSError:
        os.close(copy)
        raise
    if connection.family not in (socket.AF_INET, socket.AF_INET6):
        connection.close()
        raise OSError("no connection")
    return connection


def _network(address: str) -> str:
    try:
        parsed = ipaddress.ip_address(address.partition("%")[0])
    except ValueError:
        return address
    if isinstance(parsed, ipaddress.IPv6Address):
        if parsed.ipv4_mapped:
            return str(parsed.ipv4_mapped)
        return str(ipaddress.ip_network((parsed, 64), strict=False).network_address)
    return str(parsed)
