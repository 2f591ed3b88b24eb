"""Stages of a run: settings that apply until an iteration, or until a metric reaches a bound.

A stage is the run's configuration with some keys changed. After the last stage, the unchanged configuration applies.
Evaluations always use the unchanged one, so that their results are comparable.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import Field

from starpod.trainer.configuration.section import Section
from starpod.trainer.data.metric_names import metric, misspelt

MAY_CHANGE = (
    "environment.options",
    "environment.max_turns",
    "environment.max_actions_per_turn",
    "environment.max_actions",
    "environment.expert_moves_left",
    "rewards",
    "algorithm",
    "collect.groups",
    "collect.group_size",
    "collect.min_group_size",
    "collect.max_rounds",
    "optimizer.lr",
    "optimizer.critic_lr",
    "optimizer.max_grad_norm",
    "sampling.max_reply_tokens",
    "sampling.min_reply_tokens",
)
"""Keys and sections that a stage may set. In a run with several environments, a stage may set
`environments.NAME.<key>` for the keys of `environment` in this list, and `environments.NAME.rewards`."""


class UntilConfig(Section):
    """End of a stage. If both an iteration and a metric are given, the first one reached counts."""

    iteration: int | None = Field(default=None, ge=1, description="Iterations of the run after which the stage ends.")
    metric: str = Field(default="", description="Metric of an iteration, such as collect/success; empty: none.")
    at_least: float | None = Field(default=None, description="Minimum of the metric.")
    at_most: float | None = Field(default=None, description="Maximum of the metric.")
    patience: int = Field(default=1, ge=1, description="Consecutive iterations in which the metric is within bounds.")

    def problem(self) -> str:
        """Return the mistake in this end of a stage, in words; "" if there is none."""
        bounded = self.at_least is not None or self.at_most is not None
        if self.iteration is None and not self.metric:
            return "never ends: give until.iteration, or until.metric with at_least or at_most"
        if self.metric and not bounded:
            return f"waits for {self.metric} without a bound: give until.at_least or until.at_most"
        if self.metric and (names := misspelt(self.metric)):
            return f"waits for the metric {self.metric}, which does not exist; did you mean {' or '.join(names)}?"
        if (
            self.metric
            and metric(self.metric).kind == "share"
            and ((self.at_least or 0) > 1 or (self.at_most or 0) < 0)
        ):
            return f"never ends: {self.metric} is a share, from 0 to 1; change until.at_least or until.at_most"
        if not self.metric and (bounded or self.patience > 1):
            return "has a bound or patience, but no until.metric: name one, or drop them"
        return ""

    def holds(self, metrics: Mapping[str, float]) -> bool:
        """Return whether the metric of one iteration is within its bounds."""
        value = metrics.get(self.metric)
        if value is None:
            return False
        return (self.at_least is None or value >= self.at_least) and (self.at_most is None or value <= self.at_most)


class StageConfig(Section):
    """A stage: settings that apply until its end."""

    until: UntilConfig = UntilConfig()
    set: dict[str, Any] = Field(
        default={}, description="Keys and their values in this stage, such as {collect.groups: 4}."
    )


class Stages:
    """The current stage of a run. It never goes back.

    Attributes:
        index: Index of the stage from 0; the number of stages once all are over.
    """

    def __init__(self, stages: Sequence[StageConfig]) -> None:
        self._stages = stages
        self._iterations_met = 0
        self.index = 0

    def update(self, step: int, metrics: Mapping[str, float]) -> bool:
        """Process the metrics of an iteration, counted from 1. Return whether another stage begins after it."""
        start = self.index
        while self.index < len(self._stages):
            until = self._stages[self.index].until
            # Metrics only count for the stage that was played, not for stages that are skipped.
            self._iterations_met = (
                self._iterations_met + 1 if self.index == start and until.metric and until.holds(metrics) else 0
            )
            is_over = until.iteration is not None and step >= until.iteration
            if not is_over and (not until.metric or self._iterations_met < until.patience):
                break
            self.index, self._iterations_met = self.index + 1, 0
        return self.index > start

    def unknown(self, metrics: Mapping[str, float]) -> str:
        """Return the metric that the stage waits for if it is missing from `metrics`, else ""."""
        metric = self._stages[self.index].until.metric if self.index < len(self._stages) else ""
        return metric if metric and metric not in metrics else ""

    def state_dict(self) -> dict[str, Any]:
        """Return the state as JSON values."""
        return {"index": self.index, "held": self._iterations_met}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the values from `state_dict`. The index is limited to the current number of stages."""
        self.index, self._iterations_met = min(state["index"], len(self._stages)), state["held"]


def may_change(key: str) -> bool:
    """Return whether a stage may set a dotted key."""
    parts = key.split(".")
    if parts[0] == "environments" and len(parts) > 2:
        parts = ["environment", *parts[2:]] if parts[2] != "rewards" else parts[2:]
    name = ".".join(parts)
    return any(f"{name}.".startswith(f"{allowed}.") for allowed in MAY_CHANGE)
