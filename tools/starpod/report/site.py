"""Common parts of the web sites: protection from other sites, limits, headers, options and the socket.

Form tokens and the same-origin rule prevent other sites from acting in a visitor's name. A list of known hosts prevents
DNS rebinding.
"""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
import secrets
import signal
import socket
from collections.abc import Callable, Collection, Mapping
from typing import Any, TypeVar
from urllib.parse import urlsplit

import click

Command = TypeVar("Command", bound=Callable[..., None])

MAX_BODY_BYTES = 64 * 1024
_MAX_DIGITS = 20
_SHUTDOWN_SECONDS = 2
"""Time that open connections of pages have to end at shutdown."""


class Guard:
    """Creates and checks form tokens, which are valid for one purpose and until the process ends."""

    def __init__(self) -> None:
        self._secret = secrets.token_bytes(32)

    def token(self, purpose: str) -> str:
        """Return the token of a form. purpose: the session's id, or the name of a form without a session."""
        return hmac.new(self._secret, purpose.encode(), hashlib.sha256).hexdigest()

    def admits(self, purpose: str, token: str, headers: Mapping[str, str]) -> bool:
        """Return whether a form was sent from a page of this site."""
        return same_origin(headers) and hmac.compare_digest(self.token(purpose).encode(), token.encode())


def same_origin(headers: Mapping[str, str]) -> bool:
    """Return whether a request may come from this site. Programs that send no such header are accepted."""
    if headers.get("sec-fetch-site", "same-origin") not in ("same-origin", "none"):
        return False
    origin = headers.get("origin")
    return origin is None or urlsplit(origin).netloc == headers.get("host")


def known_host(host: str, names: Collection[str]) -> bool:
    """Return whether a Host header may name this site: by an address, as localhost, or by one of these names.

    Other names are refused because of DNS rebinding: a foreign name that resolves to this address would give a foreign
    page this site's origin.
    """
    try:
        name = urlsplit(f"//{host}").hostname or ""
        return name == "localhost" or name in names or bool(ipaddress.ip_address(name))
    except ValueError:
        return False


def refusal(method: str, headers: Mapping[str, str], hosts: Collection[str]) -> tuple[int, str] | None:
    """Return status and text for a request to an unknown host or with too large a form, else None."""
    if not known_host(headers.get("host", ""), hosts):
        return 421, "This site does not answer to that name. Start it with --allow-host NAME if it should."
    if method == "POST" and whole(headers.get("content-length", ""), MAX_BODY_BYTES) is None:
        return 413, "That is more than a form of this site holds."
    return None


def whole(text: str, most: int) -> int | None:
    """Parse a number from 0 to `most`, or return None. Long digit strings are not converted, because that is slow."""
    if not (text.isascii() and text.isdecimal() and len(text) <= _MAX_DIGITS):
        return None
    number = int(text)
    return number if number <= most else None


def headers(
    *, scripts: str, styles: str = "'unsafe-inline'", images: str = "data:", framed: bool = False
) -> dict[str, str]:
    """Return the headers of every reply.

    Args:
        scripts: sources of scripts in the Content-Security-Policy.
        styles: sources of styles.
        images: sources of images.
        framed: whether a page of this site embeds the reply in a frame, which may neither run scripts nor send forms.
    """
    policy = {
        "default-src": "'none'",
        "style-src": styles,
        "img-src": images,
        "script-src": "'none'" if framed else scripts,
        "connect-src": "'self'",
        "frame-src": "'self'",
        "form-action": "'none'" if framed else "'self'",
        "base-uri": "'none'",
        "frame-ancestors": "'self'" if framed else "'none'",
    }
    return {
        "Content-Security-Policy": "; ".join(f"{name} {value}" for name, value in policy.items()),
        "Cache-Control": "no-store",
        "Referrer-Policy": "same-origin",
        "X-Content-Type-Options": "nosniff",
        "Cross-Origin-Opener-Policy": "same-origin",
        "Cross-Origin-Resource-Policy": "same-origin",
        "Permissions-Policy": "camera=(), geolocation=(), microphone=()",
    }


def site_options(*, port: int) -> Callable[[Command], Command]:
    """Add --host, --port (with this default) and --allow-host to a command, as `host`, `port` and `hosts`."""
    options = (
        click.option("--host", default="127.0.0.1", show_default=True, help="Address to listen on; 0.0.0.0 for all."),
        click.option(
            "--port", default=port, show_default=True, type=click.IntRange(0, 65535), help="0: any free port."
        ),
        click.option(
            "--allow-host",
            "hosts",
            multiple=True,
            metavar="NAME",
            help="A name by which browsers may call the site, besides localhost and addresses. Repeatable.",
        ),
    )

    def add(command: Command) -> Command:
        for option in reversed(options):
            command = option(command)
        return command

    return add


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


async def serve(app: Any, listener: socket.socket) -> None:
    """Serve an ASGI application until SIGTERM or SIGINT."""
    import uvicorn  # only installed with the sites' extras

    from starpod.report.idle import IDLE_SECONDS, IdleBoundProtocol

    for number in (signal.SIGTERM, signal.SIGINT):
        # uvicorn stops at these signals and raises them again, which must not end the process before the cleanup.
        signal.signal(number, lambda *_: None)
    config = uvicorn.Config(
        app,
        log_level="warning",
        access_log=False,
        server_header=False,
        http=IdleBoundProtocol,
        timeout_keep_alive=IDLE_SECONDS,
        timeout_graceful_shutdown=_SHUTDOWN_SECONDS,
    )
    await uvicorn.Server(config).serve([listener])
