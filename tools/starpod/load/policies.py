"""Policies of the agents: random actions, the environment's own advice, or a recording."""

from __future__ import annotations

import functools
import json
import random
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from google.protobuf import json_format

from starpod.load.plan import Turns
from starpod.v1 import environment_pb2 as pb

Turn = Sequence[str] | Sequence[pb.Action]

FORMAT = "starpod-load-recording"
_AHEAD = 1 << 16


class Policy(Protocol):
    """One agent. `next` gives its turn; None: the episode ends here, and another one begins."""

    def begin(self) -> tuple[int | None, int | None]:
        """A new episode: its seed and its dynamics seed, where the policy knows them."""
        ...

    def next(self, observation: pb.Observation | None) -> Turn | None: ...


@functools.lru_cache(1)
def _drawn(actions: tuple[str, ...], seed: int) -> list[tuple[str]]:
    """Turns of one random action each, drawn ahead and shared: a draw per step would cost as much as all the rest."""
    return [(action,) for action in random.Random(seed).choices(actions, k=_AHEAD)]


class Listed:
    """Any of the given actions; each agent reads the same long list from a place of its own."""

    __slots__ = ("_place", "_turns")

    def __init__(self, turns: Sequence[tuple[str]], rng: random.Random) -> None:
        self._turns = turns
        self._place = rng.randrange(_AHEAD)

    def begin(self) -> tuple[None, None]:
        return None, None

    def next(self, observation: pb.Observation | None) -> Turn:
        self._place = (self._place + 1) % _AHEAD
        return self._turns[self._place]


class Valid:
    """Any action that the observation lists as valid; none where it lists none."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng

    def begin(self) -> tuple[None, None]:
        return None, None

    def next(self, observation: pb.Observation | None) -> Turn:
        valid = observation.valid_actions if observation is not None else ()
        return as_turn([self._rng.choice(valid)]) if valid else ()


class Expert:
    """What the environment advises; where it knows nothing, what another policy would do."""

    def __init__(self, otherwise: Policy) -> None:
        self._otherwise = otherwise

    def begin(self) -> tuple[None, None]:
        return None, None

    def next(self, observation: pb.Observation | None) -> Turn | None:
        if observation is not None and observation.HasField("expert_action"):
            return as_turn([observation.expert_action])
        return self._otherwise.next(observation)


class Recorded:
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
        head, *episodes = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line]
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
