"""Curricula: what the groups of an environment begin with, as the success of the policy demands it."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from starpod.trainer.configuration.seeds import SeedRange, derive
from starpod.trainer.data.group import Group
from starpod.trainer.rollout.config import CurriculumConfig, LevelsConfig, TaskPoolConfig

FORGOTTEN = 0.01
"""Weight of a task's episodes below which its estimate is dropped, so that checkpoints do not keep it."""


class Curriculum:
    """Choice of the options and the seed with which a group begins.

    Attributes:
        enabled: Whether it follows the policy's success.
        options: Environment options of the next groups, merged over those of the environment.
    """

    enabled = False
    options: Mapping[str, Any] = {}

    def choose_seed(self, group: int, seed: int) -> int:
        """Return the seed of a group, the same on all ranks. seed: the seed of a group without a curriculum."""
        return seed

    def update(self, groups: Sequence[Group]) -> bool:
        """Record an iteration's groups. Return whether the options have changed."""
        return False

    def metrics(self) -> dict[str, float]:
        """Return metrics of the state that chose the latest groups."""
        return {}

    def state_dict(self) -> dict[str, Any]:
        """Return the state as JSON values."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the values from `state_dict`. The state of another kind of curriculum is ignored."""


class Levels(Curriculum):
    """Options that become harder as the policy succeeds. The current `level`, counted from 0, never decreases."""

    def __init__(self, config: LevelsConfig) -> None:
        self._config = config
        self._successes: list[float] = []
        self.enabled = bool(config.levels)
        self._reach(0)

    def _reach(self, level: int) -> None:
        self.level = level
        self.options = self._config.levels[level] if self.enabled else {}

    def update(self, groups: Sequence[Group]) -> bool:
        successes = [episode.success is True for group in groups for episode in group.unchosen]
        return bool(successes) and self.record(statistics.fmean(successes))

    def record(self, success: float) -> bool:
        """Record the mean success of an iteration at this level. Return whether the level advanced."""
        if self.level + 1 >= len(self._config.levels):
            return False
        self._successes = [*self._successes, success][-self._config.window :]
        if len(self._successes) < self._config.window or statistics.fmean(self._successes) < self._config.success:
            return False
        self._successes = []
        self._reach(self.level + 1)
        return True

    def metrics(self) -> dict[str, float]:
        return {"level": float(self.level)} if self.enabled else {}

    def state_dict(self) -> dict[str, Any]:
        return {"level": self.level, "successes": self._successes}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        # The level is clamped if there are fewer levels now.
        self._reach(min(state.get("level", 0), max(len(self._config.levels) - 1, 0)))
        self._successes = list(state.get("successes", ()))


class TaskPool(Curriculum):
    """A finite pool of tasks, whose difficulty for the policy is estimated. A task is a seed of the pool.

    The posterior of a task's success is Beta(1 + solved, 1 + failed), where its episodes count less and less: the
    policy has changed since. For each group, a success p is drawn from each posterior, and the task with the largest
    p (1 - p), the variance of its success, is played. So tasks that the policy solves sometimes are played most. A
    task whose episodes are forgotten has the uniform prior again, and is tried: none starves. The posterior with
    forgetting, and the draw for the success nearest to 1/2, are those of MoPPS (arXiv 2507.04632); p (1 - p) is the
    learnability of arXiv 2408.15099. A task is played once in an iteration, while there are others.

    Args:
        seeds: Seeds of training, the first of which are the pool.
        stream: Seed of the draws.
    """

    enabled = True

    def __init__(self, config: TaskPoolConfig, seeds: SeedRange, stream: int) -> None:
        self._config = config
        self._first = seeds.start
        self._stream = stream
        self._solved = np.zeros(config.tasks)
        self._failed = np.zeros(config.tasks)
        self._chosen: list[int] = []  # in this iteration

    def choose_seed(self, group: int, seed: int) -> int:
        rng = np.random.default_rng(derive(self._stream, group))
        success = rng.beta(1 + self._solved, 1 + self._failed)
        variance = success * (1 - success)
        if len(self._chosen) == self._config.tasks:
            self._chosen = []
        variance[self._chosen] = -1.0
        self._chosen.append(int(variance.argmax()))
        return self._first + self._chosen[-1]

    def update(self, groups: Sequence[Group]) -> bool:
        self._chosen = []
        factor = 0.5 ** (len(groups) / (self._config.half_life * self._config.tasks))
        self._solved *= factor
        self._failed *= factor
        for group in groups:
            for episode in group.unchosen:
                if 0 <= (index := episode.seed - self._first) < self._config.tasks:
                    (self._solved if episode.success else self._failed)[index] += 1.0
        forgotten = self._solved + self._failed < FORGOTTEN
        self._solved[forgotten] = self._failed[forgotten] = 0.0
        return False

    def metrics(self) -> dict[str, float]:
        """Return shares of the tasks with an estimate, and the number of tasks that recent episodes come from.

        A task is never or always solved if its successes or failures weigh less than half of an episode. The effective
        number is that of a uniform distribution with the same sum of squares.
        """
        solved, failed = self._solved >= 0.5, self._failed >= 0.5
        known = max(int((solved | failed).sum()), 1)
        shares = {"never": failed & ~solved, "sometimes": solved & failed, "always": solved & ~failed}
        weights = self._solved + self._failed
        effective = weights.sum() ** 2 / max(float((weights**2).sum()), FORGOTTEN**2)
        return {f"tasks_{name}": int(which.sum()) / known for name, which in shares.items()} | {
            "tasks_effective": float(effective)
        }

    def state_dict(self) -> dict[str, Any]:
        (known,) = np.nonzero(self._solved + self._failed)
        return {"tasks": [[int(task), float(self._solved[task]), float(self._failed[task])] for task in known]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        for task, solved, failed in state.get("tasks", ()):
            if task < self._config.tasks:
                self._solved[task], self._failed[task] = solved, failed


def make_curriculum(config: CurriculumConfig, seeds: SeedRange, stream: int) -> Curriculum:
    """Return the configured curriculum. seeds: seeds of training. stream: seed of its random numbers."""
    return TaskPool(config, seeds, stream) if isinstance(config, TaskPoolConfig) else Levels(config)
