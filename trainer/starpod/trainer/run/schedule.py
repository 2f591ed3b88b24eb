"""The schedule of a run: its evaluations, checkpoints and end."""

from __future__ import annotations

from starpod.trainer.run.evaluating import Evaluating
from starpod.trainer.run.progress import Shared, StopReason


class RunSchedule:
    """Decides after each step what is due. All ranks decide alike."""

    def __init__(self, shared: Shared, evaluating: Evaluating) -> None:
        self._shared = shared
        self._evaluating = evaluating

    def reason_to_stop(self) -> StopReason | None:
        """Return why the run is over; None if it is not over."""
        reason = None
        if self._shared.interrupts.signal is not None:
            reason = StopReason(f"stopped by {self._shared.interrupts.signal.name} and saved")
        elif self._evaluating.early_stop.reason:
            reason = StopReason(self._evaluating.early_stop.reason)
        elif reached := self._limits_reached():
            reason = StopReason(next(iter(reached.values())), tuple(reached))
        # Compare the ranks, because a signal may have reached only one of them.
        return max(
            (rank_reason for rank_reason in self._shared.parallel.gather_objects(reason) if rank_reason), default=None
        )

    def _limits_reached(self) -> dict[str, str]:
        """Return a sentence for each key of `stop` whose limit is reached."""
        stop, progress, success = self._shared.settings.now.stop, self._shared.progress, self._evaluating.success
        reached = {}
        if progress.step >= stop.iterations:
            reached["iterations"] = f"iteration {stop.iterations} of {stop.iterations} done"
        if stop.minutes is not None and progress.elapsed >= 60 * stop.minutes:
            reached["minutes"] = f"the time is up: stop.minutes={stop.minutes:g}"
        if stop.tokens is not None and progress.tokens >= stop.tokens:
            reached["tokens"] = f"{progress.tokens:,} tokens were sampled: stop.tokens={stop.tokens}"
        if stop.success is not None and (success or 0.0) >= stop.success:
            reached["success"] = f"evaluation success {success:.1%} reached stop.success"
        return reached

    def is_interrupted(self) -> bool:
        """Return whether a signal has reached any rank."""
        return self._shared.parallel.any(self._shared.interrupts.requested)

    def _is_due(self, every: int) -> bool:
        """Return whether this step is a multiple of `every`, except for the last step, which `Run.finish` handles."""
        step = self._shared.progress.step
        return every > 0 and step % every == 0 and step < self._shared.settings.now.stop.iterations

    @property
    def evaluation_is_due(self) -> bool:
        """Whether to evaluate this step."""
        return self._is_due(self._shared.settings.now.evaluation.every)

    @property
    def first_evaluation_is_due(self) -> bool:
        """Whether the step that a run begins or continues with still has to be evaluated, which an error may have
        prevented in a run that is resumed."""
        step = self._shared.progress.step
        return not self._evaluating.is_done(step) and (step == 0 or self.evaluation_is_due)

    @property
    def checkpoint_is_due(self) -> bool:
        """Whether to save this step: on schedule, or because it has the best evaluation so far."""
        return self._is_due(self._shared.settings.now.checkpoint.every) or self._evaluating.is_best(
            self._shared.progress.step
        )
