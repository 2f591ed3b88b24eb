"""Seal snapshots with a keyed digest inside the opaque state, so that only this fleet can have written them.

The protocol's own digest has no key: it finds snapshots that were truncated or mixed up, but proves no origin. With a
key that all servers of a fleet share, each of them restores snapshots of the others, and nobody else can make one.
"""

from __future__ import annotations

import hashlib
import hmac
from pathlib import Path

from starpod.env_server.episodes.errors import bad_argument

_MARK = b"\xc1starpod\x01"
"""Prefix of a sealed state. No MessagePack starts with 0xc1, so no other state has this prefix."""
_SHORTEST_KEY = 32


class SealKeyError(ValueError):
    """The key file cannot be used; the message says why."""


class SnapshotSeal:
    """A seal that uses the first key, and opens states sealed with any key. Without keys, states pass unchanged."""

    def __init__(self, path: Path | None = None) -> None:
        self._keys: list[bytes] = []
        if path is not None:
            try:
                lines = [line.strip() for line in path.read_text(encoding="utf-8-sig").split("\n")]
            except (OSError, UnicodeDecodeError) as error:
                raise SealKeyError(f"cannot read the snapshot key file: {error}") from error
            self._keys = [line.encode() for line in lines if line and not line.startswith("#")]
            if not self._keys or min(map(len, self._keys)) < _SHORTEST_KEY:
                raise SealKeyError(
                    f"{path} must hold a key of at least {_SHORTEST_KEY} characters per line: openssl rand -hex 32"
                )

    @property
    def keyed(self) -> bool:
        """Whether `unseal` proves that a server of this fleet wrote the state."""
        return bool(self._keys)

    def seal(self, environment_id: str, version: str, state: bytes) -> bytes:
        """Return the sealed state, as it leaves the server. The seal also covers id and version."""
        if not self._keys:
            return state
        return _MARK + _tag(self._keys[0], environment_id, version, state) + state

    def unseal(self, environment_id: str, version: str, sealed: bytes) -> bytes:
        """Return the state as the environment wrote it. Raises BAD_ARGUMENT if no key of this server sealed it."""
        has_mark = sealed.startswith(_MARK)
        tag, state = sealed[len(_MARK) : len(_MARK) + 32], sealed[len(_MARK) + 32 :]
        if not self._keys:
            return state if has_mark else sealed
        # Compare all keys, so that the timing reveals nothing.
        matches = [hmac.compare_digest(_tag(key, environment_id, version, state), tag) for key in self._keys]
        if not has_mark or not any(matches):
            raise bad_argument("snapshot.state", "was not written by a server with a snapshot key of this one")
        return state


def _tag(key: bytes, environment_id: str, version: str, state: bytes) -> bytes:
    name = b"\0".join((b"starpod snapshot", environment_id.encode(), version.encode(), b""))
    return hmac.new(key, name + state, hashlib.sha256).digest()


def digest_snapshot(environment_id: str, version: str, state: bytes) -> bytes:
    """Return the SHA-256 of a snapshot as the protocol defines it.

    Args:
        state: the state as it leaves the server: sealed, if the server has a key.
    """
    return hashlib.sha256(b"\0".join((environment_id.encode(), version.encode(), state))).digest()
