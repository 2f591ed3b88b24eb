"""The lake in Gymnasium's vector environments, stepped together, in this process or in one process per environment.

    echo 2 | python -m benchmarks.peers.vector_env SyncVectorEnv|AsyncVectorEnv SESSIONS

For each number of seconds on standard input it steps that long and prints the measurement as JSON.
"""

from __future__ import annotations

import sys
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces
from gymnasium.vector import AsyncVectorEnv, AutoresetMode, SyncVectorEnv

from benchmarks.peers.driver import Pipes, serve_runs
from benchmarks.serving.lake import TASK, new_episode, next_seed
from starpod.env_server.episodes.live_episode import Want
from starpod.environments.frozen_lake import ACTIONS, LakeSymbols


class Lake(gymnasium.Env[str, int]):
    """The lake with Gymnasium's interface."""

    action_space = spaces.Discrete(len(ACTIONS))
    observation_space = spaces.Text(64, charset="".join(vars(LakeSymbols()).values()) + "\n")

    def __init__(self) -> None:
        self._episode = new_episode()

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[str, dict[str, Any]]:
        super().reset(seed=seed)
        self._episode.reset(next_seed(), 0)
        return str(self._episode.observe(Want()).parts), {}

    def step(self, action: int) -> tuple[str, float, bool, bool, dict[str, Any]]:
        transition = self._episode.turn([ACTIONS[action]], Want())
        return str(transition.parts), transition.reward, transition.terminated, transition.truncated, {}


def main() -> None:
    pipes = Pipes()
    count = int(sys.argv[2])
    kind = {"SyncVectorEnv": SyncVectorEnv, "AsyncVectorEnv": AsyncVectorEnv}[sys.argv[1]]
    mode = AutoresetMode.NEXT_STEP if TASK.random else AutoresetMode.DISABLED
    environments = kind([Lake] * count, autoreset_mode=mode)
    mask = np.ones(count, bool)

    def reset() -> None:
        environments.reset(options=None if TASK.random else {"reset_mask": mask})

    def step(action: str) -> list[tuple[float, bool]]:
        actions = environments.action_space.sample() if TASK.random else np.full(count, ACTIONS.index(action))
        _, rewards, terminated, truncated, _ = environments.step(actions)
        return list(zip(rewards.tolist(), (terminated | truncated).tolist(), strict=True))

    environments.reset()
    serve_runs(pipes, count, reset, step)
    environments.close()


if __name__ == "__main__":
    main()
