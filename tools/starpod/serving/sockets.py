"""Sockets, the names by which a server may be called, and standard streams, for all commands that serve."""

from __future__ import annotations

import ipaddress
import os
import signal
import socket
import stat
import sys
import threading
from collections.abc import Collection, Mapping
from typing import TextIO
from urllib.parse import urlsplit

if sys.platform == "linux":
    import fcntl

MAX_FORM_BYTES = 64 * 1024
_MAX_DIGITS = 20


def is_loopback(host: str) -> bool:
    """Return whether only this machine can reach a host, given by its name or address."""
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def known_host(host: str, names: Collection[str]) -> bool:
    """Return whether a Host header may name this server: by an address, as localhost, or by one of these names.

    Other names are refused because of DNS rebinding: a foreign name that resolves to this address would give a foreign
    page this server's origin.
    """
    try:
        name = urlsplit(f"//{host}").hostname or ""
        return name == "localhost" or name in map(str.lower, names) or bool(ipaddress.ip_address(name))
    except ValueError:
        return False


def refusal(method: str, headers: Mapping[str, str], hosts: Collection[str]) -> tuple[int, str] | None:
    """Return status and text for a request to an unknown host of a site or with too large a form, else None.

    Args:
        headers: headers of the request, with names in lower case.
        hosts: names of the site, besides localhost and addresses.
    """
    if not known_host(headers.get("host", ""), hosts):
        return 421, "This site does not answer to that name. Start it with --allow-host NAME if it should."
    if method == "POST" and parse_whole(headers.get("content-length", ""), MAX_FORM_BYTES) is None:
        return 413, "That is more than a form of this site holds."
    return None


def parse_whole(text: str, maximum: int) -> int | None:
    """Parse a number from 0 to `maximum`, or return None. Long digit strings are not converted: that is slow."""
    if not (text.isascii() and text.isdecimal() and len(text) <= _MAX_DIGITS):
        return None
    number = int(text)
    return number if number <= maximum else None


def listen(host: str, port: int) -> socket.socket:
    """Return a listening socket. Raise OSError with a readable message."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        listener = socket.create_server((host, port), family=family)
    except OSError as error:
        raise OSError(f"cannot listen on {host}:{port}: {error.strerror or error}") from error
    # Connections inherit this. asyncio sets it only for sockets made with IPPROTO_TCP. Without it, a reply's body is
    # sent only after the client acknowledges the head, which takes up to 40 ms.
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return listener


def link(listener: socket.socket, host: str) -> str:
    """Return the URL of a site for a browser."""
    address = f"[{host}]" if ":" in host else host
    return f"http://{address}:{listener.getsockname()[1]}/"


def claim_output() -> TextIO:
    """Return standard output for the ready line. All other output of this process then goes to standard error."""
    output = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    return output


def end_process_with_stdin() -> None:
    """End this process at once when standard input closes, which happens when the process at its other end exits.

    Nobody is left to ask for anything, so a step of minutes is not waited for, and nothing is drained.
    """
    if sys.platform == "linux" and stat.S_ISFIFO(os.fstat(0).st_mode):
        # The kernel ends the process by SIGIO, also while native code holds the interpreter's lock.
        signal.signal(signal.SIGIO, signal.SIG_DFL)
        fcntl.fcntl(0, fcntl.F_SETOWN, os.getpid())
        fcntl.fcntl(0, fcntl.F_SETFL, fcntl.fcntl(0, fcntl.F_GETFL) | os.O_ASYNC)

    def watch() -> None:
        # Read the descriptor, because a waiting thread would hold sys.stdin's lock, which aborts the interpreter at
        # exit.
        while os.read(0, 1):
            pass
        os._exit(0)

    threading.Thread(target=watch, daemon=True).start()
