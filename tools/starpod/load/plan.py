"""The plan of a run: servers, stages, when calls are due, and how the agents choose their actions."""

from __future__ import annotations

import functools
import itertools
import json
import math
import random
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from google.protobuf import json_format, struct_pb2

from starpod.client.transport import Transport
from starpod.serving.options import parse_duration
from starpod.v1 import environment_pb2 as pb

Arrivals = Literal["poisson", "constant"]
Wire = Literal["stream", "unary"]
PolicyKind = Literal["random", "expert", "recorded"]
PATHS = {
    "columns": "in columns, one message for many",
    "messages": "on a Stream, one message for each",
    "unary": "in unary calls",
}
"""Descriptions of the ways in which steps travel, fastest first."""
EXTRAS = ("render", "fork", "snapshot", "renew")
"""Calls besides steps that --mix accepts."""


@dataclass(frozen=True, slots=True)
class ServerAddress:
    """Address of a server."""

    address: str
    """Address in the form host:port."""
    server_name: str = ""
    """The host name that a dns:/// address was resolved from; empty for others."""


@dataclass(frozen=True, slots=True)
class ActionSource:
    """The way in which agents choose their actions."""

    kind: PolicyKind = "random"
    """How actions are chosen.

    random: one of `actions` or, if there are none, of the valid actions. expert: the action that the environment
    advises. recorded: the actions of `episodes`."""
    actions: tuple[str, ...] = ()
    episodes: tuple[Mapping[str, Any], ...] = ()
    """The episodes of a recording."""


@dataclass(frozen=True, slots=True)
class LoadPlan:
    """The settings that all stages of a run share."""

    places: tuple[ServerAddress, ...]
    transport: Transport
    wire: Wire
    environment_id: str = ""
    version: str = ""
    options: Mapping[str, Any] | None = None
    turns: ActionSource = field(default_factory=ActionSource)
    mix: Mapping[str, float] = field(default_factory=dict)
    """Average number of extra calls per step, by name of the extra call."""
    think: Think = field(default_factory=lambda: Think("0"))
    episodes_per_session: int = 0
    """Open a new session after this many episodes; 0: never."""
    seed: int = 0
    timeout: float = 30.0
    """Seconds after which a call counts as a missed deadline and is sent again."""
    retry_overload: bool = True
    """Whether to send a call refused for overload again after the delay in RetryInfo, instead of dropping it."""
    processes: int = 1
    record: bool = False
    """Whether to keep the episodes that are played."""

    @property
    def options_message(self) -> struct_pb2.Struct | None:
        """The environment's options as in OpenRequest."""
        message = struct_pb2.Struct()
        message.update(dict(self.options or {}))
        return message if self.options else None

    @property
    def want(self) -> pb.Want:
        """The observation's fields that the agents look at."""
        chooses = self.turns.kind != "recorded"
        return pb.Want(valid_actions=chooses and not self.turns.actions, expert_action=self.turns.kind == "expert")

    @property
    def continuous(self) -> bool:
        """Whether a closed-loop session can send its next step, in plain text, without reading the previous reply."""
        turns = [turn for episode in self.turns.episodes for turn in episode["turns"]]
        texts = all(isinstance(action, str) for turn in turns for action in turn)
        is_blind = self.turns.kind == "recorded" or (self.turns.kind == "random" and bool(self.turns.actions))
        return is_blind and texts and not (self.mix or self.think or self.record or self.episodes_per_session)


@dataclass(frozen=True, slots=True)
class Stage:
    """A period with constant load."""

    name: str
    sessions: int
    seconds: float
    warmup: float
    """Seconds before the measured time."""
    rate: float | None = None
    """Steps due per second over all generators; None: a closed loop."""
    arrivals: Arrivals = "poisson"

    @property
    def interval(self) -> float:
        """Seconds per interval: a fortieth of the stage, so that a bootstrap has enough intervals, from 0.05 to 1.

        Stages over ten minutes have 600 longer intervals, because the report holds all histograms of a call in memory
        at once (270 kB each).
        """
        return max(min(max(self.seconds / 40, 0.05), 1.0), self.seconds / 600)


# --- schedules --------------------------------------------------------------------------------------------------------


def arrivals(kind: Arrivals, rate: float, start: float, place: int, places: int, seed: int) -> Iterator[float]:
    """Yield the instants at which calls are due, without end, for one of the generators that share a rate.

    Args:
        kind: constant: instants are computed from the start, so that rounding errors do not add up, and generators take
            turns. poisson: gaps are independent, so that all generators together make a Poisson process.
        rate: calls per second of all generators.
        start: the instant from which calls are due. Only `constant` has a call at exactly this instant.
        place: the number of this generator, from 0.
        places: the number of generators.
        seed: seed of the gaps.
    """
    if kind == "constant":
        number = place
        while True:
            yield start + number / rate
            number += places
    rng = random.Random(f"{seed}/{place}")
    due_time = start
    while True:
        due_time += rng.expovariate(rate / places)
        yield due_time


@dataclass(frozen=True, slots=True)
class Think:
    """The distribution of pauses before steps. For invalid text, raises a ValueError that lists the valid forms."""

    text: str

    def __post_init__(self) -> None:
        _parse_think(self.text)

    def __bool__(self) -> bool:
        return self.text != "0"

    def draw(self, rng: random.Random) -> float:
        """Return a pause in seconds, drawn with `rng`."""
        return _parse_think(self.text)(rng)


@functools.cache
def _parse_think(text: str) -> Callable[[random.Random], float]:
    kind, colon, argument = text.partition(":")
    try:
        if not colon:
            seconds = parse_duration(text)
            return lambda _: seconds
        if kind == "exponential":
            mean = parse_duration(argument)
            return lambda rng: rng.expovariate(1 / mean) if mean else 0.0
        if kind == "uniform":
            low, high = map(parse_duration, argument.split(".."))
            return lambda rng: rng.uniform(low, high)
        if kind == "lognormal":
            median, deviation = argument.split(",")
            middle, sigma = math.log(parse_duration(median)), float(deviation)
            if not 0 <= sigma <= 10:
                raise ValueError("SIGMA is a number from 0 to 10")
            return lambda rng: rng.lognormvariate(middle, sigma)
    except ValueError as error:
        raise ValueError(f"think time {text!r}: {error}; {_FORMS}") from None
    raise ValueError(f"think time {text!r} is of no known kind; {_FORMS}")


_FORMS = "write 50ms, exponential:MEAN, uniform:LOW..HIGH or lognormal:MEDIAN,SIGMA, as in lognormal:2s,0.8"


# --- policies ---------------------------------------------------------------------------------------------------------

Turn = Sequence[str] | Sequence[pb.Action]

FORMAT = "starpod-load-recording"
_DRAWN_TURNS = 1 << 16


SEED_STRIDE = 2**20
"""Difference between the seeds of a session's episodes, larger than the number of a run's sessions."""


class SessionPolicy(ABC):
    """An agent that chooses the actions of one session.

    Attributes:
        seeds: seeds of its episodes, unless it prescribes others.
    """

    seeds: Iterator[int] = itertools.count()

    def begin(self) -> tuple[int, int | None]:
        """Begin an episode. Return its seed, and its dynamics seed (None lets the server derive one)."""
        return next(self.seeds), None

    @abstractmethod
    def next(self, observation: pb.Observation | None) -> Turn | None:
        """Return the agent's next turn, or None to end the episode and begin another one."""


@functools.lru_cache(1)
def _draw_turns(actions: tuple[str, ...], seed: int) -> list[tuple[str]]:
    """Draw random turns for all agents in advance, because drawing one would cost as much as the rest of a step."""
    return [(action,) for action in random.Random(seed).choices(actions, k=_DRAWN_TURNS)]


class Listed(SessionPolicy):
    """SessionPolicy that plays random turns of one list. All agents share the list and start at different places."""

    def __init__(self, turns: Sequence[tuple[str]], rng: random.Random) -> None:
        self._turns = turns
        self._place = rng.randrange(_DRAWN_TURNS)

    def next(self, observation: pb.Observation | None) -> Turn:
        self._place = (self._place + 1) % _DRAWN_TURNS
        return self._turns[self._place]


class Valid(SessionPolicy):
    """SessionPolicy that plays a random valid action of the observation, or an empty turn if it lists none."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng

    def next(self, observation: pb.Observation | None) -> Turn:
        actions = observation.valid_actions if observation is not None else ()
        return as_turn([self._rng.choice(actions)]) if actions else ()


class Expert(SessionPolicy):
    """SessionPolicy that follows the environment's advice, or another policy if there is no advice."""

    def __init__(self, fallback: SessionPolicy) -> None:
        self._fallback = fallback

    def next(self, observation: pb.Observation | None) -> Turn | None:
        if observation is not None and observation.HasField("expert_action"):
            return as_turn([observation.expert_action])
        return self._fallback.next(observation)


class Recorded(SessionPolicy):
    """SessionPolicy that plays the episodes of a recording in order, again and again, starting at index `place`."""

    def __init__(self, episodes: Sequence[Mapping[str, Any]], place: int) -> None:
        self._episodes = episodes
        self._episode = place - 1
        self._turns: Iterator[Turn] = iter(())

    def begin(self) -> tuple[int, int | None]:
        self._episode = (self._episode + 1) % len(self._episodes)
        episode = self._episodes[self._episode]
        self._turns = map(_read_turn, episode["turns"])
        seed = episode.get("seed")
        return next(self.seeds) if seed is None else seed, episode.get("dynamics_seed")

    def next(self, observation: pb.Observation | None) -> Turn | None:
        return next(self._turns, None)


def make_policy(turns: ActionSource, place: int, seed: int) -> SessionPolicy:
    """Return the policy of a session.

    Args:
        place: number of the session, from 0. It determines the random state, the start seeds and the first recording.
    """
    rng = random.Random(f"{seed}/{place}")
    policy: SessionPolicy
    if turns.kind == "recorded":
        policy = Recorded(turns.episodes, place % len(turns.episodes))
    else:
        policy = Listed(_draw_turns(turns.actions, seed), rng) if turns.actions else Valid(rng)
    policy = Expert(policy) if turns.kind == "expert" else policy
    policy.seeds = itertools.count(seed + place, SEED_STRIDE)
    return policy


def as_turn(actions: Sequence[pb.Action]) -> Turn:
    """Return plain strings if all actions are text, because only those travel in columns."""
    if all(action.WhichOneof("kind") == "text" for action in actions):
        return [action.text for action in actions]
    return actions


# --- recordings ----------------------------------------------------------------------------------------------------


def write_turn(turn: Turn) -> list[Any]:
    """Return a turn as JSON values: text as it is, other actions in protobuf's JSON form."""
    return [action if isinstance(action, str) else json_format.MessageToDict(action) for action in turn]


def _read_turn(values: Sequence[Any]) -> Turn:
    if all(isinstance(value, str) for value in values):
        return values
    return [
        pb.Action(text=value) if isinstance(value, str) else json_format.ParseDict(value, pb.Action())
        for value in values
    ]


def write_recording(path: Path, environment: str, episodes: Sequence[Mapping[str, Any]]) -> None:
    """Write or replace a recording: a header line, then one line of JSON per episode.

    Args:
        episodes: episodes with `turns` as of `write_turn`, and optionally `seed` and `dynamics_seed`.
    """
    head = {"format": FORMAT, "version": 1, "environment": environment, "episodes": len(episodes)}
    path.write_text("".join(json.dumps(line) + "\n" for line in (head, *episodes)), encoding="utf-8")


def read_recording(path: Path, environment: str) -> tuple[Mapping[str, Any], ...]:
    """Return the episodes of a recording. Raise ValueError if it is invalid, or of another environment."""
    try:
        lines = path.read_text(encoding="utf-8-sig").split("\n")
        head, *episodes = [json.loads(line) for line in lines if line.strip()]
        is_valid = head.get("format") == FORMAT and all(isinstance(episode["turns"], list) for episode in episodes)
    except (ValueError, TypeError, KeyError, AttributeError):
        is_valid = False
    if not is_valid:
        raise ValueError(f"{path} is not a recording; make one with: starpod load ... --record {path}")
    if environment and head["environment"] and head["environment"] != environment:
        raise ValueError(f"{path} was recorded in {head['environment']}, not in {environment}")
    episodes = [episode for episode in episodes if episode["turns"]]
    if not episodes:
        raise ValueError(f"{path} holds no episode with a turn")
    return tuple(episodes)
