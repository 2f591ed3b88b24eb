"""Periodic measurements on a step's groups, which need extra forward or backward passes of the policy."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from time import perf_counter

import torch

from starpod.trainer.algorithms.config import AlgorithmConfig
from starpod.trainer.algorithms.filters import loss_scale
from starpod.trainer.algorithms.sections import KeepAll
from starpod.trainer.configuration.seeds import derive
from starpod.trainer.data.group import Group, episodes_of
from starpod.trainer.data.images import by_key
from starpod.trainer.diagnostics.gradients import NoiseScale
from starpod.trainer.diagnostics.information import InformationProbe
from starpod.trainer.learner import Learner
from starpod.trainer.run.progress import Shared
from starpod.trainer.run.weights import EngineWeights


class Diagnosis:
    """Measurement of mutual information, of gradients by the reward deviation of groups, and of gradients' noise."""

    def __init__(self, shared: Shared, learner: Learner, weights: EngineWeights) -> None:
        self.information = InformationProbe(shared.config.monitor)
        self.noise = NoiseScale()
        self._shared = shared
        self._learner = learner
        self._weights = weights

    async def measure(self, groups: Sequence[Group], step: int, version: int) -> dict[str, float]:
        """Return the metrics that are due at a step; nothing if there are no episodes.

        Args:
            groups: All groups of the step, including dropped groups, because these may have collapsed.
        """
        if not episodes_of(groups):
            return {}
        if self.information.due(step) or self._gradients_are_due(step):
            await self._weights.leave_gpu()
        return await self._shared.parallel.in_thread(self._measure, groups, step, version)

    async def measure_noise(
        self, groups: Sequence[Group], kept_fraction: float, algorithm: AlgorithmConfig, step: int, version: int
    ) -> dict[str, float]:
        """Return metrics of the noise in the gradient of an update with kept groups; nothing if they are not due."""
        collected = round(sum(bool(group.episodes) for group in groups) / kept_fraction) if kept_fraction else 0
        if not self._gradients_are_due(step) or collected < 2 or algorithm.order != "together":
            return {}
        measure = partial(self._learner.signal_and_noise, collected=collected, version=version)
        scale = loss_scale(algorithm, kept_fraction)
        signal, noise = await self._shared.parallel.in_thread(measure, groups, scale=scale)
        metrics = self.noise.update(signal, noise, len(episodes_of(groups)) / kept_fraction)
        chosen = algorithm.filter
        is_noisy = self.noise.is_settled and metrics.get("update/signal_to_noise", 1.0) < 1
        if is_noisy and not isinstance(chosen, KeepAll) and chosen.value < 1:
            self._shared.screen.warn(
                "the gradient of a collection is mostly noise (update/signal_to_noise is below 1), and "
                f"algorithm.filter.value {chosen.value:g} can drop groups whose returns differ: set it to 1"
            )
        return metrics

    def _gradients_are_due(self, step: int) -> bool:
        every = self._shared.config.monitor.gradients.every
        return every > 0 and step % every == 0

    def _measure(self, groups: Sequence[Group], step: int, version: int) -> dict[str, float]:
        start_time = perf_counter()
        metrics: dict[str, float] = {}
        if self.information.due(step):
            trainer = self._learner.by_agent[""]
            episodes = episodes_of(groups)
            images = by_key(turn.image for episode in episodes for turn in episode.turns)
            metrics |= self.information.measure(
                episodes,
                partial(trainer.log_likelihoods, images=images),
                lambda ids: str(trainer.policy.tokenizer.decode(ids, skip_special_tokens=False)),
                torch.Generator().manual_seed(derive(self._shared.config.seed, "information", step)),
            )
        if self._gradients_are_due(step):
            buckets = self._shared.config.monitor.gradients.buckets
            metrics |= self._learner.gradients(groups, version=version, buckets=buckets)
        return metrics | {"time/diagnose": perf_counter() - start_time}
