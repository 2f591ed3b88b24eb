"""Start of an episode: its store, the goals, and the choice of one."""

from __future__ import annotations

import random
import string
from functools import lru_cache
from typing import TYPE_CHECKING

from starpod.env_server import OptionsError
from starpod.environments.webshop.catalogue.goals import shuffle
from starpod.environments.webshop.store.sections import StoreError
from starpod.environments.webshop.store.served import BUNDLED, SYNTHETIC, stores

from .options import SPLITS, WebShopOptions

if TYPE_CHECKING:
    import numpy as np

    from starpod.environments.webshop.catalogue.goals import Caps, Goals, Kind
    from starpod.environments.webshop.store.store import Store

PERMUTATION_SEED = 42
"""Orders the goals where they are permuted."""


def store_named(name: str) -> Store:
    """The store of this server with that name, the first one for none. Raises OptionsError naming those there are."""
    there = stores()
    name = name or next(iter(there))
    if name not in there:
        raise OptionsError(f"this server has no catalogue {name!r}; it has {', '.join(there)}")
    try:
        return there[name]
    except StoreError as error:
        raise OptionsError(str(error)) from error


def open_stores() -> None:
    """Opens the stores that this server was given, or the synthetic one where it was given none, and what they need.

    Raises StoreError.
    """
    there = stores()
    for name in [name for name in there if name not in BUNDLED] or [SYNTHETIC]:
        store = there[name]
        store.index.search("lamp")
        store.tagger.nouns(store.catalogue[0].title)


@lru_cache(maxsize=16)
def goals_of(store: Store, kind: Kind, caps: Caps, limit: int | None) -> Goals:
    """The goals of a store, limited to so many drawn by weight. Raises OptionsError where there is none, or too few."""
    goals = store.goals(kind, caps)
    if not len(goals):
        other = "synthetic" if kind == "human" else "human"
        raise OptionsError(f"the catalogue {store.name!r} has no {kind} goals; choose goals={other}")
    try:
        return goals if limit is None else goals.select(limit=limit)
    except ValueError as error:
        raise OptionsError(str(error)) from None


@lru_cache(maxsize=4)
def _permuted(count: int) -> np.ndarray:
    return shuffle(count, PERMUTATION_SEED)[0]


def choose_goal(options: WebShopOptions, goals: Goals, rng: random.Random, seed: int) -> tuple[str, int]:
    """The session's name and the index of its goal, by the options.

    seed: counts the goals of the split where they are chosen by seed. rng: draws otherwise; a weighted draw takes from
    it what the original takes, ten letters and one uniform number.
    Raises OptionsError for an index or a split that the goals do not have.
    """
    count = len(goals)
    if options.goal is not None:
        if options.goal >= count:
            raise OptionsError(f"goal {options.goal} is beyond the last of {count} goals; choose one below {count}")
        return str(options.goal), options.goal
    if options.choose == "weighted":
        return "".join(rng.choices(string.ascii_lowercase, k=10)), goals.draw(rng)
    first, end = SPLITS[options.splits][options.split]
    size = min(count if end is None else end, count) - first
    if size <= 0:
        raise OptionsError(
            f"the split {options.split} starts at goal {first}, and there are {count}; choose split=all or another "
            "catalogue"
        )
    index = first + (seed % size if options.choose == "seed" else rng.randrange(size))
    if options.permute_goals:
        index = int(_permuted(count)[index])
    return str(index), index
