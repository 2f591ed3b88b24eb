"""Imitation of demonstrations."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

import torch

from starpod.trainer.data.batch import Batch
from starpod.trainer.data.episode import Episode
from starpod.trainer.models.policy import Policy
from starpod.trainer.parallel import Parallel
from starpod.trainer.warm_start.config import WarmStartConfig


def imitate(
    policy: Policy,
    episodes: Sequence[Episode],
    config: WarmStartConfig,
    parallel: Parallel,
    *,
    lr: float,
    micro_batch_tokens: int,
    temperature: float = 1.0,
    seed: int = 0,
    progress: Callable[[int, float], None] = lambda step, loss: None,
) -> float:
    """Trains the policy on the turns whose reward is 1. Returns the last loss, in nats per token.

    The critic is left as it is: returns of a demonstrator are not the policy's.
    """
    usable = [episode for episode in episodes if episode.sampled_tokens and any(turn.reward for turn in episode.turns)]
    if not usable:
        raise ValueError("no demonstration has a turn to imitate; lower warm_start.noise")
    trained = list(policy.trained_parameters())
    optimizer = torch.optim.AdamW(trained, lr=lr, betas=(0.9, 0.99), weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, config.steps, eta_min=lr / 10)
    rng = random.Random(seed)
    mean = float("nan")
    for step in range(config.steps):
        batch = Batch(rng.sample(usable, min(config.batch_size, len(usable))), parallel.device)
        weights_BT = batch.per_turn([[turn.reward for turn in episode.turns] for episode in batch.episodes], 0.0)
        weights_BT /= weights_BT.sum()
        optimizer.zero_grad(set_to_none=True)
        total = torch.zeros((), device=parallel.device)
        blocks = batch.micro_batches(range(len(batch)), micro_batch_tokens, policy.tokens_read)
        for block, mine in parallel.share(blocks):
            scores = policy.score(*batch.pack(block), temperature=temperature)
            unpacked = batch.unpack(block)
            loss = -(unpacked.place(scores.logprobs_N) * weights_BT[unpacked.rows]).sum() * float(mine)
            loss.backward()  # type: ignore[no-untyped-call]
            total += loss.detach()
        parallel.clip_grad_norm(trained, 1.0)
        optimizer.step()
        schedule.step()
        parallel.sum(total)
        mean = total.item()
        progress(step + 1, mean)
    return mean
