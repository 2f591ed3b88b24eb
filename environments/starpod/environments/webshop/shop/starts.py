"""The start of an episode: selection of store and goal."""

from __future__ import annotations

import logging
import random
import string
from functools import lru_cache
from typing import TYPE_CHECKING

from starpod.env_server import OptionsError
from starpod.environments.webshop.catalogue.goals import shuffle
from starpod.environments.webshop.store.sections import StoreError
from starpod.environments.webshop.store.served import BUNDLED, stores

from .options import SPLITS, WebShopOptions

if TYPE_CHECKING:
    import numpy as np

    from starpod.environments.webshop.catalogue.goals import Caps, Goals, Kind
    from starpod.environments.webshop.store.store import Store

logger = logging.getLogger(__name__)

PERMUTATION_SEED = 42
"""Seed for shuffling the goals if the option `permute_goals` is set."""


def store_named(name: str) -> Store:
    """Return the server's store with that name; "" means the first one. Raises OptionsError that lists all names."""
    catalogues = stores()
    name = name or next(iter(catalogues))
    if name not in catalogues:
        raise OptionsError(f"this server has no catalogue {name!r}; it has {', '.join(catalogues)}")
    try:
        return catalogues[name]
    except StoreError as error:
        raise OptionsError(str(error)) from error


def open_stores() -> None:
    """Open all stores and load what they need, because an Open would do so in the event loop.

    If the server was given stores, a bundled one that cannot be built is logged.

    Raises:
        StoreError: a store of the server, or the default one, cannot be used.
    """
    catalogues = stores()
    default = next(iter(catalogues))
    for name in catalogues:
        try:
            store = catalogues[name]
            store.index.search("lamp")
            store.tagger.nouns(store.catalogue[0].title)
        except StoreError as error:
            if name not in BUNDLED or name == default:
                raise
            logger.warning("the catalogue %s is missing: %s", name, error)


@lru_cache(maxsize=16)
def goals_of(store: Store, kind: Kind, caps: Caps, limit: int | None) -> Goals:
    """Return the goals of a store.

    Args:
        limit: number of goals to draw by weight; None means all goals.

    Raises:
        OptionsError: there are no goals, or too few for the limit.
    """
    goals = store.goals(kind, caps)
    if not len(goals):
        other_kind = "synthetic" if kind == "human" else "human"
        raise OptionsError(f"the catalogue {store.name!r} has no {kind} goals; choose goals={other_kind}")
    try:
        return goals if limit is None else goals.select(limit=limit)
    except ValueError as error:
        raise OptionsError(str(error)) from None


@lru_cache(maxsize=4)
def _permuted(count: int) -> np.ndarray:
    return shuffle(count, PERMUTATION_SEED)[0]


def choose_goal(options: WebShopOptions, goals: Goals, rng: random.Random, seed: int) -> tuple[str, int]:
    """Select the goal of an episode.

    Args:
        rng: random state. As in the original WebShop, a weighted draw takes ten letters and one uniform number from it.
        seed: the episode's seed. With `choose=seed`, the goal's index in the split is the seed modulo the split's size.

    Returns:
        The session's name, and the index of its goal.

    Raises:
        OptionsError: there is no goal with the index, or none in the split.
    """
    count = len(goals)
    if options.goal is not None:
        if options.goal >= count:
            raise OptionsError(f"goal {options.goal} is beyond the last of {count} goals; choose one below {count}")
        return str(options.goal), options.goal
    if options.choose == "weighted":
        return "".join(rng.choices(string.ascii_lowercase, k=10)), goals.draw(rng)
    start, end = SPLITS[options.splits][options.split]
    size = min(count if end is None else end, count) - start
    if size <= 0:
        raise OptionsError(
            f"the split {options.split} starts at goal {start}, and there are {count}; choose split=all or another "
            "catalogue"
        )
    index = start + (seed % size if options.choose == "seed" else rng.randrange(size))
    if options.permute_goals:
        index = int(_permuted(count)[index])
    return str(index), index
