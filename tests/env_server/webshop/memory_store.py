"""Stores in memory, built from the original's raw files: what the recorded episodes were played in."""

from __future__ import annotations

import gzip
import itertools
import json
import random
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from starpod.env_server.webshop.catalogue import ListCatalogue
from starpod.env_server.webshop.goals import Goals, Kind
from starpod.env_server.webshop.index import Index
from starpod.env_server.webshop.nouns import Tagger
from starpod.env_server.webshop.prices import draw_prices
from starpod.env_server.webshop.product import Product
from starpod.env_server.webshop.records import Malformed, read_products
from starpod.env_server.webshop.shelves import Searcher
from tests.golden import ROOT, golden


@dataclass(eq=False)
class MemoryStore:
    """What the environment needs of a store, without files. Its goals are those of one kind."""

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


class StandIn:
    """The tagger of the recordings: any word that is in the recorded table, or found by a rule."""

    def __init__(self, name: str, nouns: Callable[[str], Sequence[str]]) -> None:
        self.name = name
        self._nouns = nouns

    def nouns(self, title: str) -> tuple[str, ...]:
        return tuple(self._nouns(title))


def build(
    products: Sequence[Product],
    index: Searcher,
    kind: Kind,
    seed: int,
    tagger: Tagger,
    select: Callable[[Goals], Goals] = lambda goals: goals,
) -> MemoryStore:
    """A store with prices and caps drawn from Python's generator of a seed, as the original draws them."""
    catalogue, rng = ListCatalogue(products), random.Random(seed)
    prices = draw_prices(catalogue, rng)
    goals = select(Goals.build(catalogue, kind, prices, rng))
    return MemoryStore(catalogue, index, prices, tagger, goals, price_seed=seed)


def _refuse(malformed: Malformed) -> None:
    raise AssertionError(malformed)


def read(folder: Path, names: tuple[str, str, str], rows: int | None = None) -> list[Product]:
    items, attributes, human = (folder / name for name in names)
    return list(read_products(items, attributes, human, rows=rows, on_malformed=_refuse))


@lru_cache
def index_of(folder: Path, names: tuple[str, str, str], first: int | None = None) -> Index:
    """The index of the first valid products of the files."""
    products = itertools.islice(read(folder, names), first)
    return Index.build((product.asin, product.index_text()) for product in products)


_GOLDEN_FILES = ("items_shuffle.json.gz", "items_ins_v2.json.gz", "items_human_ins.json.gz")


@lru_cache
def golden_store(name: str) -> MemoryStore:
    """The store of a recorded configuration, c1 to c9."""
    config = next(each for each in configurations() if each["config"] == name)
    folder = ROOT / "webshop_golden" / "catalogue" / config["catalogue"]
    nouns = {row["asin"]: row["nouns"] for row in golden(f"title_nouns_{config['catalogue']}", "webshop_golden")}
    products = read(folder, _GOLDEN_FILES, config["num_products"])
    table = {product.title: nouns[product.asin] for product in products}

    def select(goals: Goals) -> Goals:
        other = config["other_arguments"]
        if "filter_goals" not in other:
            return goals
        assert other["filter_goals"] == "price_upper<200"
        return goals.select(lambda _, goal: goal.price_upper < 200, other["limit_goals"])

    return build(
        products,
        index_of(folder, _GOLDEN_FILES, config["num_products"]),
        "human" if config["human_goals"] else "synthetic",
        config["random_seed_before_construction"],
        StandIn("recorded", table.__getitem__),
        select,
    )


def configurations() -> list[dict[str, Any]]:
    path = ROOT / "webshop_golden" / "configs.json"
    if not path.is_file():
        pytest.skip(f"no golden data at {path}")
    configs: list[dict[str, Any]] = json.loads(path.read_text())
    return configs


def recorded_prices(name: str) -> dict[str, float]:
    with gzip.open(ROOT / "webshop_golden" / f"prices_{name}.json.gz", "rt") as file:
        prices: dict[str, float] = json.load(file)
    return prices


_REAL_FILES = ("items_shuffle_1000.reconstructed.json", "items_ins_v2_1000.json", "items_human_ins.subset13.json")


@lru_cache
def real_store(kind: Kind) -> MemoryStore:
    """The thousand real products, with the stand-in for nouns of the recorded transcripts."""
    folder = ROOT / "webshop_data"
    if not (folder / _REAL_FILES[0]).is_file():
        pytest.skip(f"no data at {folder}")

    def nouns(title: str) -> list[str]:
        words = re.findall(r"\w+", title)
        return [word.lower() for word in words if len(word) >= 4 and re.fullmatch("[A-Za-z]+", word)]

    return build(read(folder, _REAL_FILES), index_of(folder, _REAL_FILES), kind, 0, StandIn("four letters", nouns))
