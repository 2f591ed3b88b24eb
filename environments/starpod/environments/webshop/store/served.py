"""The stores of this process: those that its server was given, and bundled ones, which are built on first use."""

from __future__ import annotations

import atexit
import os
import re
import stat
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import platformdirs

from .sections import StoreError
from .store import MANIFEST, Manifest, Store

STORES_VARIABLE = "STARPOD_STORES"
"""The environment variable that hands the stores of a server to its workers: NAME=PATH, joined as in PATH."""
CACHE_VARIABLE = "STARPOD_CACHE"
"""The environment variable that names another folder than the user's cache folder."""
SYNTHETIC = "synthetic"
"""The store that every server has: 1,000 products of the bundled generator, built on first use."""
BUNDLED: Mapping[str, Mapping[str, Any]] = {SYNTHETIC: {"count": 1000}, "plain": {"count": 400, "plain": True}}
"""The stores that every server has, by name: what the bundled generator is asked for. Built on first use. `plain` has
short texts of few words, for policies that learn from scratch."""

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")


def stores() -> Mapping[str, Store]:
    """The stores of this process by name: those its server was given, in their order, then those of `BUNDLED`.

    Each is opened (and a bundled one built) when it is first asked for, which may raise StoreError.
    """
    return _stores_of(os.environ.get(STORES_VARIABLE, ""))


def give_stores(entries: Sequence[str]) -> None:
    """Makes these, NAME=PATH each, the stores of this process and of those it starts. Raises StoreError."""
    given = given_stores(os.pathsep.join(entries))
    for path in given.values():
        Manifest.read(path)
    os.environ[STORES_VARIABLE] = os.pathsep.join(f"{name}={path.resolve()}" for name, path in given.items())


def given_stores(text: str) -> dict[str, Path]:
    """Reads NAME=PATH entries that are joined as in PATH. Raises StoreError."""
    found: dict[str, Path] = {}
    for entry in filter(None, text.split(os.pathsep)):
        name, equals, path = entry.partition("=")
        if not (equals and path and _NAME.fullmatch(name)):
            raise StoreError(f"{entry!r} is not NAME=PATH; names have letters, digits, '.', '_' and '-'")
        if name in BUNDLED or name in found:
            raise StoreError(f"the name {name!r} is taken; choose another one for {path}")
        found[name] = Path(path)
    return found


@lru_cache(1)
def _stores_of(text: str) -> Mapping[str, Store]:
    return _Stores(given_stores(text))


class _Stores(Mapping[str, Store]):
    def __init__(self, paths: Mapping[str, Path]) -> None:
        self._openers: dict[str, Callable[[], Store]] = {
            name: partial(Store.open, path, name) for name, path in paths.items()
        }
        self._openers |= {name: partial(_open_bundled, name) for name in BUNDLED}
        self._open: dict[str, Store] = {}
        self._lock = threading.Lock()

    def __getitem__(self, name: str) -> Store:
        store = self._open.get(name)
        if store is None:
            opener = self._openers[name]
            with self._lock:
                store = self._open.get(name) or self._open.setdefault(name, opener())
        return store

    def __iter__(self) -> Iterator[str]:
        return iter(self._openers)

    def __len__(self) -> int:
        return len(self._openers)


def _open_bundled(name: str) -> Store:
    """A bundled store out of a cache folder, built where there is none. Safe with many processes at once."""
    from .build import Synthetic, build, code_digest

    cached = f"webshop-{name}-{code_digest()[:16]}"
    problem: Exception | None = None
    for folder in _cache_folders():
        path = folder / cached
        for force in (False, True):  # the second time over one that is damaged
            try:
                if not force and (path / MANIFEST).exists():
                    return Store.open(path, name)
                build(path, Synthetic(**BUNDLED[name]), nouns="textblob", force=force, wait=True)
                return Store.open(path, name)
            except (StoreError, OSError) as error:
                problem = error
    raise StoreError(f"cannot keep the store {name} anywhere: {problem}") from problem


def _cache_folders() -> Iterator[Path]:
    """Folders for this user's cached files, best first; the last is gone with the process."""
    named = os.environ.get(CACHE_VARIABLE)
    yield Path(named) if named else platformdirs.user_cache_path("starpod")
    shared = Path(tempfile.gettempdir()) / f"starpod-{os.getuid()}"
    try:
        shared.mkdir(mode=0o700, exist_ok=True)
        status = shared.lstat()
        if stat.S_ISDIR(status.st_mode) and status.st_uid == os.getuid() and not status.st_mode & 0o022:
            yield shared  # else it is another user's: what lies there is not to be trusted
    except OSError:
        pass
    own = tempfile.TemporaryDirectory(prefix="starpod-")
    atexit.register(own.cleanup)
    yield Path(own.name)
