"""When calls are due: arrivals of an open loop, and the time that an agent thinks in a closed one."""

from __future__ import annotations

import math
import random
import re
from collections.abc import Callable, Iterator
from typing import Literal

Arrivals = Literal["poisson", "constant"]

UNITS = {"ns": 1e-9, "us": 1e-6, "µs": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0}
_DURATION = re.compile(r"([0-9]*\.?[0-9]+(?:e-?[0-9]+)?)\s*([a-zµ]+)")


def parse_duration(text: str) -> float:
    """Seconds of `20ms`, `1.5s`, `50us`, `2m`; also of a plain 0. Raises ValueError."""
    if text.strip() == "0":
        return 0.0
    match = _DURATION.fullmatch(text.strip().lower())
    if match is None or match[2] not in UNITS:
        raise ValueError(f"{text!r} is not a duration: write a number and a unit, as in 20ms, 1.5s or 50us")
    return float(match[1]) * UNITS[match[2]]


def arrivals(kind: Arrivals, rate: float, start: float, place: int, places: int, seed: int) -> Iterator[float]:
    """The instants at which calls are due, without end, for one of `places` generators that share `rate` per second.

    constant: each instant is computed from the start, so that rounding never adds up to a drift; the generators take
    turns. poisson: independent gaps; together the generators make a Poisson process of the whole rate.
    """
    if kind == "constant":
        number = place
        while True:
            yield start + number / rate
            number += places
    rng = random.Random(f"{seed}/{place}")
    due = start
    while True:
        due += rng.expovariate(rate / places)
        yield due


class Think:
    """How long an agent thinks between two steps. text: as it was written. draw: seconds, from a random stream."""

    __slots__ = ("draw", "text")

    def __init__(self, text: str) -> None:
        """Raises ValueError with the forms that there are."""
        self.text = text
        self.draw = _thinker(text)

    def __reduce__(self) -> tuple[type[Think], tuple[str]]:
        return Think, (self.text,)

    def __bool__(self) -> bool:
        return self.text != "0"


def _thinker(text: str) -> Callable[[random.Random], float]:
    kind, colon, rest = text.partition(":")
    try:
        if not colon:
            seconds = parse_duration(text)
            return lambda _: seconds
        if kind == "exponential":
            mean = parse_duration(rest)
            return lambda rng: rng.expovariate(1 / mean) if mean else 0.0
        if kind == "uniform":
            low, high = map(parse_duration, rest.split(".."))
            return lambda rng: rng.uniform(low, high)
        if kind == "lognormal":
            first, second = rest.split(",")
            middle, sigma = math.log(parse_duration(first)), float(second)
            return lambda rng: rng.lognormvariate(middle, sigma)
    except ValueError as error:
        raise ValueError(f"think time {text!r}: {error}; {_FORMS}") from None
    raise ValueError(f"think time {text!r} is of no known kind; {_FORMS}")


_FORMS = "write 50ms, exponential:MEAN, uniform:LOW..HIGH or lognormal:MEDIAN,SIGMA, as in lognormal:2s,0.8"
