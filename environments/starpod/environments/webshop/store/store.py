"""A built store on disk. Its arrays are memory-mapped, so that it opens fast and all workers share one copy.

STORE/manifest.json     description of the contents; it is written last, so a store without it is not finished
STORE/data-1/NAME.bin   one array each, little-endian
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from starpod.environments.webshop.catalogue.goals import Caps, Goals, Kind
from starpod.environments.webshop.catalogue.product import Catalogue
from starpod.environments.webshop.search.nouns import Tagger, default_tagger

from .mapped import MappedCatalogue
from .nountable import MappedTagger
from .sections import StoreError, StoreSection, check_section, map_section, read_json

if TYPE_CHECKING:
    from starpod.environments.webshop.search.index import SearchIndex

FORMAT = "starpod webshop store"
VERSION = 1
"""Version of the format. Stores of other versions must be built again."""
MANIFEST = "manifest.json"

CHECKED_BYTES = 64 << 20
"""Maximum size in bytes of a store whose checksums are all compared on opening, which takes a tenth of a second."""


@dataclass(frozen=True, slots=True)
class Manifest:
    """Description of a store's contents."""

    products: int
    """Number of loaded products."""
    documents: int
    """Number of documents that search ranks. It exceeds `products` if only some of the records were loaded."""
    price_seed: int
    """Seed of drawn prices and caps."""
    tagger: str
    """Name of the tagger that made the table of nouns; "" if there is no table."""
    source: str
    """Description of the data that the store was built from."""
    skipped: int
    """Number of malformed records that were left out."""
    digest: str
    """Digest of everything that affects pages and rewards. Shops with equal digests behave equally."""
    data: str
    """Folder of the sections, within the store."""
    sections: Mapping[str, StoreSection]

    @property
    def bytes(self) -> int:
        """Size of all sections in bytes."""
        return sum(section.bytes for section in self.sections.values())

    def as_json(self) -> dict[str, Any]:
        values = {name: getattr(self, name) for name in self.__slots__ if name != "sections"}
        sections = {name: section.as_json() for name, section in self.sections.items()}
        return {"format": FORMAT, "version": VERSION, **values, "sections": sections}

    @classmethod
    def read(cls, path: Path) -> Manifest:
        """Read the manifest of a store. Raises StoreError that says what to do."""
        file = path / MANIFEST
        try:
            values = read_json(file)
            if values.pop("format", None) != FORMAT:
                raise StoreError(f"{path} is not a store of this shop; `starpod webshop build` makes one")
            version = values.pop("version", None)
            if version != VERSION:
                raise StoreError(f"{path} has format {version}, this program reads {VERSION}; build it again")
            sections = {name: StoreSection.from_json(section) for name, section in values.pop("sections").items()}
            return cls(**values, sections=sections)
        except (FileNotFoundError, NotADirectoryError):
            raise StoreError(_no_manifest(path)) from None
        except OSError as error:
            raise StoreError(f"cannot read {file}: {error.strerror}") from error
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise StoreError(f"{file} is damaged, or another program's ({error}); build the store again") from error


def _no_manifest(path: Path) -> str:
    if any(path.glob("data-*")):
        return f"{path} is not finished: run the same `starpod webshop build` again, which continues where it stopped"
    if path.is_dir():
        return f"{path} is not a store; `starpod webshop build` makes one"
    if path.exists():
        return f"{path} is a file; a store is a folder, which `starpod webshop build` makes"
    return f"there is no store at {path}; `starpod webshop build` makes one"


class Store:
    """An open store. It is immutable, safe to use from many threads, and hashable by identity.

    Attributes:
        name: the server's name for the store.
        digest: see Manifest.
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
        """Open a store. Raises StoreError that says what to do if it is incomplete or damaged.

        Checksums are only compared for stores up to CHECKED_BYTES; `verify` compares them for any store.
        """
        manifest = Manifest.read(path)
        folder = path / manifest.data
        arrays = {key: map_section(folder, key, section) for key, section in manifest.sections.items()}
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
        return Goals(self.catalogue, kind, self._part(f"goals.{kind}.{caps}."))

    @cached_property
    def index(self) -> SearchIndex:
        from starpod.environments.webshop.search.index import SearchIndex

        return SearchIndex(self._part("index."))

    @cached_property
    def tagger(self) -> Tagger:
        """The store's table of nouns, or the machine's default tagger if there is no table."""
        if not self.manifest.tagger:
            return default_tagger()
        return MappedTagger(self.manifest.tagger, self._part("nouns."))

    def _part(self, prefix: str) -> dict[str, np.ndarray]:
        return {name.removeprefix(prefix): array for name, array in self._arrays.items() if name.startswith(prefix)}


def verify(path: Path, progress: Callable[[int], None] = lambda count: None) -> Manifest:
    """Read a whole store and compare all checksums. `progress` gets the number of bytes done. Raises StoreError."""
    manifest = Manifest.read(path)
    total = 0
    for name, section in manifest.sections.items():
        check_section(path / manifest.data, name, section)
        total += section.bytes
        progress(total)
    return manifest
