"""LOOP's advantages (arXiv 2502.01600)."""

from __future__ import annotations

import torch
from torch import Tensor

from starpod.trainer.algorithms.rloo import rloo

SMALLEST = 0.01
"""Advantages below this size teach nothing and are set to 0."""


def loop(returns_B: Tensor, groups_B: Tensor) -> Tensor:
    """Leave-one-out, not divided by a deviation; those smaller than 0.01 count as 0."""
    advantages_B = rloo(returns_B, groups_B)
    return torch.where(advantages_B.abs() < SMALLEST, 0.0, advantages_B)
