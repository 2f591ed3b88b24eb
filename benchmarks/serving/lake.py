"""Tasks of the serving benchmarks: one fixed lake that is not slippery, and one walk of 50 turns on it.

The walk goes to and fro and then to the goal, so that every episode ends with reward 1 after exactly 50 turns, and the
next one starts with a reset. Only steps are counted; resets take time in every way.

The environment variable STARPOD_BENCHMARK_TASK selects the task for all processes of a run. "lake": steps take
microseconds. "user": the lake with its default options and limits and random moves, as a user calls it; sessions
end one by one after a few turns, and resets are counted. "wait": a step waits 5 ms. "tail": a step waits 5 ms,
and occasionally up to 100 times as long. "webshop" is another environment, the small made-up shop, where agents search
and go back for 50 turns per episode.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from itertools import count
from random import Random
from typing import Any

from benchmarks.serving.environments import SlowLake
from starpod.env_server.authoring.environment import Environment, Limits
from starpod.env_server.episodes.live_episode import LiveEpisode
from starpod.environments.frozen_lake import ACTIONS, FrozenLake

LAKE: dict[str, Any] = {"map": ["SFFF", "FHFH", "FFFH", "HFFG"], "success_rate": 1.0}
LAKE_WALK = ("Right", "Left") * 22 + ("Down", "Down", "Right", "Right", "Down", "Right")
NO_LIMITS = Limits()
SLOW_SERVER = ("benchmarks/serving/environments.py", "--threads", "512", "slow_lake-v1")

ENDLESS_SERVER = ("benchmarks/serving/environments.py", "endless_lake-v1")


@dataclass(frozen=True, slots=True)
class Task:
    """A task: an environment with options and a fixed sequence of actions."""

    environment: type[Environment]
    options: dict[str, Any]
    serve: tuple[str, ...]  # arguments of `starpod serve`
    walk: tuple[str, ...] = LAKE_WALK  # actions of an episode
    ends: bool = True  # whether the last action ends the episode with reward 1
    random: bool = False  # whether moves are random, seeds differ and resets are counted; `walk` is not used then


TASKS = {
    "lake": Task(FrozenLake, LAKE, ("frozen_lake",)),
    "user": Task(FrozenLake, {}, ("frozen_lake",), random=True),
    "wait": Task(SlowLake, {**LAKE, "shortest": 0.005, "longest": 0.005}, SLOW_SERVER),
    "tail": Task(SlowLake, {**LAKE, "shortest": 0.005, "longest": 0.5}, SLOW_SERVER),
}
VARIABLE = "STARPOD_BENCHMARK_TASK"
CHOSEN = os.environ.get(VARIABLE, "lake")
if CHOSEN == "webshop":
    from starpod.environments.webshop.environment import WebShop  # imports large packages

    WebShop.prepare()
    TASKS[CHOSEN] = Task(WebShop, {}, ("webshop",), ("search[red shoes]", "click[back to search]") * 25, ends=False)
TASK = TASKS[CHOSEN]
ENVIRONMENT, OPTIONS, WALK = TASK.environment.spec.id, TASK.options, TASK.walk


def new_episode() -> LiveEpisode:
    """Return an episode of the task in this process, after its reset."""
    environment = TASK.environment()
    environment.options = TASK.environment.Options(**OPTIONS)
    episode = LiveEpisode(environment, TASK.environment.spec.limits if TASK.random else NO_LIMITS)
    episode.reset(next_seed(), 0)
    return episode


def actions_of_episode() -> Iterator[str]:
    """Return the actions of an episode: the walk, or random moves without end."""
    return iter(partial(_RNG.choice, ACTIONS), None) if TASK.random else iter(WALK)


def next_seed() -> int:
    """Return the seed of the next episode: 0, or another one each time if the task is random."""
    return next(_SEEDS) if TASK.random else 0


_RNG = Random(0)
_SEEDS = count(1)
