"""Curriculum: options of the environment that become harder as the policy succeeds."""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from typing import Any

from starpod.trainer.rollout.config import CurriculumConfig


class Curriculum:
    """The current `level` of an environment, counted from 0. It never decreases."""

    def __init__(self, config: CurriculumConfig) -> None:
        self._config = config
        self._successes: list[float] = []
        self.level = 0

    @property
    def enabled(self) -> bool:
        return bool(self._config.levels)

    @property
    def options(self) -> Mapping[str, Any]:
        """Environment options of the level; empty if the curriculum has no levels."""
        return self._config.levels[self.level] if self.enabled else {}

    def update(self, success: float) -> bool:
        """Record the mean success of an iteration at this level. Return whether the level advanced."""
        if self.level + 1 >= len(self._config.levels):
            return False
        self._successes = [*self._successes, success][-self._config.window :]
        if len(self._successes) < self._config.window or statistics.fmean(self._successes) < self._config.success:
            return False
        self.level, self._successes = self.level + 1, []
        return True

    def state_dict(self) -> dict[str, Any]:
        """Return the level and its recent successes as JSON values."""
        return {"level": self.level, "successes": self._successes}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the level and its recent successes. The level is clamped if there are fewer levels now."""
        self.level = min(state["level"], max(len(self._config.levels) - 1, 0))
        self._successes = list(state["successes"])
