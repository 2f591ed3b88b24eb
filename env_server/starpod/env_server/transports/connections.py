"""Limits on the connections of one address, so that a single caller cannot take them all.

gRPC limits the total number of connections and closes idle ones, but does not count them by address. This process
therefore counts its own sockets, and shuts down those above an address's share. To gRPC, that looks as if the caller
hung up.
"""

from __future__ import annotations

import contextlib
import ipaddress
import os
import socket
from collections import defaultdict
from collections.abc import Sequence
from urllib.parse import unquote

_DESCRIPTORS = "/proc/self/fd"


def address_of(peer: str) -> tuple[str, int]:
    """Return address and port from gRPC's peer name. An IPv6 address is reduced to its /64 network."""
    address, _, port = unquote(peer).partition(":")[2].rpartition(":")
    return _network(address.strip("[]")), int(port) if port.isdecimal() else 0


class Connections:
    """The connections to this process's ports. Call `shut_excess` every second, because it notes when they began."""

    def __init__(self) -> None:
        self._sweeps = 0
        self._first_seen: dict[tuple[int, str, int], int] = {}
        self._reserve = _spare_descriptors()

    def shut_excess(self, ports: Sequence[int], limit: int, streams: frozenset[tuple[str, int]]) -> int:
        """Shut down the newest connections of each address above `limit` at a port, and return their number.

        Args:
            ports: ports of this process.
            limit: maximum number of connections of an address to each port.
            streams: address and port of connections to shut down last, because they carry a Stream.

        Raises:
            OSError: no file descriptor is left for listing the descriptors.
        """
        # Free two reserved descriptors: a server that has run out of them needs this sweep most.
        for descriptor in self._reserve:
            os.close(descriptor)
        try:
            return self._shut(ports, limit, streams)
        finally:
            self._reserve = _spare_descriptors()

    def _shut(self, ports: Sequence[int], limit: int, streams: frozenset[tuple[str, int]]) -> int:
        try:
            descriptors = os.listdir(_DESCRIPTORS)
        except FileNotFoundError:  # not Linux
            return 0
        self._sweeps += 1
        first_seen: dict[tuple[int, str, int], int] = {}
        by_address: dict[tuple[int, str], list[tuple[bool, int, int, tuple[str, int]]]] = defaultdict(list)
        for descriptor in map(int, descriptors):
            with contextlib.suppress(OSError), _duplicate(descriptor) as connection:
                if (port := connection.getsockname()[1]) in ports:
                    remote = connection.getpeername()[:2]
                    network, key = _network(remote[0]), (port, *remote)
                    first_seen[key] = self._first_seen.get(key, self._sweeps)
                    by_address[port, network].append(
                        ((network, remote[1]) not in streams, first_seen[key], descriptor, remote)
                    )
        self._first_seen = first_seen
        shut_count = 0
        for connections in by_address.values():
            for _, _, descriptor, remote in sorted(connections)[limit:]:
                with contextlib.suppress(OSError), _duplicate(descriptor) as connection:
                    if connection.getpeername()[:2] == remote:
                        connection.shutdown(socket.SHUT_RDWR)
                        shut_count += 1
        return shut_count


def _spare_descriptors() -> list[int]:
    descriptors = []
    with contextlib.suppress(OSError):
        descriptors = [os.open(os.devnull, os.O_RDONLY)]
        descriptors.append(os.open(os.devnull, os.O_RDONLY))
    return descriptors


def _duplicate(descriptor: int) -> socket.socket:
    """Duplicate a socket's descriptor, because gRPC may close its own. Raises OSError if it is not a socket."""
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
        ip = ipaddress.ip_address(address.partition("%")[0])
    except ValueError:
        return address
    if isinstance(ip, ipaddress.IPv6Address):
        if ip.ipv4_mapped:
            return str(ip.ipv4_mapped)
        return str(ipaddress.ip_network((ip, 64), strict=False).network_address)
    return str(ip)
