"""The tasks that all ways of the benchmark play: one fixed lake without slips, and one walk of 50 turns on it.

The walk goes to and fro and then to the goal, so that every episode ends with reward 1 after exactly 50 turns and the
next one starts with a reset. Resets take their time in every way; only steps are counted.

The environment variable STARPOD_BENCHMARK_TASK chooses, for all processes of a run, how long a step takes: "lake" is
the lake itself, microseconds; "wait" waits 5 ms; "tail" waits 5 ms, and now and then up to 100 times as long.
"webshop" is another environment: the small made-up shop, where agents search and go back, 50 turns an episode.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

from benchmarks.serving.environments import SlowLake
from starpod.env_server.environment import Environment, Limits
from starpod.env_server.episode import Episode
from starpod.environments.frozen_lake import FrozenLake

LAKE: dict[str, Any] = {"map": ["SFFF", "FHFH", "FFFH", "HFFG"], "success_rate": 1.0}
LAKE_WALK = ("Right", "Left") * 22 + ("Down", "Down", "Right", "Right", "Down", "Right")
NO_LIMITS = Limits()
SLOW_SERVER = ("--environment-module", "benchmarks/serving/environments.py", "--threads", "512", "slow_lake-v1")

ENDLESS_SERVER = ("--environment-module", "benchmarks/serving/environments.py", "endless_lake-v1")


@dataclass(frozen=True, slots=True)
class Task:
    """environment, options: what is played. serve: the arguments of `starpod serve` that host it.

    walk: the actions of an episode. ends: whether the last one ends it, with reward 1.
    """

    environment: type[Environment]
    options: dict[str, Any]
    serve: tuple[str, ...]
    walk: tuple[str, ...] = LAKE_WALK
    ends: bool = True


TASKS = {
    "lake": Task(FrozenLake, LAKE, ("frozen_lake",)),
    "wait": Task(SlowLake, {**LAKE, "shortest": 0.005, "longest": 0.005}, SLOW_SERVER),
    "tail": Task(SlowLake, {**LAKE, "shortest": 0.005, "longest": 0.5}, SLOW_SERVER),
}
VARIABLE = "STARPOD_BENCHMARK_TASK"
CHOSEN = os.environ.get(VARIABLE, "lake")
if CHOSEN == "webshop":
    from starpod.environments.webshop.environment import WebShop  # its packages are large

    WebShop.prepare()
    TASKS[CHOSEN] = Task(WebShop, {}, ("webshop",), ("search[red shoes]", "click[back to search]") * 25, ends=False)
TASK = TASKS[CHOSEN]
ENVIRONMENT, OPTIONS, WALK = TASK.environment.spec.id, TASK.options, TASK.walk
WAITS = TASK.environment is SlowLake
"""Whether steps wait: then servers must not run them in their event loop."""


def new_episode() -> Episode:
    """The task in this process, at its start."""
    environment = TASK.environment()
    environment.options = TASK.environment.Options(**OPTIONS)
    episode = Episode(environment, NO_LIMITS)
    episode.reset(0, 0)
    return episode
