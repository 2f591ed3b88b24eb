"""A built shop on disk: opened in moments, its arrays mapped, so that all workers of a machine share one copy.

STORE/manifest.json     what there is: written last, so a store without it is not finished
STORE/data-1/NAME.bin   one array each, little-endian
"""

from __future__ import annotations

import atexit
import os
import re
import stat
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property, lru_cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import platformdirs

from starpod.environments.webshop.catalogue import Catalogue
from starpod.environments.webshop.goals import Caps, Goals, Kind
from starpod.environments.webshop.mapped import MappedCatalogue
from starpod.environments.webshop.nouns import Tagger, default_tagger
from starpod.environments.webshop.nountable import MappedTagger
from starpod.environments.webshop.sections import Section, StoreError, check_section, map_section, read_json

if TYPE_CHECKING:
    from starpod.environments.webshop.index import Index

__all__ = ["STORES_VARIABLE", "Manifest", "Store", "StoreError", "given_stores", "stores", "verify"]

STORES_VARIABLE = "STARPOD_STORES"
"""The environment variable that hands the stores of a server to its workers: NAME=PATH, joined as in PATH."""
CACHE_VARIABLE = "STARPOD_CACHE"
"""The environment variable that names another folder than the user's cache folder."""
SYNTHETIC = "synthetic"
"""The store that every server has: 1,000 products of the bundled generator, built on first use."""
BUNDLED: Mapping[str, Mapping[str, Any]] = {SYNTHETIC: {"count": 1000}, "plain": {"count": 400, "plain": True}}
"""The stores that every server has, by name: what the bundled generator is asked for. Built on first use. `plain` has
short texts of few words, for policies that learn from scratch."""

FORMAT = "starpod webshop store"
VERSION = 1
"""Of the format. A store of another version is refused: building it again is cheaper than a mistake."""
MANIFEST = "manifest.json"

CHECKED_BYTES = 64 << 20
"""Stores up to this size are checked in full whenever they are opened; it takes a tenth of a second."""


@dataclass(frozen=True, slots=True)
class Manifest:
    """What a store holds.

    products: that are loaded. documents: that search ranks; more than products where the rows were cut.
    price_seed: of the drawn prices and caps. tagger: whose nouns the store holds; empty for none.
    source: what it was built from, for people. skipped: malformed records that were left out.
    digest: of everything that decides what a shop shows and pays; equal digests, equal shops.
    data: the folder of the sections, within the store.
    """

    products: int
    documents: int
    price_seed: int
    tagger: str
    source: str
    skipped: int
    digest: str
    data: str
    sections: Mapping[str, Section]

    @property
    def bytes(self) -> int:
        """Bytes of all sections."""
        return sum(section.bytes for section in self.sections.values())

    def as_json(self) -> dict[str, Any]:
        values = {name: getattr(self, name) for name in self.__slots__ if name != "sections"}
        sections = {name: section.as_json() for name, section in self.sections.items()}
        return {"format": FORMAT, "version": VERSION, **values, "sections": sections}

    @classmethod
    def read(cls, path: Path) -> Manifest:
        """The manifest of the store at a path. Raises StoreError with what to do."""
        file = path / MANIFEST
        try:
            values = read_json(file)
            if values.pop("format", None) != FORMAT:
                raise StoreError(f"{path} is not a store of this shop; `starpod webshop build` makes one")
            version = values.pop("version", None)
            if version != VERSION:
                raise StoreError(f"{path} has format {version}, this program reads {VERSION}; build it again")
            sections = {name: Section.from_json(section) for name, section in values.pop("sections").items()}
            return cls(**values, sections=sections)
        except (FileNotFoundError, NotADirectoryError):
            raise StoreError(_no_manifest(path)) from None
        except OSError as error:
            raise StoreError(f"cannot read {file}: {error.strerror}") from error
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise StoreError(f"{file} is damaged, or another program's ({error}); build the store again") from error


def _no_manifest(path: Path) -> str:
    if any(path.glob("data-*")):
        return f"{path} is not finished: run the same `starpod webshop build` again, it goes on where it stopped"
    if path.is_dir():
        return f"{path} is not a store; `starpod webshop build` makes one"
    if path.exists():
        return f"{path} is a file; a store is a folder, which `starpod webshop build` makes"
    return f"there is no store at {path}; `starpod webshop build` makes one"


class Store:
    """A shop to read from. Immutable, safe to read from threads; hashable by identity.

    name: under which a server has it. digest: see Manifest.
    """

    def __init__(self, name: str, manifest: Manifest, arrays: Mapping[str, np.ndarray]) -> None:
        self.name = name
        self.manifest = manifest
        self.digest = manifest.digest
        self.price_seed = manifest.price_seed
        self.catalogue: Catalogue = MappedCatalogue(arrays, manifest.products)
        self.prices = arrays["prices"]
        self._arrays = arrays
        self.goals: Callable[..., Goals] = lru_cache(8)(self._goals)

    @classmethod
    def open(cls, path: Path, name: str = "") -> Store:
        """The store at a path. Raises StoreError, with what to do, if it is anything but whole.

        A large one is checked for sizes and consistency alone; `verify` reads all of it.
        """
        manifest = Manifest.read(path)
        folder = path / manifest.data
        arrays = {each: map_section(folder, each, section) for each, section in manifest.sections.items()}
        if manifest.bytes <= CHECKED_BYTES:
            verify(path)
        try:
            documents = len(arrays["products.offsets"]) - 1
            if not len(arrays["prices"]) == manifest.products <= manifest.documents == documents:
                raise ValueError("they disagree on how many products there are")
            return cls(name or path.name, manifest, arrays)
        except (LookupError, ValueError) as error:
            raise StoreError(f"the sections of {path} do not fit together ({error!r}); build it again") from error

    def _goals(self, kind: Kind, caps: Caps = "original") -> Goals:
        """The goals of a kind, in the original's order, with price caps chosen as asked."""
        return Goals.from_arrays(self.catalogue, kind, self._part(f"goals.{kind}.{caps}."))

    @cached_property
    def index(self) -> Index:
        from starpod.environments.webshop.index import Index

        return Index.from_arrays(self._part("index."))

    @cached_property
    def tagger(self) -> Tagger:
        """The nouns in the store, or else those that are found on this machine."""
        if not self.manifest.tagger:
            return default_tagger()
        return MappedTagger(self.manifest.tagger, self._part("nouns."))

    def _part(self, prefix: str) -> dict[str, np.ndarray]:
        return {name.removeprefix(prefix): array for name, array in self._arrays.items() if name.startswith(prefix)}


def verify(path: Path, progress: Callable[[int], None] = lambda done: None) -> Manifest:
    """Reads all of a store and compares checksums; `progress` hears the bytes done. Raises StoreError."""
    manifest = Manifest.read(path)
    done = 0
    for name, section in manifest.sections.items():
        check_section(path / manifest.data, name, section)
        done += section.bytes
        progress(done)
    return manifest


def stores() -> Mapping[str, Store]:
    """The stores of this process by name: those its server was given, in their order, then those of `BUNDLED`.

    Each is opened (and a bundled one built) when it is first asked for, which may raise StoreError.
    """
    return _stores_of(os.environ.get(STORES_VARIABLE, ""))


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


_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")


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
    from starpod.environments.webshop.build import Synthetic, build, code_digest

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
    """Where this user's things may be kept, best first; the last is gone with the process."""
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
