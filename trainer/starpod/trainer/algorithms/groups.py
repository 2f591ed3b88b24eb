"""Statistics of the episodes of one start state. Groups are told by their ids, never by place or content."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class GroupStatistics:
    """Of each item's own group, for n items.

    mean_n; std_n: with ddof=1, 0 in a group of one; count_n: as floats; deviation_n: value minus mean, exactly 0 in a
    group of one.
    """

    mean_n: Tensor
    std_n: Tensor
    count_n: Tensor
    deviation_n: Tensor


def group_statistics(values_n: Tensor, groups_n: Tensor) -> GroupStatistics:
    """values_n: one number per item. groups_n: integer id of each item's group, in any order."""
    _, index_n = torch.unique(groups_n, return_inverse=True)
    size = int(index_n.max()) + 1 if index_n.numel() else 0

    def total(items_n: Tensor) -> Tensor:
        return items_n.new_zeros(size).index_add(0, index_n, items_n)

    count_g = total(torch.ones_like(values_n))
    mean_g = total(values_n) / count_g
    deviation_n = values_n - mean_g[index_n]
    std_g = (total(deviation_n.square()) / (count_g - 1).clamp(min=1)).sqrt()
    return GroupStatistics(mean_g[index_n], std_g[index_n], count_g[index_n], deviation_n)
