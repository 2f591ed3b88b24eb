"""The clipped policy loss (PPO, arXiv 1707.06347): asymmetric bounds, dual clip, ratios per token, turn or episode."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from starpod.trainer.algorithms.config import AlgorithmConfig
from starpod.trainer.algorithms.gspo import stretch_log_ratio
from starpod.trainer.algorithms.ratios import clamped_difference
from starpod.trainer.algorithms.turn_clip import prefix_log_ratio, turn_bounds


@dataclass(frozen=True, slots=True)
class PolicyLoss:
    """per_token_BT: loss of each token, 0 outside the mask. clipped_low_BT, clipped_high_BT: bool, where a lower or an
    upper bound stops the gradient. ratio_BT: that was clipped, detached; 1 outside the mask."""

    per_token_BT: Tensor
    clipped_low_BT: Tensor
    clipped_high_BT: Tensor
    ratio_BT: Tensor


def policy_loss(
    config: AlgorithmConfig,
    logprobs_BT: Tensor,
    old_logprobs_BT: Tensor,
    advantages_BT: Tensor,
    mask_BT: Tensor,
    turns_BT: Tensor,
) -> PolicyLoss:
    """-min(rho A, clip(rho, 1 - low, 1 + high) A) at each token; for A < 0 at most dual_clip |A| (arXiv 1912.09729).

    logprobs_BT: under the policy that learns; the gradient's source. old_logprobs_BT: under the policy that ratios are
    taken to. All are [B whole episodes, T]; turns_BT as in Rollout. Log-ratios are held within 20.
    """
    advantages_BT, old_logprobs_BT = advantages_BT.detach(), old_logprobs_BT.detach()
    log_ratio_BT = torch.where(mask_BT, clamped_difference(logprobs_BT, old_logprobs_BT), 0.0)
    turn_clip = config.turn_clip
    token_log_ratio_BT = log_ratio_BT
    if config.policy_loss == "gspo":
        log_ratio_BT = stretch_log_ratio(log_ratio_BT, mask_BT, torch.zeros_like(turns_BT))
    elif turn_clip.kind == "turn_ratio":
        log_ratio_BT = stretch_log_ratio(log_ratio_BT, mask_BT, turns_BT)
    ratio_BT = log_ratio_BT.exp()

    if turn_clip.kind == "decay":
        low, high = turn_bounds(turn_clip, config.clip_low, config.clip_high, turns_BT, ratio_BT.dtype)
    else:
        low, high = ratio_BT.new_tensor(config.clip_low), ratio_BT.new_tensor(config.clip_high)
    loss_BT = torch.maximum(-ratio_BT * advantages_BT, -ratio_BT.clamp(1 - low, 1 + high) * advantages_BT)
    clipped_low_BT = mask_BT & (advantages_BT < 0) & (ratio_BT < 1 - low)
    clipped_high_BT = mask_BT & (advantages_BT > 0) & (ratio_BT > 1 + high)
    if config.dual_clip is not None:
        negative_BT = advantages_BT < 0
        loss_BT = torch.where(negative_BT, torch.minimum(loss_BT, -config.dual_clip * advantages_BT), loss_BT)
        clipped_high_BT = clipped_high_BT | (mask_BT & negative_BT & (ratio_BT > config.dual_clip))
    if turn_clip.kind == "prefix_guard":
        assert turn_clip.limit is not None
        prefix_BT = prefix_log_ratio(token_log_ratio_BT, mask_BT, turns_BT)
        limit = math.log(turn_clip.limit)
        below_BT, above_BT = prefix_BT < -limit, prefix_BT > limit
        loss_BT = torch.where(below_BT | above_BT, 0.0, loss_BT)
        clipped_low_BT, clipped_high_BT = clipped_low_BT | below_BT, clipped_high_BT | above_BT
    loss_BT = torch.where(mask_BT, loss_BT, 0.0)
    return PolicyLoss(loss_BT, clipped_low_BT, clipped_high_BT, torch.where(mask_BT, ratio_BT.detach(), 1.0))
