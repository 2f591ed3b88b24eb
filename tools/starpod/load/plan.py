"""The plan of a run: servers, policies, stages, and when calls are due. Plain values that travel to processes."""

from __future__ import annotations

import math
import random
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from starpod.client.transport import Transport

Arrivals = Literal["poisson", "constant"]
Wire = Literal["stream", "unary", "openenv"]
PolicyKind = Literal["random", "expert", "recorded"]
EXTRAS = ("render", "fork", "snapshot", "renew")
"""Calls that --mix may ask for besides steps."""


@dataclass(frozen=True, slots=True)
class Place:
    """A server. address: host:port, or a URL. server_name: whom a resolved address stands for."""

    address: str
    server_name: str = ""


@dataclass(frozen=True, slots=True)
class Turns:
    """What the agents do.

    kind: random: `actions` where there are any, else the observation's valid ones; expert: the environment's advice.
    actions: text, or JSON objects for an OpenEnv server. episodes: of a recording.
    """

    kind: PolicyKind = "random"
    actions: tuple[str, ...] = ()
    episodes: tuple[Mapping[str, Any], ...] = ()


@dataclass(frozen=True, slots=True)
class Plan:
    """What stays the same in all stages of a run.

    wire: how calls travel.
    mix: besides steps, calls of this kind per step. episodes_per_session: a new session after so many; 0: never.
    timeout: seconds after which a call counts as a missed deadline and is asked again.
    retry_overload: wait as RetryInfo says and send the call again, instead of dropping it.
    record: keep what is played.
    """

    places: tuple[Place, ...]
    transport: Transport
    wire: Wire
    environment_id: str = ""
    version: str = ""
    options: Mapping[str, Any] | None = None
    turns: Turns = field(default_factory=Turns)
    mix: Mapping[str, float] = field(default_factory=dict)
    think: Think = field(default_factory=lambda: Think("0"))
    episodes_per_session: int = 0
    seed: int = 0
    timeout: float = 30.0
    retry_overload: bool = True
    processes: int = 1
    record: bool = False

    @property
    def continuous(self) -> bool:
        """In a closed loop each session steps again, with plain text, as soon as its reply is there."""
        turns = [turn for episode in self.turns.episodes for turn in episode["turns"]]
        texts = all(isinstance(action, str) for turn in turns for action in turn)
        blind = self.turns.kind == "recorded" or (self.turns.kind == "random" and bool(self.turns.actions))
        return blind and texts and not (self.mix or self.think or self.record)


@dataclass(frozen=True, slots=True)
class Stage:
    """One load, held for a while. rate: steps due per second over all generators; None: a closed loop.

    warmup: seconds before anything counts. interval: seconds between points of the curves.
    """

    name: str
    sessions: int
    seconds: float
    warmup: float
    rate: float | None = None
    arrivals: Arrivals = "poisson"

    @property
    def interval(self) -> float:
        """Fine enough for forty points, so that intervals can be drawn from; a second at most."""
        return min(max(self.seconds / 40, 0.05), 1.0)


# --- schedules --------------------------------------------------------------------------------------------------------

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
