"""Rules that stop a run that no longer learns. The bounds are taken from RAGEN-2 (arXiv:2604.06268)."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping
from typing import Any

from starpod.report.figures import show
from starpod.trainer.diagnostics.config import MonitorConfig
from starpod.trainer.diagnostics.success import SuccessTrack
from starpod.trainer.evaluation.compare import compare_outcomes

STD_SHARE = 0.1
"""A reward deviation below this share of its initial value is near zero."""
STD_STEPS = 10
"""Number of steps of the initial value, and of consecutive steps near zero that end a run."""
LOW_SUCCESS = 0.01
"""Success below this value is near zero."""
EMPTY_STEPS = 5
"""Number of consecutive steps without a group that end a run."""


class EarlyStop:
    """Counters of the consecutive steps or evaluations that meet each rule.

    Attributes:
        reason: Why to stop, in a sentence; "" while there is no reason.

    success: the run's success over time. Update this track before the `EarlyStop`.
    """

    def __init__(self, config: MonitorConfig, success: SuccessTrack) -> None:
        self._config = config.early_stop
        self._solved_bound = config.echo_trap.solved
        self._success = success
        self._start: list[float] = []
        self._low_std = 0
        self._empty = 0
        self._is_taught = False
        self.forget_evaluations()

    def forget_evaluations(self) -> None:
        """Begin to count evaluations anew, without a reason to stop."""
        self.reason = ""
        self._low_success = 0
        self._best_return: float | None = None
        self._level: dict[str, Any] = {}
        self._level_times = 0
        self._solved = False

    def update(self, step: int, metrics: Mapping[str, float]) -> None:
        """Process the metrics of a step."""
        # A teacher judges tokens even where all rewards are equal.
        self._is_taught = "distillation/reverse_kl" in metrics
        self.reason = self._reward_std(step, metrics) or self._empty_filter(step, metrics) or self.reason

    def evaluated(
        self, step: int, success: float | None, own_return: float, results: Mapping[str, Mapping[str, Any]]
    ) -> None:
        """Process an evaluation.

        Args:
            success: Share of solved episodes, 0 to 1; None, which stops nothing, if it is not reported.
            own_return: Mean return of the environment's own rewards.
            results: `episode_results` of each task.
        """
        if success is not None:
            stalls = self._without_success(step, success, own_return) or self._plateau(step, success, results)
            self.reason = stalls or self.reason

    def _without_success(self, step: int, success: float, own_return: float) -> str:
        # A new highest return counts as progress even without success, because a policy with partial rewards learns
        # long before it succeeds.
        config = self._config
        is_best = self._best_return is not None and own_return > self._best_return
        self._best_return = own_return if is_best or self._best_return is None else self._best_return
        self._low_success = self._low_success + 1 if success < LOW_SUCCESS and not is_best else 0
        if not config.low_success or self._is_taught or self._low_success < config.low_success_times:
            return ""
        return (
            f"stopped at step {step}: success was below {100 * LOW_SUCCESS:g} % in {self._low_success} "
            "evaluations in a row. A longer warm start or easier start states give it something to learn from; "
            "`monitor.early_stop.low_success=false` continues anyway."
        )

    def _plateau(self, step: int, success: float, results: Mapping[str, Mapping[str, Any]]) -> str:
        """Count the evaluations that are not better than the level, which is the last evaluation that was better.

        A slow rise is noticed too, because the level stays where it is until the sum of small gains exceeds the noise.
        A policy that is not solved may be about to learn: on the long lock, 22 % after seven evaluations became 91 %.
        """
        if not self._config.plateau:
            return ""
        self._solved = self._solved or success >= self._solved_bound
        is_better = self._level.keys() != results.keys() or any(
            has_gained(self._level[name], results[name]) for name in results
        )
        self._level, self._level_times = (dict(results), 0) if is_better else (self._level, self._level_times + 1)
        if not self._solved or self._level_times < self._config.plateau:
            return ""
        return (
            f"stopped at step {step}: success is {show(success, 'share')}, and {self._level_times} evaluations in a "
            "row have not risen by more than noise. `monitor.early_stop.plateau=0` continues anyway."
        )

    def _reward_std(self, step: int, metrics: Mapping[str, float]) -> str | None:
        value = metrics.get("collect/own_std_in_group")
        if value is None or not math.isfinite(value):
            return None
        if len(self._start) < STD_STEPS:
            self._start.append(value)
            return None
        start = statistics.fmean(self._start)
        low = value < STD_SHARE * start and not self._success.rising
        self._low_std = self._low_std + 1 if low else 0
        if not self._config.reward_std or self._is_taught or self._low_std < STD_STEPS:
            return None
        return (
            f"stopped at step {step}: reward deviation within groups was below {100 * STD_SHARE:g} % "
            f"of its start ({start:.3g}) in {self._low_std} steps in a row, now {value:.3g}: {self._meaning()}. "
            "`monitor.early_stop.reward_std=false` continues anyway."
        )

    def _meaning(self) -> str:
        """Return in words why the members of a group act alike."""
        success = self._success
        start, now, best = (show(value, "share") for value in (success.start, success.now, success.best))
        if success.solved:
            return f"the task is learnt ({now} success)"
        if success.holds:
            course = f"rose from {start} to {now}" if success.risen else f"holds at {now}"
            return f"success {course}, and these start states teach nothing more"
        if success.never:
            return (
                f"the policy never learnt (success was never above {best}). A longer warm start, easier start states "
                "or partial rewards give it something to learn from"
            )
        course = f" (success was {best} and is {now})" if success.start is not None else ""
        return f"the policy has collapsed{course}; go back to the best checkpoint"

    def _empty_filter(self, step: int, metrics: Mapping[str, float]) -> str | None:
        kept_fraction = metrics.get("collect/kept_fraction")
        if kept_fraction is None:
            return None
        # Branches of dropped groups may still be learnt from.
        is_empty = kept_fraction <= 0 and metrics.get("update/skipped", 1.0) > 0
        self._empty = self._empty + 1 if is_empty else 0
        if not self._config.empty_filter or self._empty < EMPTY_STEPS:
            return None
        return (
            f"stopped at step {step}: the filter kept no group in {self._empty} steps in a row: nothing was trained. "
            "All members of each group earn the same: choose other start states, a warm start or partial rewards; "
            "`monitor.early_stop.empty_filter=false` continues anyway."
        )

    def state_dict(self) -> dict[str, Any]:
        """Return the state as JSON values."""
        return {
            "start": self._start,
            "low_std": self._low_std,
            "low_success": self._low_success,
            "best_return": self._best_return,
            "empty": self._empty,
            "level": self._level,
            "level_times": self._level_times,
            "solved": self._solved,
            "reason": self.reason,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._start = list(state["start"])
        self._low_std, self._low_success, self._empty = state["low_std"], state["low_success"], state["empty"]
        self._best_return, self.reason = state["best_return"], state["reason"]
        self._level, self._level_times, self._solved = state["level"], state["level_times"], state["solved"]


def has_gained(before: Mapping[str, Any], after: Mapping[str, Any]) -> bool:
    """Return whether success or return is higher, paired by seed: a 95 % interval of the difference is above 0.

    before, after: `episode_results` of two evaluations, with one episode per seed.
    """
    differences = compare_outcomes(before, after, samples=1)
    intervals = (differences[f"{figure}_difference"] for figure in ("success", "return"))
    return any(interval is not None and interval[1] > 0 for interval in intervals)
