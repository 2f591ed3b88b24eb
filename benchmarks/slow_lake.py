"""A frozen lake whose steps take time, most of them little and a few a hundred times as much, like tools and web pages.

starpod serve --environment-module benchmarks/slow_lake.py --threads 512 slow_lake-v1
"""

from __future__ import annotations

import random
import time
from dataclasses import replace

from pydantic import Field

from starpod.env_server.environment import Concurrency, Outcome
from starpod.environments.frozen_lake import FrozenLake, FrozenLakeOptions


class SlowLakeOptions(FrozenLakeOptions):
    """Those of the lake, and how long a step takes: from a Pareto distribution with tail index 1, clipped."""

    shortest: float = Field(default=0.005, ge=0, description="Seconds that a step takes at least; 0: none waits.")
    longest: float = Field(default=0.5, ge=0, description="Seconds that a step takes at most.")


class SlowLake(FrozenLake):
    """The lake. Its delays follow from the dynamics seed and the step's number, and change nothing else."""

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


def delay(seed: int, step: int, shortest: float, longest: float) -> float:
    """Seconds that a step takes: P(longer than s) = shortest / s, up to `longest`."""
    return min(shortest / (1 - random.Random(f"{seed}/{step}").random()), longest)
