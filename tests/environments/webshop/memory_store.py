"""Stores in memory, built from the original's raw files: what the recorded episodes were played in."""

import itertools
import json
import random
import re
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from starpod.environments.webshop.catalogue.goals import Goals, Kind
from starpod.environments.webshop.catalogue.records import MalformedRecord, read_products
from starpod.environments.webshop.catalogue.synthetic import write_files
from starpod.environments.webshop.search.index import SearchIndex
from starpod.environments.webshop.search.nouns import Tagger
from starpod.environments.webshop.shop.items import Searcher
from tests.environments.webshop.catalogues import real, recorded
from tests.environments.webshop.in_memory import ListCatalogue, StandIn, draw_prices
from tests.golden import ROOT, golden


@dataclass(eq=False)
class MemoryStore:
    """A minimal store without files. All its goals have one kind."""

    catalogue: ListCatalogue
    index: Searcher
    prices: Sequence[float] | np.ndarray
    tagger: Tagger
    goals_there: Goals
    name: str = "memory"
    digest: str = "0123"
    price_seed: int = 0

    def goals(self, kind: Kind, caps: str = "original") -> Goals:
        assert kind == self.goals_there.kind
        return self.goals_there


def build(
    catalogue: ListCatalogue,
    index: Searcher,
    kind: Kind,
    seed: int,
    tagger: Tagger,
    select: Callable[[Goals], Goals] = lambda goals: goals,
) -> MemoryStore:
    """A store with prices and caps drawn from Python's generator of a seed, as the original draws them."""
    rng = random.Random(seed)
    prices = draw_prices(catalogue, rng)
    goals = select(Goals.build(catalogue, kind, prices, rng))
    return MemoryStore(catalogue, index, prices, tagger, goals, price_seed=seed)


@cache
def _index_of(catalogue: ListCatalogue, first: int | None = None) -> SearchIndex:
    """The index of a catalogue's first products."""
    products = itertools.islice((catalogue[position] for position in range(len(catalogue))), first)
    return SearchIndex.build((product.asin, product.index_text()) for product in products)


@cache
def golden_store(name: str) -> MemoryStore:
    """The store of a recorded configuration, c1 to c9."""
    config = next(each for each in configurations() if each["config"] == name)
    rows = config["num_products"]
    catalogue = recorded(config["catalogue"], rows)
    nouns = {row["asin"]: row["nouns"] for row in golden(f"title_nouns_{config['catalogue']}", "webshop_golden")}
    table = {catalogue[position].title: nouns[catalogue[position].asin] for position in range(len(catalogue))}

    def select(goals: Goals) -> Goals:
        other = config["other_arguments"]
        if "filter_goals" not in other:
            return goals
        assert other["filter_goals"] == "price_upper<200"
        return goals.select(lambda _, goal: goal.price_upper < 200, other["limit_goals"])

    return build(
        catalogue,
        _index_of(recorded(config["catalogue"]), rows),
        "human" if config["human_goals"] else "synthetic",
        config["random_seed_before_construction"],
        StandIn("recorded", table.__getitem__),
        select,
    )


def configurations() -> list[dict[str, Any]]:
    path = ROOT / "webshop_golden" / "configs.json"
    if not path.is_file():
        pytest.skip(f"no golden data at {path}; STARPOD_GOLDEN names the folder that holds webshop_golden/")
    configs: list[dict[str, Any]] = json.loads(path.read_text())
    return configs


@cache
def real_store(kind: Kind) -> MemoryStore:
    """The thousand real products, with the stand-in for nouns of the recorded transcripts."""
    return build(real(), _index_of(real()), kind, 0, StandIn("four letters", _long_words))


@cache
def synthetic_store(kind: Kind) -> MemoryStore:
    """A thousand generated products."""
    catalogue = _generated()
    return build(catalogue, _index_of(catalogue), kind, 0, StandIn("four letters", _long_words))


@cache
def _generated() -> ListCatalogue:
    def refuse(malformed: MalformedRecord) -> None:
        raise AssertionError(malformed)

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_files(folder, 1000, 0)
        files = [folder / f"{stem}.json" for stem in ("items_shuffle", "items_ins_v2", "items_human_ins")]
        return ListCatalogue(read_products(*files, on_malformed=refuse))


def _long_words(title: str) -> list[str]:
    words = re.findall(r"\w+", title)
    return [word.lower() for word in words if len(word) >= 4 and re.fullmatch("[A-Za-z]+", word)]
