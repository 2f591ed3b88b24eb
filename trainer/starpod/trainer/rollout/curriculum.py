"""Curriculum: options of the environment that become harder as the policy succeeds."""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from typing import Any

from pydantic import Field

from starpod.trainer.section import Section


class CurriculumConfig(Section):
    """Levels of options in training, each left by success. Warm starts and evaluations play the environment's own."""

    levels: tuple[dict[str, Any], ...] = Field(
        default=(), description="Options of each level over the environment's own, the easiest first; empty: no levels."
    )
    success: float = Field(default=0.8, gt=0, le=1, description="Mean success from which on the next level is played.")
    window: int = Field(default=5, ge=1, description="Iterations at a level over which it is the mean.")


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
