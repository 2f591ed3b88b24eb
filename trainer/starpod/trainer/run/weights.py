"""Weights on their way from the learner to the engine."""

from __future__ import annotations

from time import perf_counter

from starpod.trainer.engines.base import Engine
from starpod.trainer.models.policies import Policies
from starpod.trainer.models.policy import Policy
from starpod.trainer.parallel import Parallel


class EngineWeights:
    """Keeps an engine's weights up to date, and halts an engine that sleeps beside passes of the policy.

    policy: that is trained. sampler: the copy of it that the engine samples from; the policy itself where it is neither
    sharded nor updated meanwhile. sleeps: whether the engine leaves the GPU to the policy.
    """

    def __init__(
        self,
        engine: Engine,
        policy: Policy | Policies,
        sampler: Policy | Policies,
        parallel: Parallel,
        *,
        sleeps: bool = False,
    ) -> None:
        self.engine = engine
        self._policy = policy
        self._sampler = sampler
        self._parallel = parallel
        self._sleeps = sleeps
        self._version = -1
        self._paused = False

    async def leave_gpu(self) -> None:
        """Halt an engine that sleeps until the next `load`."""
        if self._sleeps and not self._paused:
            await self.engine.pause()
            self._paused = True

    async def load(self, version: int) -> float | None:
        """Hand the policy's weights to the engine, if they changed or it sleeps.

        Returns:
            Seconds that it took; None where nothing had to be done.
        """
        if self._version == version and not self._paused:
            return None
        began = perf_counter()
        if not self._paused:
            await self.engine.pause()
        if self._sampler is not self._policy:
            self._parallel.copy_weights(self._policy.model, self._sampler.model)
        await self.engine.load(version, self._sampler.model)
        await self.engine.resume()
        self._paused, self._version = False, version
        return perf_counter() - began
