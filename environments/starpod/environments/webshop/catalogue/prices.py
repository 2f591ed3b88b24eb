"""The price that a purchase is judged by: one number per product, drawn once where the record gives a range."""

from __future__ import annotations

import random
from bisect import bisect_right

LADDER = tuple(10.0 * rung for rung in range(1, 100))
"""The price caps that an instruction may name, in dollars."""

NO_CAP = 1_000_000.0
"""The cap of a goal that names none."""


def draw_price(pricing: tuple[float, ...], rng: random.Random) -> float:
    """The price of one product: its number, or a uniform draw between its two."""
    return pricing[0] if len(pricing) == 1 else rng.uniform(pricing[0], pricing[1])


def cap_candidates(price: float) -> tuple[float, ...]:
    """The caps that suit a price: the next four rungs of the ladder above it; fewer near its end."""
    first = bisect_right(LADDER, price)
    return LADDER[first : first + 4]


def draw_cap(price: float, rng: random.Random) -> float:
    """The larger of two candidates drawn without replacement; `NO_CAP`, without a draw, where there are not two."""
    candidates = cap_candidates(price)
    return max(rng.sample(candidates, 2)) if len(candidates) > 1 else NO_CAP
