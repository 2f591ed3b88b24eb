"""The stages of building a store. Each writes its sections and then a note, which marks the stage as finished."""

from __future__ import annotations

import hashlib
import itertools
import random
import shutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, get_args

import numpy as np

from starpod.environments.webshop.catalogue.goals import Caps, Goals, Kind
from starpod.environments.webshop.catalogue.prices import draw_price
from starpod.environments.webshop.catalogue.product import Product
from starpod.environments.webshop.catalogue.records import MalformedRecord, read_products
from starpod.environments.webshop.catalogue.synthetic import FILES, write_files
from starpod.environments.webshop.search.index import SearchIndex
from starpod.environments.webshop.search.nouns import load_tagger

from .mapped import CatalogueWriter, MappedCatalogue
from .nountable import nouns_columns
from .sections import (
    StoreError,
    StoreSection,
    check_section,
    map_section,
    read_json,
    write_array,
    write_json,
)
from .store import Manifest

_REPORT_EVERY = 200

Progress = Callable[[str, int, int | None], None]
"""Called with the name of a stage, the amount that is done, and the total amount if it is known."""


class BuildError(StoreError):
    """A store could not be built; the message says why and what to do.

    The next build continues after the last finished stage.
    """


@dataclass(frozen=True, slots=True)
class Files:
    """The original WebShop's files. For `num_products` see `build`."""

    products: Path
    attributes: Path
    human: Path | None = None
    num_products: int | None = None

    @property
    def text(self) -> str:
        suffix = "" if self.num_products is None else f", the first {self.num_products}"
        return f"{self.products.name}{suffix}"

    def key(self) -> list[Any]:
        """Return the identity of the files: paths, sizes and times. Raises BuildError if one is missing."""
        marks: list[Any] = [self.num_products]
        for path in (self.products, self.attributes, self.human):
            if path is not None:
                try:
                    status = path.stat()
                except OSError as error:
                    raise BuildError(f"cannot read {path}: {error.strerror}") from error
                marks.append([str(path.resolve()), status.st_size, status.st_mtime_ns])
        return marks


@dataclass(frozen=True, slots=True)
class Synthetic:
    """Generated products; `plain` ones have short texts with a small vocabulary."""

    count: int = 1000
    seed: int = 0
    plain: bool = False

    @property
    def text(self) -> str:
        kind = "plain synthetic" if self.plain else "synthetic"
        return f"{kind}, {self.count} products, seed {self.seed}"

    def key(self) -> list[Any]:
        return ["synthetic", self.count, self.seed, self.plain]


@dataclass
class BuildStages:
    """The stages of a build in one folder. `run` executes the unfinished ones."""

    folder: Path
    source: Files | Synthetic
    price_seed: int
    nouns: str
    on_malformed: Callable[[MalformedRecord], None] | None
    progress: Progress
    sections: dict[str, StoreSection] = field(default_factory=dict)
    facts: dict[str, Any] = field(default_factory=dict)
    reported: int = 0

    def run(self) -> Manifest:
        if isinstance(self.source, Synthetic):
            self._stage("products", partial(self._generated_products, self.source))
            shutil.rmtree(self.folder / "input", ignore_errors=True)
        else:
            self._stage("products", partial(self._products, self.source, self.source.num_products))
        self._stage("index", self._index)
        for kind in get_args(Kind):
            for caps in get_args(Caps):
                self._stage(f"goals.{kind}.{caps}", partial(self._goals, kind, caps))
        if self.nouns:
            self._stage("nouns", self._nouns)
        marks = {name: section.sha256 for name, section in self.sections.items()}
        # Do not digest compressed products: another version of zlib makes other bytes.
        marks["products.data"] = marks["products.offsets"] = marks["products.dictionary"] = self.facts["content"]
        return Manifest(
            products=self.facts["products"],
            documents=self.facts["documents"],
            price_seed=self.price_seed,
            tagger=self.facts.get("tagger", ""),
            source=self.source.text,
            skipped=self.facts["skipped"],
            digest=hashlib.sha256(repr(sorted(marks.items())).encode()).hexdigest(),
            data=self.folder.name,
            sections=self.sections,
        )

    def _stage(self, name: str, make: Callable[[], tuple[dict[str, StoreSection], dict[str, Any]]]) -> None:
        note = self.folder / f"{name}.json"
        try:
            stage = read_json(note)
            sections = {key: StoreSection.from_json(section) for key, section in stage["sections"].items()}
            for key, section in sections.items():
                check_section(self.folder, key, section)  # incomplete if the machine lost power
            facts = stage["facts"]
        except (OSError, ValueError, StoreError):
            sections, facts = make()
            write_json(note, {"facts": facts, "sections": {key: sections[key].as_json() for key in sections}})
        self.sections |= sections
        self.facts |= facts

    def _generated_products(self, source: Synthetic) -> tuple[dict[str, StoreSection], dict[str, Any]]:
        """Write generated products into files in the original WebShop's format, which are then read like any others."""
        self._report("input", 0, source.count)
        folder = self.folder / "input"
        folder.mkdir(exist_ok=True)
        report = lambda count: self._report("input", count, source.count)  # noqa: E731
        write_files(folder, source.count, source.seed, plain=source.plain, progress=report)
        products, attributes, human = (folder / name for name in FILES)
        return self._products(Files(products, attributes, human), source.count)

    def _products(self, source: Files, total: int | None) -> tuple[dict[str, StoreSection], dict[str, Any]]:
        stream = random.Random(self.price_seed)
        prices: list[float] = []
        malformed: set[str] = set()

        def note(record: MalformedRecord) -> None:
            if self.on_malformed is None:
                raise BuildError(f"{record}; correct it, or skip such records with --on-malformed skip")
            if str(record) not in malformed:  # the files may be read twice
                malformed.add(str(record))
                self.on_malformed(record)

        self._report("products", 0, total)
        with CatalogueWriter(self.folder) as writer:
            for product in _read(source, source.num_products, note):
                writer.add(product)
                prices.append(draw_price(product.pricing, stream))
                self._report("products", writer.count, total)
            if source.num_products is not None:
                products = itertools.islice(_read(source, None, note), len(prices), source.num_products)
                for product in products:
                    writer.add(product, loaded=False)
        self._report("products", writer.count, writer.count)
        if not prices:
            raise BuildError(f"{source.products} has no product that can be read")
        sections, content = writer.finish()
        sections["prices"] = write_array(self.folder, "prices", np.array(prices))
        version, words, _ = stream.getstate()
        facts = {"products": len(prices), "documents": writer.count, "content": content, "skipped": len(malformed)}
        return sections, {**facts, "random": [version, list(words), None]}

    def _index(self) -> tuple[dict[str, StoreSection], dict[str, Any]]:
        total = self.facts["documents"]
        self._report("index", 0, total)
        index = SearchIndex.build(self._catalogue().documents(), lambda count: self._report("index", count, total))
        return self._write("index", index.arrays), {}

    def _goals(self, kind: Kind, caps: Caps) -> tuple[dict[str, StoreSection], dict[str, Any]]:
        catalogue = self._catalogue()
        version, words, gauss = self.facts["random"]
        stream = random.Random()
        stream.setstate((version, tuple(words), gauss))
        prices = map_section(self.folder, "prices", self.sections["prices"])
        stage = f"goals.{kind}.{caps}"
        self._report(stage, 0, len(catalogue))
        goals = Goals.build(
            catalogue, kind, prices, stream, lambda count: self._report(stage, count, len(catalogue)), caps=caps
        )
        return self._write(stage, goals.arrays), {}

    def _nouns(self) -> tuple[dict[str, StoreSection], dict[str, Any]]:
        tagger = load_tagger(self.nouns)
        catalogue = self._catalogue()
        self._report("nouns", 0, len(catalogue))

        def tagged() -> Iterator[tuple[str, tuple[str, ...]]]:
            for count, product in enumerate(catalogue, 1):
                yield product.title, tagger.nouns(product.title)
                self._report("nouns", count, len(catalogue))

        return self._write("nouns", nouns_columns(tagged())), {"tagger": tagger.name}

    def _catalogue(self) -> MappedCatalogue:
        names = [name for name in self.sections if name.partition(".")[0] not in ("index", "goals", "nouns")]
        arrays = {name: map_section(self.folder, name, self.sections[name]) for name in names}
        return MappedCatalogue(arrays, self.facts["products"])

    def _write(self, stage: str, arrays: Mapping[str, np.ndarray]) -> dict[str, StoreSection]:
        return {f"{stage}.{name}": write_array(self.folder, f"{stage}.{name}", array) for name, array in arrays.items()}

    def _report(self, stage: str, done: int, total: int | None) -> None:
        if done >= self.reported + _REPORT_EVERY or done in (0, total):
            self.reported = done
            self.progress(stage, done, total)


def _read(source: Files, rows: int | None, on_malformed: Callable[[MalformedRecord], None]) -> Iterator[Product]:
    return read_products(source.products, source.attributes, source.human, rows=rows, on_malformed=on_malformed)
