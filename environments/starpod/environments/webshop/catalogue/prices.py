"""Prices of products (if the record gives a range, the price is drawn once) and price caps of goals."""

from __future__ import annotations

import random
from bisect import bisect_right

LADDER = tuple(10.0 * rung for rung in range(1, 100))
"""The possible price caps of instructions, in dollars."""

NO_CAP = 1_000_000.0
"""Price cap of a goal whose instruction names none."""


def draw_price(pricing: tuple[float, ...], rng: random.Random) -> float:
    """Return the price of a product, drawn uniformly if `pricing` is a range."""
    return pricing[0] if len(pricing) == 1 else rng.uniform(pricing[0], pricing[1])


def cap_candidates(price: float) -> tuple[float, ...]:
    """Return the next four caps in LADDER above a price, or fewer if LADDER ends before."""
    start = bisect_right(LADDER, price)
    return LADDER[start : start + 4]


def draw_cap(price: float, rng: random.Random) -> float:
    """Draw two candidates and return the larger one. With fewer than two candidates, return NO_CAP without a draw."""
    candidates = cap_candidates(price)
    return max(rng.sample(candidates, 2)) if len(candidates) > 1 else NO_CAP
