"""Success over the steps of a run. It shows whether a collapse signal is harmful."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from starpod.trainer.diagnostics.config import EchoTrapConfig

RISE = 0.05
"""Success has risen if it is this much above its start. A policy whose success was always below this has nothing to
lose."""
HIGH = 0.75
"""A policy with at least this success counts as healthy even if its success has not risen."""
FALL = 0.1
"""Success falls if it is this much below its best."""


class SuccessTrack:
    """A run's success (0 to 1): `start` is the mean of the first steps, `now` the median of the latest steps.

    `best` is the highest such median so far. All three are None until the first steps are complete.
    """

    def __init__(self, config: EchoTrapConfig) -> None:
        self._config = config
        self._start: list[float] = []
        self._latest: list[float] = []
        self._best = 0.0
        self._since_best = 0
        self.solved = False
        """Whether the task is solved. This stays True until success falls well below the bound of `solved`."""

    def update(self, value: float | None) -> None:
        """Add the success of one step. `value` is None if the environment does not report success."""
        if value is None:
            return
        config = self._config
        if len(self._start) < config.start_steps:
            self._start.append(value)
        self._latest = [*self._latest, value][-config.window :]
        median = statistics.median(self._latest)
        self._since_best += 1
        if len(self._latest) == config.window and median > self._best:
            self._best, self._since_best = median, 0
        self.solved = median >= (config.solved / config.release if self.solved else config.solved)

    @property
    def start(self) -> float | None:
        return statistics.fmean(self._start) if len(self._start) == self._config.start_steps else None

    @property
    def now(self) -> float | None:
        return statistics.median(self._latest) if self.start is not None else None

    @property
    def best(self) -> float | None:
        """Highest median over a window of steps, or `start` if that is higher."""
        return None if self.start is None else max(self._best, self.start)

    @property
    def holds(self) -> bool:
        """Whether success has risen or is high, and is near its best. False if the policy collapses."""
        if self.now is None or self.best is None:
            return False
        return (self.risen or self.now >= HIGH) and self.now > self.best - FALL

    @property
    def risen(self) -> bool:
        """Whether success is above its start."""
        return self.start is not None and self.now is not None and self.now >= self.start + RISE

    @property
    def rising(self) -> bool:
        """Whether success has risen, holds, and had its best value within the last window."""
        return self.risen and self.holds and self._since_best < self._config.window

    @property
    def healthy(self) -> bool:
        """Whether success holds and is high or rising."""
        return self.holds and (self.rising or (self.now or 0.0) >= HIGH)

    @property
    def never(self) -> bool:
        """Whether the policy never succeeded often enough to have something to lose."""
        return self.best is not None and self.best < RISE

    def state_dict(self) -> dict[str, Any]:
        """Return the state as JSON values."""
        return {
            "start": self._start,
            "latest": self._latest,
            "best": self._best,
            "since_best": self._since_best,
            "solved": self.solved,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._start, self._latest = list(state["start"]), list(state["latest"])
        self._best, self._since_best, self.solved = state["best"], state["since_best"], state["solved"]


def has_risen(evaluations: Sequence[Mapping[str, Any]]) -> bool:
    """Return whether an evaluation is clearly better than the first one, or nothing was left to learn.

    Fewer than two evaluations cannot tell, and count as a rise.
    """
    first, *later = evaluations or [{}]
    if not later or (first["success"] or 0.0) >= HIGH:
        return True
    pairs = (("success", "success_low"), ("return_mean", "return_low"))
    return any(
        value > (first.get(mean) or 0.0)
        for figures in later
        for mean, low in pairs
        if (value := figures.get(low)) is not None
    )
