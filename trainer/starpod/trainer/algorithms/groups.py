"""Statistics of the episodes of one start state. Groups are told by their ids, never by place or content."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

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
