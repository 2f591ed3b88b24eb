"""The update of a step: scoring of turns, and training of the policy on the groups that the filter kept."""

from __future__ import annotations

from collections.abc import Sequence
from time import perf_counter

from starpod.trainer.algorithms.filters import loss_scale
from starpod.trainer.data.group import Group, branches_of, episodes_of
from starpod.trainer.learner import Learner
from starpod.trainer.run.collecting import Collecting
from starpod.trainer.run.diagnosis import Diagnosis
from starpod.trainer.run.progress import Shared
from starpod.trainer.run.rollout_log import RolloutLog
from starpod.trainer.run.weights import EngineWeights
from starpod.trainer.scorers.base import TurnScorer, score_and_fit


class Updating:
    """Updates of the policy and of the scorer of turns, if there is one.

    Attributes:
        weights: Transfer of the updated weights to the engine.
        fresh_version: Version of tokens that the current policy samples; -1 offline, where versions mean nothing.
    """

    def __init__(
        self,
        shared: Shared,
        learner: Learner,
        scorer: TurnScorer | None,
        *,
        weights: EngineWeights,
        collecting: Collecting,
        diagnosis: Diagnosis,
        rollouts: RolloutLog,
    ) -> None:
        self.learner = learner
        self.scorer = scorer
        self.weights = weights
        self._shared = shared
        self._collecting = collecting
        self._diagnosis = diagnosis
        self._rollouts = rollouts

    @property
    def fresh_version(self) -> int:
        return -1 if self._collecting.offline else self._shared.progress.version

    async def make_room(self, groups: Sequence[Group]) -> None:
        """Let the engine leave the GPU if there is something to learn from."""
        if _has_episodes(groups):
            await self.weights.leave_gpu()

    async def learn(self, groups: Sequence[Group], kept_fraction: float) -> dict[str, float]:
        """Update the policy and return metrics. The update is skipped if the filter kept nothing.

        kept_fraction: Fraction of the step's groups that the filter kept.
        """
        is_empty, step = not _has_episodes(groups), self._shared.progress.step
        metrics = {"update/skipped": float(is_empty)}
        start_time, busy_seconds = perf_counter(), self._collecting.ahead.busy_seconds
        if self.scorer is not None:
            if not is_empty:
                self._shared.screen.phase("scoring turns")
                metrics |= await self._shared.parallel.in_thread(score_and_fit, self.scorer, groups)
            await self._rollouts.write_rollouts(step)
        if not is_empty:
            algorithm, version = self._shared.settings.now.algorithm, self.fresh_version
            metrics |= await self._diagnosis.measure_noise(groups, kept_fraction, algorithm, step, version)
            metrics |= await self._update(groups, kept_fraction)
            seconds = metrics["time/update"] = max(perf_counter() - start_time, 1e-9)
            if self._shared.settings.now.collect.max_staleness:
                overlap_seconds = self._collecting.ahead.busy_seconds - busy_seconds
                metrics["time/overlap_share"] = min(overlap_seconds / seconds, 1.0)
            episodes = (episode for group in groups for episode in (*group.episodes, *group.branches))
            metrics["rate/trained_tokens_per_s"] = sum(episode.sampled_tokens for episode in episodes) / seconds
        await self._rollouts.write_update(step, None if is_empty else self.learner.table)
        return metrics

    async def _update(self, groups: Sequence[Group], kept_fraction: float) -> dict[str, float]:
        self._shared.screen.phase("updating")
        config, metrics = self._shared.settings.now, dict[str, float]()
        scale = loss_scale(config.algorithm, kept_fraction)
        rate = config.optimizer.rate_factor(self._shared.progress.step, config.stop.iterations)
        async with self.weights.updates:
            for _ in range(config.replay.reuse):
                metrics |= await self._shared.parallel.in_thread(
                    self.learner.learn, groups, version=self.fresh_version, scale=scale, rate=rate
                )
                self._shared.progress.version += 1
            self.weights.updates.version = self._shared.progress.version
        return metrics


def _has_episodes(groups: Sequence[Group]) -> bool:
    return bool(episodes_of(groups) or branches_of(groups))
