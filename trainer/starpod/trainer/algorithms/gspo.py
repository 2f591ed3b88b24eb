"""Ratios of whole stretches of tokens (GSPO, arXiv 2507.18071)."""

from __future__ import annotations

from torch import Tensor

from starpod.trainer.algorithms.turns import turn_table


def stretch_log_ratio(log_ratio_BT: Tensor, mask_BT: Tensor, stretches_BT: Tensor) -> Tensor:
    """The mean log-ratio of each stretch, on its tokens: [B, T], 0 where the mask is False.

    stretches_BT: index of each token's stretch: all 0 for whole episodes, the turns for turns. The value is the
    stretch's; the gradient goes through each token's own log-ratio (the paper's token-level form). Where all tokens of
    a stretch have the same advantage and weight, that is the gradient of the stretch's ratio.
    """
    table = turn_table(mask_BT, stretches_BT)
    mean_BT = table.spread(table.mean(log_ratio_BT.detach()))
    return mean_BT + (log_ratio_BT - log_ratio_BT.detach())
