"""The critic's loss."""

from __future__ import annotations

import torch
from torch import Tensor


def value_loss(values_BT: Tensor, old_values_BT: Tensor, returns_BT: Tensor, value_clip: float | None) -> Tensor:
    """Half the squared error at each position, to be averaged by weights.

    With value_clip the larger of it and that of the value held within value_clip of its old one, so that an update
    gains nothing by moving further (arXiv 1707.06347's clip, for values). Old values and returns get no gradient.
    """
    old_values_BT, returns_BT = old_values_BT.detach(), returns_BT.detach()
    squared_BT = (values_BT - returns_BT).square()
    if value_clip is not None:
        held_BT = old_values_BT + (values_BT - old_values_BT).clamp(-value_clip, value_clip)
        squared_BT = torch.maximum(squared_BT, (held_BT - returns_BT).square())
    return 0.5 * squared_BT
