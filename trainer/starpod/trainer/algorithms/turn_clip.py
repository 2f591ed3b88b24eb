"""Clipping that knows of turns. A "decoupled clip per turn" can be read in three ways; each is a function here.

All of them equal the plain clip while the ratio is 1: at the first gradient step of fresh data.
"""

from __future__ import annotations

import torch
from torch import Tensor

from starpod.trainer.algorithms.sections import TurnClipConfig
from starpod.trainer.algorithms.turns import turn_table


def turn_bounds(
    config: TurnClipConfig, clip_low: float, clip_high: float, turns_BT: Tensor, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Kind decay: how far ratios may fall below and rise above 1 at each token: two [B, T].

    The bounds of turn k are clip * decay^k, or entry k of a list, whose last one goes on.
    """
    turns_BT = turns_BT.clamp(min=0)
    if config.low is not None and config.high is not None:
        low, high = (
            torch.tensor(bounds, dtype=dtype, device=turns_BT.device)[turns_BT.clamp(max=len(bounds) - 1)]
            for bounds in (config.low, config.high)
        )
        return low, high
    assert config.decay is not None
    shrink_BT = torch.as_tensor(config.decay, dtype=dtype, device=turns_BT.device) ** turns_BT
    # Where bounds grow, the lower one still ends before 0.
    return (clip_low * shrink_BT).clamp(max=1.0), clip_high * shrink_BT


def prefix_log_ratio(log_ratio_BT: Tensor, mask_BT: Tensor, turns_BT: Tensor) -> Tensor:
    """Log of the product of the ratios of all turns before a token's own: [B, T]. A turn's is its mean log-ratio."""
    table = turn_table(mask_BT, turns_BT)
    mean_BK = table.mean(log_ratio_BT.detach())
    return table.spread(mean_BK.cumsum(1) - mean_BK)
