"""Weights for tokens that another policy sampled: an older one, or the same one computed otherwise.

Three policies are told apart (arXiv 2505.24298): the sampler, the policy that the update starts from (proximal), and
the one that learns. PPO's ratio is learner over proximal, and its term is multiplied by proximal over sampler.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from starpod.trainer.algorithms.losses import clamped_difference
from starpod.trainer.algorithms.sections import CorrectionConfig
from starpod.trainer.data.batch import RolloutBatch


def importance_weights(config: CorrectionConfig, rollout: RolloutBatch) -> Tensor:
    """Weights [B, T] of the policy's loss, exactly 1 where sampler and proximal policy agree, and outside the mask."""
    return correction_weights(config, rollout.old_logprobs_BT, rollout.sampler_logprobs_BT, rollout.mask_BT)


def proximal_logprobs(config: CorrectionConfig, rollout: RolloutBatch) -> Tensor:
    """What ratios are taken to, [B, T]: the sampler's log-probabilities in mode bypass, else the proximal policy's."""
    return rollout.sampler_logprobs_BT if config.mode == "bypass" else rollout.old_logprobs_BT


def correction_weights(
    config: CorrectionConfig, old_logprobs_BT: Tensor, sampler_logprobs_BT: Tensor, mask_BT: Tensor
) -> Tensor:
    """min(exp(old - sampler), cap) in mode truncated; in mode masked exp(old - sampler), and 0 outside [1/cap, cap].

    Per token, or with level sequence the product over the episode on each of its tokens.
    """
    if config.mode in ("off", "bypass"):
        return torch.ones_like(old_logprobs_BT)
    assert config.cap is not None
    log_ratio_BT = torch.where(mask_BT, clamped_difference(old_logprobs_BT, sampler_logprobs_BT), 0.0)
    if config.level == "sequence":
        log_ratio_BT = torch.where(mask_BT, log_ratio_BT.sum(1, keepdim=True), 0.0)
    limit = math.log(config.cap)
    if config.mode == "truncated":
        return log_ratio_BT.clamp(max=limit).exp()
    return torch.where(log_ratio_BT.abs() > limit, 0.0, log_ratio_BT.clamp(-limit, limit).exp())
