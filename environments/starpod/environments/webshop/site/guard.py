"""Protection from other sites: form tokens, the same-origin rule, known hosts, headers, and limits on what is read."""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
import secrets
from collections.abc import Collection, Mapping
from urllib.parse import urlsplit

from starpod.environments.webshop.shop.markup import script_hash

MAX_BODY_BYTES = 64 * 1024
_MAX_DIGITS = 20


class Guard:
    """Makes and checks the tokens of forms. A token holds for one session and for the life of the process."""

    def __init__(self) -> None:
        self._secret = secrets.token_bytes(32)

    def token(self, purpose: str) -> str:
        """The token of a form: `purpose` is the session's id, or the name of a form without one."""
        return hmac.new(self._secret, purpose.encode(), hashlib.sha256).hexdigest()

    def admits(self, purpose: str, token: str, headers: Mapping[str, str]) -> bool:
        """Whether a form came from one of our own pages."""
        return same_origin(headers) and hmac.compare_digest(self.token(purpose).encode(), token.encode())


def same_origin(headers: Mapping[str, str]) -> bool:
    """Whether the browser says that the request came from this site; programs that say nothing are let through."""
    if headers.get("sec-fetch-site", "same-origin") not in ("same-origin", "none"):
        return False
    origin = headers.get("origin")
    return origin is None or urlsplit(origin).netloc == headers.get("host")


def known_host(host: str, names: Collection[str]) -> bool:
    """Whether a Host header may name this site: by an address, as localhost, or by one of these names.

    A name of somebody else's that resolves to our address (DNS rebinding) would make their page one of our own origin.
    """
    try:
        name = urlsplit(f"//{host}").hostname or ""
        return name == "localhost" or name in names or bool(ipaddress.ip_address(name))
    except ValueError:
        return False


def whole(text: str, most: int) -> int | None:
    """The number that a request gives, from 0 to `most`, or None: nobody's digits without end are converted."""
    if not (text.isascii() and text.isdecimal() and len(text) <= _MAX_DIGITS):
        return None
    number = int(text)
    return number if number <= most else None


def headers(nonce: str, *, pictures: bool, framed: bool = False) -> dict[str, str]:
    """The headers of every reply. `nonce` admits our own script; `framed` is for what the watching page embeds."""
    policy = {
        "default-src": "'none'",
        "style-src": "'unsafe-inline'",
        "img-src": "data: https:" if pictures else "data:",
        "script-src": "'none'" if framed else f"{script_hash()} 'nonce-{nonce}'",
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
