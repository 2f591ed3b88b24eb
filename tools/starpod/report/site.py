"""Common parts of the web sites: protection from other sites, headers and options.

Form tokens and the same-origin rule prevent other sites from acting in a visitor's name.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
from collections.abc import Callable, Mapping
from typing import TypeVar
from urllib.parse import urlsplit

import click

Command = TypeVar("Command", bound=Callable[..., None])


class Guard:
    """Creates and checks form tokens, which are valid for one purpose and until the process ends."""

    def __init__(self) -> None:
        self._secret = secrets.token_bytes(32)

    def token(self, purpose: str) -> str:
        """Return the token of a form. purpose: the session's id, or the name of a form without a session."""
        return hmac.new(self._secret, purpose.encode(), hashlib.sha256).hexdigest()

    def admits(self, purpose: str, token: str, headers: Mapping[str, str]) -> bool:
        """Return whether a form was sent from a page of this site.

        Args:
            purpose: as in `token`.
            headers: headers of the request, with names in lower case.
        """
        return same_origin(headers) and hmac.compare_digest(self.token(purpose).encode(), token.encode())


def same_origin(headers: Mapping[str, str]) -> bool:
    """Return whether a request may come from this site. Requests without Origin and Sec-Fetch-Site headers pass."""
    if headers.get("sec-fetch-site", "same-origin") not in ("same-origin", "none"):
        return False
    origin = headers.get("origin")
    return origin is None or urlsplit(origin).netloc == headers.get("host")


def headers(
    *, scripts: str, styles: str = "'unsafe-inline'", images: str = "data:", framed: bool = False
) -> dict[str, str]:
    """Return the headers of every reply.

    Args:
        scripts, styles, images: sources of each kind in the Content-Security-Policy.
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
        click.option(
            "--host", default="127.0.0.1", help="Address to listen on; 0.0.0.0: all addresses of this machine."
        ),
        click.option(
            "--port", default=port, type=click.IntRange(0, 65535), help="Port to listen on; 0: any free port."
        ),
        click.option(
            "--allow-host",
            "hosts",
            multiple=True,
            metavar="NAME",
            help="Host name by which callers may reach this server, besides localhost and IP addresses. Repeatable.",
        ),
    )

    def add(command: Command) -> Command:
        for option in reversed(options):
            command = option(command)
        return command

    return add
