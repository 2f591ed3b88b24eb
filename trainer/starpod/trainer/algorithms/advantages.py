"""Computation of advantages from rewards, with a critic's values or with credit terms."""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

import torch
from torch import Tensor

from starpod.trainer.algorithms.config import AlgorithmConfig
from starpod.trainer.algorithms.credit import credit
from starpod.trainer.algorithms.losses import kl_coefficients, kl_divergence
from starpod.trainer.algorithms.sections import RewardKL
from starpod.trainer.algorithms.terms import CreditTerm
from starpod.trainer.data.batch import Advantages, RolloutBatch

VARIANCE_EPSILON = 1e-8
"""Added to the variance, so that advantages that only differ by rounding stay near 0."""


def whiten(advantages_BT: Tensor, mask_BT: Tensor) -> Tensor:
    """Return the advantages normalised to mean 0 and standard deviation 1 (ddof=1) over the tokens in the mask.

    The result is 0 outside the mask, and everywhere if all advantages are equal.
    """
    items_N = advantages_BT[mask_BT]
    if items_N.numel() < 2:
        return torch.zeros_like(advantages_BT)
    return torch.where(mask_BT, (advantages_BT - items_N.mean()) * (items_N.var() + VARIANCE_EPSILON).rsqrt(), 0.0)


def compute_advantages(config: AlgorithmConfig, rollout: RolloutBatch) -> Advantages:
    """Return the advantages of all episodes of a collection.

    Group statistics and whitening are computed over all episodes passed. Advantages are computed in the rewards' dtype
    and returned in that of the log-probabilities. Raises ValueError for a reward that is not on a sampled token.
    """
    mask_BT = rollout.mask_BT
    check_rewards(rollout.rewards_BT, mask_BT)
    rewards_BT = rollout.rewards_BT
    if isinstance(config.kl, RewardKL):
        rewards_BT = penalised_rewards(config.kl, rollout)
    advantages = config.advantage.estimate(rollout, rewards_BT, whiten=config.whiten)
    advantages_BT = advantages.advantages_BT
    if config.whiten and not config.advantage.whitens_itself:
        advantages_BT = whiten(advantages_BT, mask_BT)
    returns_BT, dtype = advantages.returns_BT, rollout.old_logprobs_BT.dtype
    return Advantages(
        advantages_BT.to(dtype), None if returns_BT is None else returns_BT.to(dtype), advantages.value_mask_BT
    )


def advantages_by_kind(
    config: AlgorithmConfig, rollout: RolloutBatch, branch_scale: Literal["none", "std"] = "none"
) -> Advantages:
    """Return the advantages of a batch, computed separately per kind of episode so as not to mix environments.

    Branches are compared with their siblings, whatever the estimator, and the critic does not learn from them.

    Args:
        branch_scale: See `CreditTerm.scale`; for branches.

    Raises:
        ValueError: A reward is not on a sampled token, or the estimator lacks something.
    """
    main, branches = rollout.main_and_branches(range(len(rollout.mask_BT)))
    rows: dict[str, list[int]] = {}
    for row in main:
        rows.setdefault(rollout.episodes[row].kind, []).append(row)
    if len(rows) == 1 and not branches:
        return compute_advantages(config, rollout)
    parts = [compute_advantages(config, rollout.rows(kind_rows)) for kind_rows in rows.values()]
    if branches:
        parts.append(sibling_advantages(config, rollout.rows(branches), branch_scale))
    order = torch.tensor([*(row for kind_rows in rows.values() for row in kind_rows), *branches]).argsort()
    order = order.to(rollout.mask_BT.device)
    returns_BT = None
    if any(part.returns_BT is not None for part in parts):
        returns_BT = torch.cat([part.advantages_BT if part.returns_BT is None else part.returns_BT for part in parts])
    return Advantages(
        torch.cat([part.advantages_BT for part in parts])[order],
        None if returns_BT is None else returns_BT[order],
        torch.cat([part.value_mask_BT for part in parts])[order],
    )


def sibling_advantages(config: AlgorithmConfig, rollout: RolloutBatch, scale: Literal["none", "std"]) -> Advantages:
    """Return the advantages of branches (DEEP-GRPO, arXiv 2602.14169), whatever the estimator.

    An advantage is the branch's return minus the mean return of all branches from the same state. scale: see
    `CreditTerm`.
    """
    rewards_BT = penalised_rewards(config.kl, rollout) if isinstance(config.kl, RewardKL) else rollout.rewards_BT
    state_ids: dict[object, int] = {}
    states = [(episode.group, episode.parent) for episode in rollout.episodes]
    siblings_B = torch.tensor([state_ids.setdefault(state, len(state_ids)) for state in states])
    siblings_B = siblings_B.to(rollout.groups_B.device)
    advantages_BT = credit((CreditTerm(scale=scale),), replace(rollout, groups_B=siblings_B), rewards_BT)
    advantages_BT = advantages_BT.to(rollout.old_logprobs_BT.dtype)
    return Advantages(advantages_BT, None, torch.zeros_like(rollout.mask_BT))


def check_rewards(rewards_BT: Tensor, mask_BT: Tensor) -> None:
    """Raise ValueError for a reward on a token that was not sampled, because no estimator would see it."""
    positions = ((rewards_BT != 0) & ~mask_BT).nonzero()
    if len(positions):
        row, column = positions[0].tolist()
        raise ValueError(
            f"episode {row} has a reward of {rewards_BT[row, column].item():g} at position {column}, which is not a "
            "sampled token, so it would be lost: put each turn's reward on the turn's last sampled token"
        )


def penalised_rewards(config: RewardKL, rollout: RolloutBatch) -> Tensor:
    """Return the rewards [B, T] minus the KL penalty: coefficient times KL to the reference at each sampled token."""
    if rollout.ref_logprobs_BT is None:
        raise ValueError("algorithm.kl.where is reward, but the reference policy's log-probabilities are missing")
    divergence_BT = kl_divergence(config.estimator, rollout.old_logprobs_BT, rollout.ref_logprobs_BT)
    return rollout.rewards_BT - kl_coefficients(config, rollout) * torch.where(rollout.mask_BT, divergence_BT, 0.0)
