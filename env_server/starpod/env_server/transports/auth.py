"""Bearer tokens: which tenant calls, until when a token is valid, and the tenant's quota."""

from __future__ import annotations

import dataclasses
import hashlib
import logging
import math
import os
import time
from collections.abc import Iterable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from starpod.env_server.episodes.errors import CallError
from starpod.env_server.operation.config import UNLIMITED, Quota
from starpod.env_server.operation.tenants import UNNAMED, Tenant

logger = logging.getLogger(__name__)

_QUOTA_KEYS = {"sessions": int, "calls-per-second": float, "streams": int}


class TokenFileError(ValueError):
    """The token file cannot be used; the message says why."""


@dataclasses.dataclass(eq=False, slots=True)
class Grant:
    """The rights of a token."""

    tenant: Tenant
    expires: float = math.inf
    """Time at which the token expires, in seconds since the epoch."""
    revoked: bool = False
    """Whether the token has been removed from the token file."""

    def check(self) -> None:
        """Raise UNAUTHENTICATED if the token is no longer valid."""
        if self.revoked or time.time() >= self.expires:
            # Unknown tokens get the same message, so that nobody learns which tokens once existed.
            raise CallError(
                "UNAUTHENTICATED",
                "no valid token: send the metadata `authorization: Bearer TOKEN` with a token of this server",
            )


class Authenticator:
    """Checks the `authorization: Bearer TOKEN` metadata against a token file. Without a file, every caller is accepted.

    `default` is the quota of tenants whose line in the file sets none.
    """

    def __init__(self, path: Path | None = None, default: Quota = UNLIMITED) -> None:
        self._path = path
        self._default = default
        self._grants: dict[bytes, Grant] = {}
        self._tenants: dict[str, Tenant] = {}
        self._anyone = Grant(Tenant("", UNNAMED, default))
        self._nobody = Grant(self._anyone.tenant, revoked=True)
        self._file_signature: tuple[int, ...] = ()
        if path is not None:
            try:
                self._load(path)
            except OSError as error:
                raise TokenFileError(f"cannot read the token file: {error}") from error

    @property
    def tenants(self) -> list[Tenant]:
        """All tenants that have had a token since the start."""
        return [self._anyone.tenant] if self._path is None else list(self._tenants.values())

    def identify(self, metadata: Iterable[tuple[str, Any]] | None) -> Grant:
        """Return the grant of the caller's token. Raises UNAUTHENTICATED."""
        if self._path is None:
            return self._anyone
        header = next((value for name, value in metadata or () if name == "authorization"), "")
        scheme, _, token = str(header).partition(" ")
        # Look up by digest: the timing helps nobody to guess a token, and does not depend on the number of tokens.
        grant = self._grants.get(_digest(token.strip()), self._nobody) if scheme.lower() == "bearer" else self._nobody
        grant.check()
        return grant

    def reload(self) -> None:
        """Reload the file if it has changed. If the file cannot be used, log an error and keep the old tokens."""
        if self._path is None:
            return
        try:
            if _signature(self._path) != self._file_signature:
                self._load(self._path)
                logger.info("token file read again", extra={"tokens": len(self._grants)})
        except (OSError, TokenFileError) as error:
            logger.error("the token file changed and cannot be used; the old tokens stay: %s", error)

    def _load(self, path: Path) -> None:
        # Take the signature before reading, so that a change in between is noticed next time. An error is then logged
        # once, not every second.
        self._file_signature = _signature(path)
        try:
            text = path.read_text(encoding="utf-8-sig")
        except UnicodeDecodeError as error:
            raise TokenFileError(f"{path} is not text") from error
        grants: dict[bytes, Grant] = {}
        tenants: dict[str, Tenant] = {}
        quotas: dict[str, Quota] = {}
        for number, token, tenant_id, name, quota, expires in _read_lines(text, path, self._default):
            tenant = tenants.get(tenant_id)
            if tenant is None:
                # A tenant that returns gets its sessions and its usage back.
                tenant = tenants[tenant_id] = self._tenants.get(tenant_id) or Tenant(tenant_id, name, quota)
                quotas[tenant_id] = quota
            elif quotas[tenant_id] != quota:
                raise TokenFileError(f"{path}, line {number}: {name} has other limits in an earlier line")
            if _digest(token) in grants:
                raise TokenFileError(f"{path}, line {number}: the same token as in an earlier line")
            grants[_digest(token)] = Grant(tenant, expires)
        if not grants:
            raise TokenFileError(f"{path} holds no token: write one per line")
        for digest, grant in self._grants.items():
            new_grant = grants.get(digest)
            if new_grant is not None and new_grant.tenant is grant.tenant:
                grant.expires = new_grant.expires
                grants[digest] = grant  # streams refer to it
            else:
                grant.revoked = True
        self._grants = grants
        for tenant_id, tenant in tenants.items():
            tenant.change_quota(quotas[tenant_id])
        self._tenants.update(tenants)


def _read_lines(text: str, path: Path, default: Quota) -> Iterator[tuple[int, str, str, str, Quota, float]]:
    """Yield line number, token, tenant id, name, quota and expiry of each line that has a token."""
    for number, line in enumerate(text.split("\n"), 1):
        if not line.strip() or line.strip().startswith("#"):
            continue
        token, *settings = line.split()
        name, expires = UNNAMED, math.inf
        limits: dict[str, Any] = {}
        for setting in settings:
            key, _, value = setting.partition("=")
            try:
                if key in _QUOTA_KEYS:
                    limits[key.replace("-", "_")] = _not_negative(_QUOTA_KEYS[key](value))
                elif key == "expires":
                    expires = _moment(value)
                elif key == "name" and value and value != UNNAMED:
                    name = value
                else:
                    raise ValueError("use name=, sessions=, calls-per-second=, streams= or expires=")
            except ValueError as error:
                # Do not show the line, because it contains the token.
                raise TokenFileError(f"{path}, line {number}: bad setting {key[:20]!r}: {error}") from error
        id = f"name:{name}" if name != UNNAMED else f"token:{_digest(token).hex()}"
        yield number, token, id, name, dataclasses.replace(default, **limits), expires


def _not_negative(value: float) -> float:
    if not 0 <= value < math.inf:
        raise ValueError("must be 0 (no limit) or more")
    return value


def _moment(text: str) -> float:
    """Parse an ISO 8601 time, in UTC by default. A date without a time means the start of that day."""
    moment = datetime.fromisoformat(text)
    return (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp()


def _signature(path: Path) -> tuple[int, ...]:
    status = os.stat(path)
    return status.st_mtime_ns, status.st_size, status.st_ino


def _digest(token: str) -> bytes:
    return hashlib.sha256(token.encode()).digest()
