"""Imitation of demonstrations by supervised training."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from starpod.trainer.checkpoints.state import flatten_optimizer, unflatten_optimizer
from starpod.trainer.configuration.section import ConfigError
from starpod.trainer.data.batch import Batch
from starpod.trainer.data.episode import Episode
from starpod.trainer.models.policy import Policy
from starpod.trainer.parallel import sharding
from starpod.trainer.parallel.ranks import Parallel
from starpod.trainer.warm_start.config import WarmStartConfig


class Imitation:
    """Supervised training of a policy on weighted turns. A checkpoint can save it between two steps.

    The critic is not trained, because a demonstrator's returns are not the policy's. steps: number of optimiser steps.
    step: number of those that are done.
    """

    def __init__(
        self,
        policy: Policy,
        episodes: Sequence[Episode],
        config: WarmStartConfig,
        parallel: Parallel,
        *,
        lr: float,
        micro_batch_tokens: int,
        temperature: float = 1.0,
        seed: int = 0,
    ) -> None:
        self._episodes = [each for each in episodes if each.sampled_tokens and any(turn.weight for turn in each.turns)]
        if not self._episodes:
            raise ConfigError(
                "no demonstration has a turn to imitate: lower warm_start.noise, raise warm_start.best, or give "
                "warm_start.demonstrations with valid moves"
            )
        self.steps = config.steps_over(len(self._episodes))
        self._policy = policy
        self._config = config
        self._parallel = parallel
        self._micro_batch_tokens = micro_batch_tokens
        self._temperature = temperature
        self._parameters = list(policy.trained_parameters())
        self._optimizer = torch.optim.AdamW(self._parameters, lr=lr, betas=(0.9, 0.99), weight_decay=0.0)
        self._schedule = torch.optim.lr_scheduler.CosineAnnealingLR(self._optimizer, self.steps, eta_min=lr / 10)
        self._rng = random.Random(seed)
        self.step = 0

    def run(self, progress: Callable[[int, float], None] = lambda step, loss: None) -> None:
        """Take the remaining optimiser steps.

        progress: called after each step with its number and its loss in nats per token. If it raises an
        exception, the run ends between two steps.
        """
        while self.step < self.steps:
            loss = self._take_step()
            self.step += 1
            progress(self.step, loss)
        self._optimizer.state.clear()  # free the memory for other policies

    def _take_step(self) -> float:
        policy, parallel = self._policy, self._parallel
        batch = Batch(self._draw(), parallel.device)
        weights_BT = batch.per_turn([[turn.weight for turn in episode.turns] for episode in batch.episodes], 0.0)
        weights_BT /= weights_BT.sum()
        self._optimizer.zero_grad(set_to_none=True)
        total = torch.zeros((), device=parallel.device)
        blocks = batch.micro_batches(range(len(batch)), self._micro_batch_tokens, policy.tokens_read)
        for indices, counts in parallel.share(blocks):
            block = batch.block(indices)
            scores = policy.score(*block.inputs, temperature=self._temperature)
            loss = -(block.in_rows(scores.logprobs_N) * weights_BT[block.rows]).sum() * float(counts)
            loss.backward()  # type: ignore[no-untyped-call]
            total += loss.detach()
        sharding.clip_grad_norm(self._parameters, 1.0)
        self._optimizer.step()
        self._schedule.step()
        parallel.sum(total)
        return float(total)

    def _draw(self) -> list[Episode]:
        return self._rng.sample(self._episodes, min(self._config.batch_size, len(self._episodes)))

    # --- checkpoints --------------------------------------------------------------------------------------------------

    def state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Return the optimiser's tensors by name, and JSON values. All ranks take part."""
        tensors, values = flatten_optimizer(sharding.optimizer_state(self._policy, self._optimizer))
        return tensors, {"step": self.step, "optimizer": values}

    def load_state(self, tensors: Mapping[str, Tensor], values: Mapping[str, Any]) -> None:
        """Restore the values from `state`. Call it before the first step."""
        sharding.load_optimizer_state(self._policy, self._optimizer, unflatten_optimizer(tensors, values["optimizer"]))
        self.step = self._schedule.last_epoch = values["step"]
        for _ in range(self.step):
            self._draw()
