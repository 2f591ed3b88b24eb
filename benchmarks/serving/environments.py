"""Environments of the benchmarks: lakes with slow steps, without limits, or in a process.

starpod serve benchmarks/serving/environments.py --threads 512 slow_lake-v1
"""

from __future__ import annotations

import random
import time
from dataclasses import replace

from pydantic import Field

from starpod.env_server.authoring.environment import (
    Concurrency,
    Limits,
    Outcome,
)
from starpod.environments.frozen_lake import FrozenLake, FrozenLakeOptions


class SlowLakeOptions(FrozenLakeOptions):
    """Options of the lake, and the range of step times: a clipped Pareto distribution with tail index 1."""

    shortest: float = Field(default=0.005, ge=0, description="Seconds that a step takes at least; 0: none waits.")
    longest: float = Field(default=0.5, ge=0, description="Seconds that a step takes at most.")


class SlowLake(FrozenLake):
    """A lake whose steps wait like calls of tools and web pages: most of them briefly, a few a hundred times as long.

    The delays depend only on the dynamics seed and the step's number.
    """

    spec = replace(
        FrozenLake.spec, id="slow_lake-v1", title="Frozen lake with slow steps", concurrency=Concurrency.THREAD
    )
    Options = SlowLakeOptions
    options: SlowLakeOptions

    steps: int = 0

    def reset(self, rng: random.Random) -> None:
        super().reset(rng)
        self.steps = 0

    def step(self, action: str) -> Outcome:
        self.steps += 1
        if self.options.shortest:
            time.sleep(delay(self.dynamics_seed, self.steps, self.options.shortest, self.options.longest))
        return super().step(action)


class EndlessLake(FrozenLake):
    """The lake without limits, for clients that cannot request limits. A walk of 50 turns ends only at the goal."""

    spec = replace(FrozenLake.spec, id="endless_lake-v1", limits=Limits())


def delay(seed: int, step: int, shortest: float, longest: float) -> float:
    """Return the seconds that a step takes: P(longer than s) = shortest / s, up to `longest`.

    Args:
        seed: seed of the episode.
        step: index of the step in the episode.
        shortest: minimum in seconds.
        longest: maximum in seconds.
    """
    return min(shortest / (1 - random.Random(f"{seed}/{step}").random()), longest)


class IsolatedLake(FrozenLake):
    """A lake of class `process`: opening a session starts a process, and closing it ends the process."""

    spec = replace(
        FrozenLake.spec, id="isolated_lake-v1", title="Frozen lake in a process", concurrency=Concurrency.PROCESS
    )
