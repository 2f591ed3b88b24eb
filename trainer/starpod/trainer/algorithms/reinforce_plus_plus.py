"""REINFORCE++ and its variant with a group baseline (arXiv 2501.03262). Both are whitened over the whole batch."""

from __future__ import annotations

import torch
from torch import Tensor

from starpod.trainer.algorithms.gae import gae
from starpod.trainer.algorithms.grpo import dr_grpo


def reinforce_plus_plus(rewards_BT: Tensor, mask_BT: Tensor, *, gamma: float = 1.0) -> Tensor:
    """The discounted reward from each sampled token on: [B, T], 0 where the mask is False."""
    return gae(rewards_BT, torch.zeros_like(rewards_BT), mask_BT, gamma=gamma, lam=1.0)


def reinforce_plus_plus_baseline(returns_B: Tensor, groups_B: Tensor) -> Tensor:
    """The return minus its group's mean, for each episode."""
    return dr_grpo(returns_B, groups_B)
