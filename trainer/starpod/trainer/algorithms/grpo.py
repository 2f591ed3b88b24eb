"""Group-relative advantages: an episode against the others from its start state. One number per episode."""

from __future__ import annotations

import torch
from torch import Tensor

from starpod.trainer.algorithms.groups import group_statistics

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
