"""The stages of building a store. Each leaves its sections and, last, a note of them: what has a note is done."""

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
from starpod.environments.webshop.catalogue.records import Malformed, read_products
from starpod.environments.webshop.catalogue.synthetic import FILES, write_files
from starpod.environments.webshop.search.index import Index
from starpod.environments.webshop.search.nouns import load_tagger

from .mapped import CatalogueWriter, MappedCatalogue
from .nountable import nouns_columns
from .sections import Section, StoreError, check_section, make_lasting, map_section, read_json, write_array, write_json
from .store import Manifest

_TELL_EVERY = 200

Progress = Callable[[str, int, int | None], None]
"""Told of a stage by name: how much of it is done, and of how much where that is known."""


class BuildError(StoreError):
    """A store that could not be built; the message says why and what to do. What is finished stays for the next try."""


@dataclass(frozen=True, slots=True)
class Files:
    """The original's files. num_products: as in the original, see `build`."""

    products: Path
    attributes: Path
    human: Path | None = None
    num_products: int | None = None

    @property
    def text(self) -> str:
        cut = "" if self.num_products is None else f", the first {self.num_products}"
        return f"{self.products.name}{cut}"

    def key(self) -> list[Any]:
        """Identity of the files: paths, sizes and times. Raises BuildError if one is not there."""
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
    """The bundled generator's products; `plain` ones have short texts of few words."""

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
class Stages:
    """The stages in one folder; `run` does those that are not done."""

    folder: Path
    source: Files | Synthetic
    price_seed: int
    nouns: str
    on_malformed: Callable[[Malformed], None] | None
    progress: Progress
    sections: dict[str, Section] = field(default_factory=dict)
    facts: dict[str, Any] = field(default_factory=dict)
    told: int = 0

    def run(self) -> Manifest:
        if isinstance(self.source, Synthetic):
            self._stage("input", partial(self._input, self.source))
            products, attributes, human = (self.folder / "input" / name for name in FILES)
            self._stage("products", partial(self._products, Files(products, attributes, human), self.source.count))
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
        # Compressed by another version of zlib the same products have other bytes.
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

    def _stage(self, name: str, make: Callable[[], tuple[dict[str, Section], dict[str, Any]]]) -> None:
        note = self.folder / f"{name}.json"
        try:
            done = read_json(note)
            sections = {each: Section.from_json(section) for each, section in done["sections"].items()}
            for each, section in sections.items():
                check_section(self.folder, each, section)  # the machine may have lost its power
            facts = done["facts"]
        except (OSError, ValueError, StoreError):
            sections, facts = make()
            write_json(note, {"facts": facts, "sections": {each: sections[each].as_json() for each in sections}})
        self.sections |= sections
        self.facts |= facts

    def _input(self, source: Synthetic) -> tuple[dict[str, Section], dict[str, Any]]:
        """Generated products in the original's files: they go the way of all others."""
        self._tell("input", 0, source.count)
        folder = self.folder / "input"
        folder.mkdir(exist_ok=True)
        tell = lambda done: self._tell("input", done, source.count)  # noqa: E731
        write_files(folder, source.count, source.seed, plain=source.plain, progress=tell)
        for name in FILES:
            make_lasting(folder / name)  # they have no checksums
        return {}, {}

    def _products(self, source: Files, total: int | None) -> tuple[dict[str, Section], dict[str, Any]]:
        stream = random.Random(self.price_seed)
        prices: list[float] = []
        malformed: set[str] = set()

        def note(found: Malformed) -> None:
            if self.on_malformed is None:
                raise BuildError(f"{found}; mend it, or leave such records out with --on-malformed skip")
            if str(found) not in malformed:  # the files may be read twice
                malformed.add(str(found))
                self.on_malformed(found)

        self._tell("products", 0, total)
        with CatalogueWriter(self.folder) as writer:
            for product in _read(source, source.num_products, note):
                writer.add(product)
                prices.append(draw_price(product.pricing, stream))
                self._tell("products", writer.count, total)
            if source.num_products is not None:
                more = itertools.islice(_read(source, None, note), len(prices), source.num_products)
                for product in more:
                    writer.add(product, loaded=False)
        self._tell("products", writer.count, writer.count)
        if not prices:
            raise BuildError(f"{source.products} has no product that can be read")
        sections, content = writer.finish()
        sections["prices"] = write_array(self.folder, "prices", np.array(prices))
        version, words, _ = stream.getstate()
        facts = {"products": len(prices), "documents": writer.count, "content": content, "skipped": len(malformed)}
        return sections, {**facts, "random": [version, list(words), None]}

    def _index(self) -> tuple[dict[str, Section], dict[str, Any]]:
        total = self.facts["documents"]
        self._tell("index", 0, total)
        index = Index.build(self._catalogue().documents(), lambda done: self._tell("index", done, total))
        return self._write("index", index.arrays), {}

    def _goals(self, kind: Kind, caps: Caps) -> tuple[dict[str, Section], dict[str, Any]]:
        catalogue = self._catalogue()
        version, words, gauss = self.facts["random"]
        stream = random.Random()
        stream.setstate((version, tuple(words), gauss))
        prices = map_section(self.folder, "prices", self.sections["prices"])
        stage = f"goals.{kind}.{caps}"
        self._tell(stage, 0, len(catalogue))
        goals = Goals.build(
            catalogue, kind, prices, stream, lambda done: self._tell(stage, done, len(catalogue)), caps=caps
        )
        return self._write(stage, goals.arrays), {}

    def _nouns(self) -> tuple[dict[str, Section], dict[str, Any]]:
        tagger = load_tagger(self.nouns)
        catalogue = self._catalogue()
        self._tell("nouns", 0, len(catalogue))

        def tagged() -> Iterator[tuple[str, tuple[str, ...]]]:
            for done, product in enumerate(catalogue, 1):
                yield product.title, tagger.nouns(product.title)
                self._tell("nouns", done, len(catalogue))

        return self._write("nouns", nouns_columns(tagged())), {"tagger": tagger.name}

    def _catalogue(self) -> MappedCatalogue:
        names = [name for name in self.sections if name.partition(".")[0] not in ("index", "goals", "nouns")]
        arrays = {name: map_section(self.folder, name, self.sections[name]) for name in names}
        return MappedCatalogue(arrays, self.facts["products"])

    def _write(self, stage: str, arrays: Mapping[str, np.ndarray]) -> dict[str, Section]:
        return {f"{stage}.{name}": write_array(self.folder, f"{stage}.{name}", array) for name, array in arrays.items()}

    def _tell(self, stage: str, done: int, total: int | None) -> None:
        if done >= self.told + _TELL_EVERY or done in (0, total):
            self.told = done
            self.progress(stage, done, total)


def _read(source: Files, rows: int | None, on_malformed: Callable[[Malformed], None]) -> Iterator[Product]:
    return read_products(source.products, source.attributes, source.human, rows=rows, on_malformed=on_malformed)
