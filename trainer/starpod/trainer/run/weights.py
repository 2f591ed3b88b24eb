"""Transfer of weights from the learner to the engine."""

from __future__ import annotations

from time import perf_counter

from starpod.trainer.engines.base import Engine
from starpod.trainer.parallel import sharding
from starpod.trainer.run.policies import Models


class EngineWeights:
    """Updater of an engine's weights. It also pauses the engine while the policy uses the GPU, if `sleeps` is set.

    Args:
        models: The trained policies, and the policies that the engine samples from.
        sleeps: Whether the engine frees the GPU while a policy uses it.
    """

    def __init__(self, engine: Engine, models: Models, *, sleeps: bool = False) -> None:
        self.engine = engine
        self.updates = models.updates
        self._models = models
        self._sleeps = sleeps
        self._version = -1
        self._paused = False

    async def leave_gpu(self) -> None:
        """Pause the engine until the next `load`, if `sleeps` is set."""
        if self._sleeps and not self._paused:
            await self.engine.pause()
            self._paused = True

    async def load(self, version: int) -> float | None:
        """Load the policy's weights if they changed or the engine is asleep. Return the seconds; None if not needed."""
        if self._version == version and not self._paused:
            return None
        start_time = perf_counter()
        if not self._paused:
            await self.engine.pause()
        policies, sampler = self._models.policies, self._models.sampler
        if sampler is not policies:
            sharding.copy_weights(policies.model, sampler.model)
        await self.engine.load(version, sampler.model)
        await self.engine.resume()
        self._paused, self._version = False, version
        return perf_counter() - start_time
