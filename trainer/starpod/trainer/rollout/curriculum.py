"""Curriculum: options of the environment that become harder as the policy succeeds."""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from typing import Any

from starpod.trainer.rollout.config import CurriculumConfig


class Curriculum:
    """The present level of an environment. It never goes down.

    level: from 0.
    """

    def __init__(self, config: CurriculumConfig) -> None:
        self._config = config
        self._successes: list[float] = []
        self.level = 0

    @property
    def enabled(self) -> bool:
        return bool(self._config.levels)

    @property
    def options(self) -> Mapping[str, Any]:
        """Options of the level; none without levels."""
        return self._config.levels[self.level] if self.enabled else {}

    def update(self, success: float) -> bool:
        """Takes the success of an iteration at this level. Whether it was enough for the next one."""
        if self.level + 1 >= len(self._config.levels):
            return False
        self._successes = [*self._successes, success][-self._config.window :]
        if len(self._successes) < self._config.window or statistics.fmean(self._successes) < self._config.success:
            return False
        self.level, self._successes = self.level + 1, []
        return True

    def state_dict(self) -> dict[str, Any]:
        """JSON values."""
        return {"level": self.level, "successes": self._successes}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Goes on where the other one stood, at the last level where there are fewer now."""
        self.level = min(state["level"], max(len(self._config.levels) - 1, 0))
        self._successes = list(state["successes"])
