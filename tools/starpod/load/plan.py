"""The plan of a run: servers, stages, when calls are due, and what the agents do."""

from __future__ import annotations

import functools
import json
import math
import random
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from google.protobuf import json_format

from starpod.client.transport import Transport
from starpod.v1 import environment_pb2 as pb

Arrivals = Literal["poisson", "constant"]
Wire = Literal["stream", "unary"]
PolicyKind = Literal["random", "expert", "recorded"]
PATHS = {
    "columns": "in columns, one message for many",
    "messages": "on a Stream, a message of its own for each",
    "unary": "in unary calls",
}
"""Ways in which steps travel, the fastest first, in words."""
EXTRAS = ("render", "fork", "snapshot", "renew")
"""Calls that --mix may ask for besides steps."""


@dataclass(frozen=True, slots=True)
class Place:
    """A server. address: host:port. server_name: the host name that the address was resolved from."""

    address: str
    server_name: str = ""


@dataclass(frozen=True, slots=True)
class Turns:
    """What the agents do.

    kind: random: `actions` where there are any, else the observation's valid ones; expert: the environment's advice.
    actions: text. episodes: of a recording.
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


@dataclass(frozen=True, slots=True)
class Think:
    """How long an agent thinks between two steps. Raises ValueError with the forms that there are."""

    text: str

    def __post_init__(self) -> None:
        _thinker(self.text)

    def __bool__(self) -> bool:
        return self.text != "0"

    def draw(self, rng: random.Random) -> float:
        """Seconds, from a random stream."""
        return _thinker(self.text)(rng)


@functools.cache
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


# --- policies ---------------------------------------------------------------------------------------------------------

Turn = Sequence[str] | Sequence[pb.Action]

FORMAT = "starpod-load-recording"
_AHEAD = 1 << 16


class Policy(ABC):
    """One agent."""

    def begin(self) -> tuple[int | None, int | None]:
        """A new episode: its seed and its dynamics seed, where the policy knows them."""
        return None, None

    @abstractmethod
    def next(self, observation: pb.Observation | None) -> Turn | None:
        """The agent's turn; None: the episode ends here, and another one begins."""


@functools.lru_cache(1)
def _drawn(actions: tuple[str, ...], seed: int) -> list[tuple[str]]:
    """Turns of one random action each, drawn ahead and shared: a draw per step would cost as much as all the rest."""
    return [(action,) for action in random.Random(seed).choices(actions, k=_AHEAD)]


class Listed(Policy):
    """Any of the given actions; each agent reads the same long list from a place of its own."""

    def __init__(self, turns: Sequence[tuple[str]], rng: random.Random) -> None:
        self._turns = turns
        self._place = rng.randrange(_AHEAD)

    def next(self, observation: pb.Observation | None) -> Turn:
        self._place = (self._place + 1) % _AHEAD
        return self._turns[self._place]


class Valid(Policy):
    """Any action that the observation lists as valid; none where it lists none."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng

    def next(self, observation: pb.Observation | None) -> Turn:
        valid = observation.valid_actions if observation is not None else ()
        return as_turn([self._rng.choice(valid)]) if valid else ()


class Expert(Policy):
    """What the environment advises; where it knows nothing, what another policy would do."""

    def __init__(self, otherwise: Policy) -> None:
        self._otherwise = otherwise

    def next(self, observation: pb.Observation | None) -> Turn | None:
        if observation is not None and observation.HasField("expert_action"):
            return as_turn([observation.expert_action])
        return self._otherwise.next(observation)


class Recorded(Policy):
    """Plays episodes of a recording, one after the other, from its own place in it and round again."""

    def __init__(self, episodes: Sequence[Mapping[str, Any]], place: int) -> None:
        self._episodes = episodes
        self._episode = place - 1
        self._turns: Iterator[Turn] = iter(())

    def begin(self) -> tuple[int | None, int | None]:
        self._episode = (self._episode + 1) % len(self._episodes)
        episode = self._episodes[self._episode]
        self._turns = map(_read_turn, episode["turns"])
        return episode.get("seed"), episode.get("dynamics_seed")

    def next(self, observation: pb.Observation | None) -> Turn | None:
        return next(self._turns, None)


def make_policy(turns: Turns, place: int, seed: int) -> Policy:
    """The policy of the session with this number."""
    rng = random.Random(f"{seed}/{place}")
    if turns.kind == "recorded":
        return Recorded(turns.episodes, place % len(turns.episodes))
    policy = Listed(_drawn(turns.actions, seed), rng) if turns.actions else Valid(rng)
    return Expert(policy) if turns.kind == "expert" else policy


def as_turn(actions: Sequence[pb.Action]) -> Turn:
    """Plain strings where all actions are text: those travel in columns."""
    if all(action.WhichOneof("kind") == "text" for action in actions):
        return [action.text for action in actions]
    return actions


# --- recordings ----------------------------------------------------------------------------------------------------


def write_turn(turn: Turn) -> list[Any]:
    """A turn as JSON values: text as it is, other actions as protobuf's JSON."""
    return [action if isinstance(action, str) else json_format.MessageToDict(action) for action in turn]


def _read_turn(values: Sequence[Any]) -> Turn:
    if all(isinstance(value, str) for value in values):
        return values
    return [
        pb.Action(text=value) if isinstance(value, str) else json_format.ParseDict(value, pb.Action())
        for value in values
    ]


def write_recording(path: Path, environment: str, episodes: Sequence[Mapping[str, Any]]) -> None:
    """One line that says what it is, then one line for each episode."""
    head = {"format": FORMAT, "version": 1, "environment": environment, "episodes": len(episodes)}
    path.write_text("".join(json.dumps(line) + "\n" for line in (head, *episodes)), encoding="utf-8")


def read_recording(path: Path, environment: str) -> tuple[Mapping[str, Any], ...]:
    """The episodes of a recording. Raises ValueError if it is none, or one of another environment."""
    try:
        lines = path.read_text(encoding="utf-8-sig").split("\n")
        head, *episodes = [json.loads(line) for line in lines if line.strip()]
        fits = head.get("format") == FORMAT and all(isinstance(episode["turns"], list) for episode in episodes)
    except (ValueError, TypeError, KeyError, AttributeError):
        fits = False
    if not fits:
        raise ValueError(f"{path} is not a recording; make one with: starpod load ... --record {path}")
    if environment and head["environment"] and head["environment"] != environment:
        raise ValueError(f"{path} was recorded in {head['environment']}, not in {environment}")
    episodes = [episode for episode in episodes if episode["turns"]]
    if not episodes:
        raise ValueError(f"{path} holds no episode with a turn")
    return tuple(episodes)
