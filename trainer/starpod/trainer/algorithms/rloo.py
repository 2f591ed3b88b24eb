"""Leave-one-out advantages (RLOO, arXiv 2402.14740)."""

from __future__ import annotations

from torch import Tensor

from starpod.trainer.algorithms.groups import group_statistics


def rloo(returns_B: Tensor, groups_B: Tensor) -> Tensor:
    """R minus the mean of the group's other episodes = n / (n - 1) (R - mean). 0 in a group of one."""
    statistics = group_statistics(returns_B, groups_B)
    return statistics.deviation_n * statistics.count_n / (statistics.count_n - 1).clamp(min=1)
