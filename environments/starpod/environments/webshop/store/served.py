"""The stores of this process: the server's (`--store`), and bundled ones, which are built on first use."""

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
"""Environment variable that passes a server's stores to its workers: NAME=PATH, separated as in $PATH."""
CACHE_VARIABLE = "STARPOD_CACHE"
"""Environment variable for a folder to use instead of the user's cache folder."""
SYNTHETIC = "synthetic"
"""Name of the default store: 1,000 generated products."""
BUNDLED: Mapping[str, Mapping[str, Any]] = {SYNTHETIC: {"count": 1000}, "plain": {"count": 400, "plain": True}}
"""Arguments of the generator for each store that every server has. These stores are built on first use. `plain` has
short texts with a small vocabulary, for policies that learn from scratch."""

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")


def stores() -> Mapping[str, Store]:
    """Return the stores of this process by name: the server's, in their order, then those in BUNDLED.

    A store is opened (and a bundled one built) on first access, which may raise StoreError.
    """
    return _stores_of(os.environ.get(STORES_VARIABLE, ""))


def give_stores(entries: Sequence[str]) -> None:
    """Set the stores, each NAME=PATH, of this process and of its child processes. Raises StoreError."""
    paths = given_stores(os.pathsep.join(entries))
    for path in paths.values():
        Manifest.read(path)
    os.environ[STORES_VARIABLE] = os.pathsep.join(f"{name}={path.resolve()}" for name, path in paths.items())


def given_stores(text: str) -> dict[str, Path]:
    """Parse NAME=PATH entries that are separated as in $PATH. Raises StoreError."""
    paths: dict[str, Path] = {}
    for entry in filter(None, text.split(os.pathsep)):
        name, equals, path = entry.partition("=")
        if not (equals and path and _NAME.fullmatch(name)):
            raise StoreError(f"{entry!r} is not NAME=PATH; names have letters, digits, '.', '_' and '-'")
        if name in BUNDLED or name in paths:
            raise StoreError(f"the name {name!r} is taken; choose another one for {path}")
        paths[name] = Path(path)
    return paths


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
    """Open a bundled store in a cache folder; build it first if necessary. Concurrent processes are safe."""
    from .build import Synthetic, build, code_digest

    folder_name = f"webshop-{name}-{code_digest()[:16]}"
    problem: Exception | None = None
    for folder in _cache_folders():
        path = folder / folder_name
        for force in (False, True):  # the second time, replace a damaged store
            try:
                if not force and (path / MANIFEST).exists():
                    return Store.open(path, name)
                build(path, Synthetic(**BUNDLED[name]), nouns="textblob", force=force, wait=True)
                return Store.open(path, name)
            except (StoreError, OSError) as error:
                problem = error
    raise StoreError(f"cannot keep the store {name} anywhere: {problem}") from problem


def _cache_folders() -> Iterator[Path]:
    """Yield folders for this user's cached files, best first. The last one is removed when the process ends."""
    override = os.environ.get(CACHE_VARIABLE)
    yield Path(override) if override else platformdirs.user_cache_path("starpod")
    shared_folder = Path(tempfile.gettempdir()) / f"starpod-{os.getuid()}"
    try:
        shared_folder.mkdir(mode=0o700, exist_ok=True)
        status = shared_folder.lstat()
        if stat.S_ISDIR(status.st_mode) and status.st_uid == os.getuid() and not status.st_mode & 0o022:
            yield shared_folder  # a folder that others can write to is not trusted
    except OSError:
        pass
    temporary = tempfile.TemporaryDirectory(prefix="starpod-")
    atexit.register(temporary.cleanup)
    yield Path(temporary.name)
