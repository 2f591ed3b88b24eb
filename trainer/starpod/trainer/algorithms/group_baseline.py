"""Advantages without a critic: an episode against the others from its start state (GRPO, Dr. GRPO, MaxRL, RLOO, LOOP,
REINFORCE++). Groups are told by their ids, never by place or content."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from starpod.trainer.algorithms.gae import gae

ROUNDING = 1e-12
"""A standard deviation up to this share of the group's largest value, or of 1 where all are smaller, is 0: the same
rewards added in another order differ by some 1e-16."""


@dataclass(frozen=True, slots=True)
class GroupStatistics:
    """Of each item's own group, for n items. float64.

    mean_n; std_n: with ddof=1, 0 in a group of one; count_n: as floats; deviation_n: value minus mean, exactly 0 where
    std_n is.
    """

    mean_n: Tensor
    std_n: Tensor
    count_n: Tensor
    deviation_n: Tensor


def group_statistics(values_n: Tensor, groups_n: Tensor) -> GroupStatistics:
    """values_n: one number per item. groups_n: integer id of each item's group, in any order."""
    values_n = values_n.double()
    _, index_n = torch.unique(groups_n, return_inverse=True)
    size = int(index_n.max()) + 1 if index_n.numel() else 0

    def total(items_n: Tensor) -> Tensor:
        return items_n.new_zeros(size).index_add(0, index_n, items_n)

    count_g = total(torch.ones_like(values_n))
    mean_g = total(values_n) / count_g
    deviation_n = values_n - mean_g[index_n]
    std_g = (total(deviation_n.square()) / (count_g - 1).clamp(min=1)).sqrt()
    largest_g = torch.ones_like(mean_g).scatter_reduce(0, index_n, values_n.abs(), "amax")
    # An estimator that divides by the deviation would make an advantage out of rounding.
    differ_g = std_g > ROUNDING * largest_g
    std_g = torch.where(differ_g, std_g, 0.0)
    deviation_n = torch.where(differ_g[index_n], deviation_n, 0.0)
    return GroupStatistics(mean_g[index_n], std_g[index_n], count_g[index_n], deviation_n)


EPSILON = 1e-6
"""Added to a standard deviation before dividing by it."""


def grpo(returns_B: Tensor, groups_B: Tensor) -> Tensor:
    """GRPO (arXiv 2402.03300): (R - mean) / (std + 1e-6) with ddof=1. 0 in a group of one."""
    statistics = group_statistics(returns_B, groups_B)
    return statistics.deviation_n / (statistics.std_n + EPSILON)


def dr_grpo(returns_B: Tensor, groups_B: Tensor) -> Tensor:
    """Dr. GRPO (arXiv 2503.20783): R - mean, so that easy and hard groups are not blown up. 0 in a group of one."""
    return group_statistics(returns_B, groups_B).deviation_n


def maxrl(returns_B: Tensor, groups_B: Tensor) -> Tensor:
    """MaxRL: (R - mean) / mean, which weighs the first successes of hard groups most. 0 where the mean is not positive.

    Meant for returns that are not negative.
    """
    statistics = group_statistics(returns_B, groups_B)
    positive_B = statistics.mean_n > EPSILON
    return torch.where(positive_B, statistics.deviation_n / torch.where(positive_B, statistics.mean_n, 1.0), 0.0)


def rloo(returns_B: Tensor, groups_B: Tensor) -> Tensor:
    """R minus the mean of the group's other episodes = n / (n - 1) (R - mean). 0 in a group of one."""
    statistics = group_statistics(returns_B, groups_B)
    return statistics.deviation_n * statistics.count_n / (statistics.count_n - 1).clamp(min=1)


SMALLEST = 0.01
"""Advantages below this size teach nothing and are set to 0."""


def loop(returns_B: Tensor, groups_B: Tensor) -> Tensor:
    """Leave-one-out, not divided by a deviation; those smaller than 0.01 count as 0."""
    advantages_B = rloo(returns_B, groups_B)
    return torch.where(advantages_B.abs() < SMALLEST, 0.0, advantages_B)


def reinforce_plus_plus(rewards_BT: Tensor, mask_BT: Tensor, *, gamma: float = 1.0) -> Tensor:
    """The discounted reward from each sampled token on: [B, T], 0 where the mask is False."""
    return gae(rewards_BT, torch.zeros_like(rewards_BT), mask_BT, gamma=gamma, lam=1.0)


def reinforce_plus_plus_baseline(returns_B: Tensor, groups_B: Tensor) -> Tensor:
    """The return minus its group's mean, for each episode."""
    return dr_grpo(returns_B, groups_B)
