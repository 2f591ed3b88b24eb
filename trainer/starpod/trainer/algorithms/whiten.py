"""Advantages on one scale."""

from __future__ import annotations

import torch
from torch import Tensor

EPSILON = 1e-8
"""Added to the variance, so that advantages that differ by rounding alone stay near 0."""


def whiten(advantages_BT: Tensor, mask_BT: Tensor) -> Tensor:
    """Mean 0 and standard deviation 1 (ddof=1) over all masked tokens; 0 elsewhere, and everywhere if all are equal."""
    items_N = advantages_BT[mask_BT]
    if items_N.numel() < 2:
        return torch.zeros_like(advantages_BT)
    return torch.where(mask_BT, (advantages_BT - items_N.mean()) * (items_N.var() + EPSILON).rsqrt(), 0.0)
