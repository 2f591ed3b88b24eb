"""Bearer tokens: who calls, and which sessions are his."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from starpod.env_server.errors import CallError

ANYONE = ""
"""The one tenant of a server without tokens."""


class TokenFileError(ValueError):
    """The token file cannot be used; the message says why."""


class Authenticator:
    """Checks the `authorization: Bearer TOKEN` metadata against a list of tokens; without a list, lets anyone in."""

    def __init__(self, tokens: Iterable[str] = ()) -> None:
        self._digests = [(_digest(token), name) for name, token in enumerate(tokens)]

    @classmethod
    def from_file(cls, path: Path) -> Authenticator:
        """One token per line; empty lines and lines that start with # are skipped. Each token is a tenant."""
        try:
            lines = [line.strip() for line in path.read_text().splitlines()]
        except OSError as error:
            raise TokenFileError(f"cannot read the token file: {error}") from error
        tokens = [line for line in lines if line and not line.startswith("#")]
        if not tokens:
            raise TokenFileError(f"{path} holds no token: write one per line")
        return cls(tokens)

    def tenant(self, metadata: Iterable[tuple[str, Any]] | None) -> str:
        """Who calls. Raises UNAUTHENTICATED."""
        if not self._digests:
            return ANYONE
        presented = next((value for name, value in metadata or () if name == "authorization"), "")
        scheme, _, token = str(presented).partition(" ")
        digest = _digest(token.strip())
        # Every token is compared, whole and in constant time, so that timing tells nothing about any of them.
        matches = [name for known, name in self._digests if hmac.compare_digest(known, digest)]
        if scheme.lower() != "bearer" or not matches:
            raise CallError(
                "UNAUTHENTICATED",
                "no valid token: send the metadata `authorization: Bearer TOKEN` with a token of this server",
            )
        return f"tenant-{matches[0]}"


def _digest(token: str) -> bytes:
    return hashlib.sha256(token.encode()).digest()
