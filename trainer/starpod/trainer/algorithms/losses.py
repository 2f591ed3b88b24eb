"""Losses: the clipped policy loss (PPO, arXiv 1707.06347), the critic's, the KL divergence, and averages over tokens.

The weights of an optimiser step are computed over its whole batch, and a loss is sum(weights * per-token losses). Its
gradient is the sum over micro-batches and ranks, so the result does not depend on how the batch is split.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from starpod.trainer.algorithms.sections import KL, Correction, NoKL, NoWeights, TruncatedWeights
from starpod.trainer.algorithms.turns import on_tokens, turn_table
from starpod.trainer.data.batch import RolloutBatch

# --- averages ---------------------------------------------------------------------------------------------------------


def token_weights(mask_BT: Tensor, average: str, *, max_length: int) -> Tensor:
    """Return the weight of each token in the mean of a loss.

    Args:
        mask_BT: Mask of the tokens (bool). Rows without a token do not count.
        average: `token-mean`, every token counts the same (DAPO); `seq-mean-token-mean`, every episode counts the same
            (GRPO); `seq-mean-token-sum`, the mean over episodes of the sum over tokens; `seq-mean-token-sum-norm`, that
            sum divided by the constant `max_length` (Dr. GRPO).
        max_length: The constant of `seq-mean-token-sum-norm`, in tokens.

    Returns:
        Weights [B, T] (float32), 0 where the mask is False.

    Raises:
        ValueError: There is no average of this name.
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
"""Bound of log-ratios in nats. Beyond it a ratio is useless, and its exponential would overflow."""


def clamped_difference(logprobs: Tensor, other_logprobs: Tensor) -> Tensor:
    """Return logprobs - other_logprobs, clamped to [-20, 20]."""
    return (logprobs - other_logprobs).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)


def kl_divergence(estimator: Literal["k1", "k2", "k3"], logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
    """Return an estimate of KL(policy || reference) from each sampled token.

    Args:
        estimator: With d = logprobs - ref_logprobs, clamped to [-20, 20]: k1 = d is unbiased but noisy; k2 = d^2 / 2 is
            biased, but its gradient is right; k3 = exp(-d) + d - 1 is unbiased and never negative.
        logprobs: The policy's log-probabilities of the sampled tokens, of any shape.
        ref_logprobs: The reference's, of the same shape.

    Returns:
        Estimates in nats, in the arguments' shape.
    """
    difference = clamped_difference(logprobs, ref_logprobs)
    if estimator == "k1":
        return difference
    if estimator == "k2":
        return difference.square() / 2
    # Use expm1, because exp(-d) - 1 is imprecise near d = 0, where the result is about d^2 / 2.
    return (-difference).expm1() + difference


def kl_coefficients(config: KL, rollout: RolloutBatch) -> Tensor | float:
    """Return the coefficient of the KL divergence: one number, or [B, T] if agents have different coefficients."""
    if isinstance(config, NoKL):
        return 0.0
    if not config.agents:
        return config.coefficient
    coefficients = [
        [config.agents.get(turn.agent_id, config.coefficient) for turn in episode.turns] for episode in rollout.episodes
    ]
    return on_tokens(coefficients, rollout.mask_BT, rollout.turns_BT).float()


# --- the critic -------------------------------------------------------------------------------------------------------


def value_loss(values_BT: Tensor, old_values_BT: Tensor, returns_BT: Tensor, value_clip: float | None) -> Tensor:
    """Return half the squared error at each position.

    With value_clip, a second error is computed for the value clipped to within value_clip of the old value, and the
    larger error counts. Moving further in one update then gains nothing. It is a part of PPO's code (arXiv 1811.02553,
    section 4.1).

    Args:
        values_BT: The critic's values, which are trained.
        old_values_BT: Its values before the update; detached.
        returns_BT: Targets; detached.
        value_clip: How far a value may usefully move in one update, in units of returns; None does not clip.
    """
    old_values_BT, returns_BT = old_values_BT.detach(), returns_BT.detach()
    error_BT = (values_BT - returns_BT).square()
    if value_clip is not None:
        clipped_BT = old_values_BT + (values_BT - old_values_BT).clamp(-value_clip, value_clip)
        error_BT = torch.maximum(error_BT, (clipped_BT - returns_BT).square())
    return 0.5 * error_BT


# --- ratios of whole turns and episodes -------------------------------------------------------------------------------


def stretch_log_ratio(log_ratio_BT: Tensor, mask_BT: Tensor, stretches_BT: Tensor) -> Tensor:
    """Return for each token the mean log-ratio of its stretch: [B, T], 0 where the mask is False.

    A stretch is an episode or a turn. Its tokens share the mean as their value, but the gradient flows through each
    token's own log-ratio (GSPO-token, arXiv 2507.18071, equation 14). If all tokens of a stretch have the same
    advantage and weight, the gradient equals that of the stretch's ratio.

    Args:
        mask_BT: Mask of the tokens (bool).
        stretches_BT: Index of each token's stretch: 0 for whole episodes, or the token's turn.
    """
    table = turn_table(mask_BT, stretches_BT)
    mean_BT = table.spread(table.mean(log_ratio_BT.detach()))
    return mean_BT + (log_ratio_BT - log_ratio_BT.detach())


# --- bounds by turn ---------------------------------------------------------------------------------------------------


def bound_by_turn(
    bound: float | Sequence[float], decay: float | None, turns_BT: Tensor, dtype: torch.dtype
) -> Tensor | float:
    """Return how far each token's ratio may fall below or rise above 1: a tensor [B, T], or one number for all.

    Args:
        bound: One bound, or a list with one per turn. Turns beyond the list use its last entry.
        decay: The bound of turn k, counted from 0, is bound * decay^k; None is the same bound for all. A list has none.
        turns_BT: Turn of each token; -1 for padding.
    """
    turns_BT = turns_BT.clamp(min=0)
    if not isinstance(bound, float):
        return torch.tensor(bound, dtype=dtype, device=turns_BT.device)[turns_BT.clamp(max=len(bound) - 1)]
    return bound if decay is None else bound * torch.as_tensor(decay, dtype=dtype, device=turns_BT.device) ** turns_BT


# --- the policy -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class PolicyLoss:
    """Loss of each token, and masks of the tokens whose gradient is stopped by a bound."""

    per_token_BT: Tensor
    """Loss of each token, 0 outside the mask."""
    clipped_low_BT: Tensor
    """Whether a lower bound stops the gradient (bool)."""
    clipped_high_BT: Tensor
    """Whether an upper bound stops the gradient (bool)."""
    ratio_BT: Tensor
    """Ratio before clipping, detached; 1 outside the mask."""


def episode_log_ratio(logprobs_BT: Tensor, old_logprobs_BT: Tensor, mask_BT: Tensor) -> Tensor:
    """Return for each token the mean log-ratio of its episode (GSPO, arXiv 2507.18071, equation 7): [B, T].

    Args:
        logprobs_BT: Log-probabilities under the policy that learns, through which the gradient flows.
        old_logprobs_BT: Log-probabilities under the policy that ratios refer to.
        mask_BT: Mask of the tokens (bool).
    """
    log_ratio_BT = masked_log_ratio(logprobs_BT, old_logprobs_BT, mask_BT)
    return stretch_log_ratio(log_ratio_BT, mask_BT, torch.zeros_like(mask_BT, dtype=torch.int64))


def masked_log_ratio(logprobs_BT: Tensor, old_logprobs_BT: Tensor, mask_BT: Tensor) -> Tensor:
    """Return logprobs_BT - old_logprobs_BT within [-20, 20], 0 outside the mask (bool): [B, T]."""
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
    """Return PPO's loss -min(rho A, clip(rho, 1 - low, 1 + high) A) at each token (arXiv 1707.06347, equation 7).

    Args:
        log_ratio_BT: New minus old log-probability, through which the gradient flows.
        advantages_BT: Advantages A.
        mask_BT: Mask of the tokens (bool).
        low: How far the ratio may fall below 1: a number, or a tensor [B, T].
        high: How far it may rise above 1.
        dual_clip: For A < 0 the loss is at most dual_clip |A| (arXiv 1912.09729, equation 5); None is no limit.
    """
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


def weighted_loss(
    logprobs_BT: Tensor, log_ratio_BT: Tensor, advantages_BT: Tensor, mask_BT: Tensor, *, high: float
) -> PolicyLoss:
    """Return CISPO's loss -sg(min(rho, 1 + high)) A log p at each token (arXiv 2506.13585, equations 4 and 5).

    PPO's clip takes the gradient away from tokens whose ratio has moved too far. Here the ratio is only a bounded
    weight, so that every token keeps its gradient.

    Args:
        logprobs_BT: The new policy's log-probabilities, through which the gradient flows.
        log_ratio_BT: New minus old log-probability; detached.
        advantages_BT: Advantages A.
        mask_BT: Mask of the tokens (bool).
        high: The ratio is at most 1 + high.
    """
    ratio_BT = log_ratio_BT.detach().exp()
    loss_BT = -ratio_BT.clamp(max=1 + high) * advantages_BT * torch.where(mask_BT, logprobs_BT, 0.0)
    false_BT = torch.zeros_like(mask_BT)
    return PolicyLoss(torch.where(mask_BT, loss_BT, 0.0), false_BT, mask_BT & (ratio_BT > 1 + high), ratio_BT)


def binary_divergence(kind: Literal["tv", "kl"], logprobs_BT: Tensor, old_logprobs_BT: Tensor) -> Tensor:
    """Return the divergence at each token between old and new policy, reduced to "this token or any other".

    With the token's probabilities q (old) and p (new), `tv` is |p - q|, and `kl` is
    q log(q / p) + (1 - q) log((1 - q) / (1 - p)) (DPPO, arXiv 2602.04879, equations 13 and 14).

    Args:
        kind: `tv` (between 0 and 1) or `kl` (in nats).
    """
    p, q = logprobs_BT.exp(), old_logprobs_BT.exp()
    if kind == "tv":
        return (p - q).abs()
    # A probability of exactly 1 in one policy alone would be an infinite divergence.
    rest_p, rest_q = ((1 - probability).clamp(min=torch.finfo(probability.dtype).eps) for probability in (p, q))
    return q * (old_logprobs_BT - logprobs_BT) + rest_q * (rest_q / rest_p).log()


def divergence_loss(
    log_ratio_BT: Tensor,
    advantages_BT: Tensor,
    mask_BT: Tensor,
    divergence_BT: Tensor,
    *,
    low: float,
    high: float,
) -> PolicyLoss:
    """Return DPPO's loss -M rho A at each token (arXiv 2602.04879, equation 12).

    M is 0 if the update would move a token's probability further from the old one and the divergence already exceeds a
    bound: `high` for A > 0 and rho > 1, `low` for A < 0 and rho < 1. Otherwise M is 1.

    Args:
        log_ratio_BT: New minus old log-probability, through which the gradient flows.
        advantages_BT: Advantages A.
        mask_BT: Mask of the tokens (bool).
        divergence_BT: Divergence at each token, as `binary_divergence` returns it.
        low: Bound of the divergence if A < 0.
        high: Bound if A > 0.
    """
    ratio_BT = log_ratio_BT.exp()
    clipped_high_BT = mask_BT & (advantages_BT > 0) & (ratio_BT > 1) & (divergence_BT > high)
    clipped_low_BT = mask_BT & (advantages_BT < 0) & (ratio_BT < 1) & (divergence_BT > low)
    loss_BT = torch.where(mask_BT & ~clipped_high_BT & ~clipped_low_BT, -ratio_BT * advantages_BT, 0.0)
    return PolicyLoss(loss_BT, clipped_low_BT, clipped_high_BT, torch.where(mask_BT, ratio_BT.detach(), 1.0))


# --- tokens that another policy sampled -------------------------------------------------------------------------------
#
# Tokens may be sampled by an older policy, or by the same one computed differently. There are three policies (arXiv
# 2505.24298): the sampler, the policy that the update starts from (proximal), and the learner. PPO's ratio is learner
# over proximal, and its term is multiplied by proximal over sampler.


def proximal_logprobs(config: Correction, rollout: RolloutBatch) -> Tensor:
    """Return the log-probabilities [B, T] in the denominator of ratios.

    They are the sampler's in mode `bypass`, and otherwise those of the policy before the update (the proximal policy).
    """
    return rollout.sampler_logprobs_BT if config.mode == "bypass" else rollout.old_logprobs_BT


def correction_weights(
    config: Correction, old_logprobs_BT: Tensor, sampler_logprobs_BT: Tensor, mask_BT: Tensor
) -> Tensor:
    """Return weights [B, T] of the policy's loss; 1 outside the mask, and if both log-probabilities are equal.

    w is exp(old - sampler) of the token, or for level `sequence` its product over the episode. The weight depends on
    the mode:

    - `tis` (truncated importance sampling, fengyao.notion.site/off-policy-rl): min(w, cap).
    - `mis` (masked importance sampling, richardli.xyz/rl-collapse-3, section 1.2) and `icepop` (arXiv 2510.18855,
      equations 1 and 2): w, but 0 if w is outside [low, cap].
    - `geometric` (richardli.xyz/rl-collapse-3, section 3.3): 1, but 0 for episodes whose geometric mean of w is outside
      [low, cap].

    Args:
        old_logprobs_BT: Log-probabilities of the policy at the start of the update.
        sampler_logprobs_BT: Log-probabilities that the engine recorded when it sampled the tokens.
        mask_BT: Mask of the tokens (bool).
    """
    if isinstance(config, NoWeights):
        return torch.ones_like(old_logprobs_BT)
    log_ratio_BT = torch.where(mask_BT, clamped_difference(old_logprobs_BT, sampler_logprobs_BT), 0.0)
    if config.level == "sequence":
        sums_B1 = log_ratio_BT.sum(1, keepdim=True)
        lengths_B1 = mask_BT.sum(1, keepdim=True).clamp(min=1) if config.mode == "geometric" else 1
        log_ratio_BT = torch.where(mask_BT, sums_B1 / lengths_B1, 0.0)
    upper_bound = math.log(config.cap)
    if isinstance(config, TruncatedWeights):
        return log_ratio_BT.clamp(max=upper_bound).exp()
    lower_bound = math.log(config.low) if config.low else -math.inf
    inside_BT = (log_ratio_BT >= lower_bound) & (log_ratio_BT <= upper_bound)
    if config.mode == "geometric":
        return inside_BT.to(log_ratio_BT.dtype)
    return torch.where(inside_BT, log_ratio_BT.clamp(max=upper_bound).exp(), 0.0)
