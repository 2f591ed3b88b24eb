"""Losses: the clipped policy loss (PPO, arXiv 1707.06347), the critic's, the KL divergence, and averages over tokens.

The weights of one optimiser step are computed over its whole batch, and a loss is sum(weights * per-token losses). So
micro-batches and ranks, which add up gradients, cannot change it however they share the tokens."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from starpod.trainer.algorithms.sections import CorrectionConfig, KLConfig, TurnClipConfig
from starpod.trainer.algorithms.turns import turn_table
from starpod.trainer.data.batch import RolloutBatch

# --- averages ---------------------------------------------------------------------------------------------------------


def token_weights(mask_BT: Tensor, average: str, *, max_length: int) -> Tensor:
    """Weights [B, T] as float32, 0 where the mask is False. Rows without a token count for nothing.

    average: `token-mean`, every token counts alike (DAPO); `seq-mean-token-mean`, every episode does (GRPO);
    `seq-mean-token-sum`, the mean over episodes of the sum over tokens; `seq-mean-token-sum-norm`, the same over the
    constant `max_length` (Dr. GRPO). Raises ValueError for another name.
    """
    weights_BT = mask_BT.float()
    length_B = weights_BT.sum(1, keepdim=True)
    rows = (length_B > 0).sum().clamp(min=1)
    if average == "token-mean":
        return weights_BT / weights_BT.sum().clamp(min=1)
    if average == "seq-mean-token-mean":
        return weights_BT / length_B.clamp(min=1) / rows
    if average == "seq-mean-token-sum":
        return weights_BT / rows
    if average == "seq-mean-token-sum-norm":
        return weights_BT / rows / max_length
    raise ValueError(f"no loss average {average!r}")


# --- log-ratios and KL divergence -------------------------------------------------------------------------------------


MAX_LOG_RATIO = 20.0
"""Log-ratios are held within this, in nats: beyond, a ratio is of no use and its exponential overflows."""


def clamped_difference(logprobs: Tensor, other_logprobs: Tensor) -> Tensor:
    """logprobs - other_logprobs, within [-20, 20]."""
    return (logprobs - other_logprobs).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)


def kl_divergence(estimator: Literal["k1", "k2", "k3"], logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
    """KL(policy || reference) in nats at each sample of the policy, of the shape given.

    With d = logprobs - ref_logprobs, held within 20: k1 = d, unbiased but noisy; k2 = d^2 / 2, biased, its gradient is
    right; k3 = exp(-d) + d - 1, unbiased and never negative.
    """
    difference = clamped_difference(logprobs, ref_logprobs)
    if estimator == "k1":
        return difference
    if estimator == "k2":
        return difference.square() / 2
    # exp(-d) - 1 loses its digits near d = 0, where the whole thing is about d^2 / 2.
    return (-difference).expm1() + difference


def kl_coefficients(config: KLConfig, rollout: RolloutBatch) -> Tensor | float:
    """What the divergence is multiplied by: one number, or where agents have their own [B, T]."""
    if not config.agents:
        return config.coefficient
    own = [[config.agents.get(agent, config.coefficient) for agent in agents] for agents in rollout.agents]
    most = max(map(len, own))
    table = torch.tensor([[*each, *[0.0] * (most - len(each))] for each in own], device=rollout.mask_BT.device)
    return table.gather(1, torch.where(rollout.mask_BT, rollout.turns_BT, 0))


# --- the critic -------------------------------------------------------------------------------------------------------


def value_loss(values_BT: Tensor, old_values_BT: Tensor, returns_BT: Tensor, value_clip: float | None) -> Tensor:
    """Half the squared error at each position, to be averaged by weights.

    With value_clip the larger of it and that of the value held within value_clip of its old one, so that an update
    gains nothing by moving further (arXiv 1707.06347's clip, for values). Old values and returns get no gradient.
    """
    old_values_BT, returns_BT = old_values_BT.detach(), returns_BT.detach()
    squared_BT = (values_BT - returns_BT).square()
    if value_clip is not None:
        held_BT = old_values_BT + (values_BT - old_values_BT).clamp(-value_clip, value_clip)
        squared_BT = torch.maximum(squared_BT, (held_BT - returns_BT).square())
    return 0.5 * squared_BT


# --- ratios of whole turns and episodes -------------------------------------------------------------------------------


def stretch_log_ratio(log_ratio_BT: Tensor, mask_BT: Tensor, stretches_BT: Tensor) -> Tensor:
    """The mean log-ratio of each stretch, on its tokens: [B, T], 0 where the mask is False.

    stretches_BT: index of each token's stretch: all 0 for whole episodes, the turns for turns. The value is the
    stretch's; the gradient goes through each token's own log-ratio (the paper's token-level form). Where all tokens of
    a stretch have the same advantage and weight, that is the gradient of the stretch's ratio.
    """
    table = turn_table(mask_BT, stretches_BT)
    mean_BT = table.spread(table.mean(log_ratio_BT.detach()))
    return mean_BT + (log_ratio_BT - log_ratio_BT.detach())


# --- bounds by turn ---------------------------------------------------------------------------------------------------


def turn_bounds(
    config: TurnClipConfig, clip_low: float, clip_high: float, turns_BT: Tensor, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Kind decay: how far ratios may fall below and rise above 1 at each token: two [B, T].

    The bounds of turn k are clip * decay^k, or entry k of a list, whose last one goes on.
    """
    turns_BT = turns_BT.clamp(min=0)
    if config.low is not None and config.high is not None:
        low, high = (
            torch.tensor(bounds, dtype=dtype, device=turns_BT.device)[turns_BT.clamp(max=len(bounds) - 1)]
            for bounds in (config.low, config.high)
        )
        return low, high
    assert config.decay is not None
    shrink_BT = torch.as_tensor(config.decay, dtype=dtype, device=turns_BT.device) ** turns_BT
    # Where bounds grow, the lower one still ends before 0.
    return (clip_low * shrink_BT).clamp(max=1.0), clip_high * shrink_BT


# --- the policy -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class PolicyLoss:
    """per_token_BT: loss of each token, 0 outside the mask. clipped_low_BT, clipped_high_BT: bool, where a lower or an
    upper bound stops the gradient. ratio_BT: that was clipped, detached; 1 outside the mask."""

    per_token_BT: Tensor
    clipped_low_BT: Tensor
    clipped_high_BT: Tensor
    ratio_BT: Tensor


def episode_log_ratio(logprobs_BT: Tensor, old_logprobs_BT: Tensor, mask_BT: Tensor) -> Tensor:
    """Return the mean log-ratio of each episode, on each of its tokens (GSPO, arXiv 2507.18071): [B, T]."""
    log_ratio_BT = masked_log_ratio(logprobs_BT, old_logprobs_BT, mask_BT)
    return stretch_log_ratio(log_ratio_BT, mask_BT, torch.zeros_like(mask_BT, dtype=torch.int64))


def masked_log_ratio(logprobs_BT: Tensor, old_logprobs_BT: Tensor, mask_BT: Tensor) -> Tensor:
    """Return log-ratios within [-20, 20], 0 outside the mask."""
    return torch.where(mask_BT, clamped_difference(logprobs_BT, old_logprobs_BT), 0.0)


def clipped_loss(
    log_ratio_BT: Tensor,
    advantages_BT: Tensor,
    mask_BT: Tensor,
    *,
    low: Tensor | float,
    high: Tensor | float,
    dual_clip: float | None,
) -> PolicyLoss:
    """Return -min(rho A, clip(rho, 1 - low, 1 + high) A) at each token; for A < 0 at most dual_clip |A| (arXiv
    1912.09729). low, high: one number each, or [B, T]."""
    ratio_BT = log_ratio_BT.exp()
    low, high = (bound if isinstance(bound, Tensor) else ratio_BT.new_tensor(bound) for bound in (low, high))
    loss_BT = torch.maximum(-ratio_BT * advantages_BT, -ratio_BT.clamp(1 - low, 1 + high) * advantages_BT)
    clipped_low_BT = mask_BT & (advantages_BT < 0) & (ratio_BT < 1 - low)
    clipped_high_BT = mask_BT & (advantages_BT > 0) & (ratio_BT > 1 + high)
    if dual_clip is not None:
        negative_BT = advantages_BT < 0
        loss_BT = torch.where(negative_BT, torch.minimum(loss_BT, -dual_clip * advantages_BT), loss_BT)
        clipped_high_BT = clipped_high_BT | (mask_BT & negative_BT & (ratio_BT > dual_clip))
    loss_BT = torch.where(mask_BT, loss_BT, 0.0)
    return PolicyLoss(loss_BT, clipped_low_BT, clipped_high_BT, torch.where(mask_BT, ratio_BT.detach(), 1.0))


# --- tokens that another policy sampled -------------------------------------------------------------------------------
#
# An older policy, or the same one computed otherwise. Three are told apart (arXiv 2505.24298): the sampler, the policy
# that the update starts from (proximal), and the one that learns. PPO's ratio is learner over proximal, and its term is
# multiplied by proximal over sampler.


def proximal_logprobs(config: CorrectionConfig, rollout: RolloutBatch) -> Tensor:
    """What ratios are taken to, [B, T]: the sampler's log-probabilities in mode bypass, else the proximal policy's."""
    return rollout.sampler_logprobs_BT if config.mode == "bypass" else rollout.old_logprobs_BT


def correction_weights(
    config: CorrectionConfig, old_logprobs_BT: Tensor, sampler_logprobs_BT: Tensor, mask_BT: Tensor
) -> Tensor:
    """Weights [B, T] of the policy's loss, exactly 1 where sampler and proximal policy agree, and outside the mask.

    min(exp(old - sampler), cap) in mode truncated; in mode masked exp(old - sampler), and 0 outside [1/cap, cap].
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
