"""Tables [B, K] of turns and other units. Units are identified by ids, so turns without a reward are included."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Units:
    """A division of each episode's sampled tokens into units, such as turns."""

    mask_BT: Tensor
    """Mask of the sampled tokens (bool)."""
    index_BT: Tensor
    """Unit of each token; 0 outside the mask."""
    mask_BK: Tensor
    """Whether an episode has a sampled token of the unit (bool)."""

    @classmethod
    def of(cls, mask_BT: Tensor, index_BT: Tensor) -> Units:
        """Return the division into units. index_BT: unit of each token, from 0; ignored outside the mask."""
        index_BT = torch.where(mask_BT, index_BT, 0)
        return cls(mask_BT, index_BT, _count(mask_BT, index_BT) > 0)

    def within(self, restriction_BT: Tensor) -> Units:
        """Return the units restricted to tokens where this mask is True. Units without such a token are removed."""
        mask_BT = self.mask_BT & restriction_BT
        counts_BK = torch.zeros_like(self.mask_BK, dtype=torch.int64).scatter_add(1, self.index_BT, mask_BT.long())
        return Units(mask_BT, self.index_BT, counts_BK > 0)

    def total(self, items_BT: Tensor) -> Tensor:
        """Return the sum over each unit's sampled tokens: [B, K]."""
        items_BT = torch.where(self.mask_BT, items_BT, 0.0)
        return items_BT.new_zeros(self.mask_BK.shape).scatter_add(1, self.index_BT, items_BT)

    def mean(self, items_BT: Tensor) -> Tensor:
        """Return the mean over each unit's sampled tokens: [B, K], 0 for a unit without any."""
        return self.total(items_BT) / self.total(torch.ones_like(items_BT)).clamp(min=1)

    def least(self, items_BT: Tensor) -> Tensor:
        """Return the minimum over each unit's sampled tokens: [B, K]; for a unit without any, the overall maximum.

        items_BT: integers.
        """
        items_BT = torch.where(self.mask_BT, items_BT, items_BT.max())
        return items_BT.max().expand(self.mask_BK.shape).scatter_reduce(1, self.index_BT, items_BT, "amin")

    def spread(self, items_BK: Tensor) -> Tensor:
        """Copy the item of each unit to all sampled tokens of the unit: [B, T], 0 elsewhere."""
        return torch.where(self.mask_BT, items_BK.gather(1, self.index_BT), 0.0)


@dataclass(frozen=True, slots=True)
class TurnTable(Units):
    """The turns of a batch as units."""

    first_BT: Tensor
    """Whether a token is its turn's first sampled one (bool)."""
    last_BT: Tensor
    """Whether a token is its turn's last sampled one (bool)."""


def _count(mask_BT: Tensor, index_BT: Tensor) -> Tensor:
    """Return the number of sampled tokens of each unit: [B, K]."""
    shape = (mask_BT.shape[0], int(index_BT.max()) + 1)
    return torch.zeros(shape, dtype=torch.int64, device=mask_BT.device).scatter_add(1, index_BT, mask_BT.long())


def turn_table(mask_BT: Tensor, turns_BT: Tensor) -> TurnTable:
    """Return the table of turns. turns_BT: turn of each sampled token, ascending along a row; ignored elsewhere.

    Raises ValueError if a sampled token has no turn or the turns descend.
    """
    index_BT = torch.where(mask_BT, turns_BT, 0)
    # Use the highest turn so far, so that positions between sampled tokens do not matter.
    highest_BT = torch.where(mask_BT, turns_BT, -1).cummax(1).values
    if bool((mask_BT & ((turns_BT < 0) | (turns_BT < highest_BT))).any()):
        raise ValueError("every sampled token needs its turn, numbered from 0 and never decreasing along a row")
    previous_BT = torch.cat([torch.full_like(highest_BT[:, :1], -1), highest_BT[:, :-1]], dim=1)
    first_BT = mask_BT & (turns_BT != previous_BT)
    tokens_BK = _count(mask_BT, index_BT)
    # A token is its turn's last if the row's tokens up to it include all tokens of the turn.
    counts_BT = mask_BT.long().cumsum(1)
    last_BT = mask_BT & (counts_BT == tokens_BK.cumsum(1).gather(1, index_BT))
    return TurnTable(mask_BT, index_BT, tokens_BK > 0, first_BT, last_BT)


def on_tokens(items: Sequence[Sequence[float]], mask_BT: Tensor, turns_BT: Tensor) -> Tensor:
    """Spread one item per turn over the turn's sampled tokens: [B, T], float64. Other positions are arbitrary.

    Args:
        mask_BT: Mask of the sampled tokens (bool).
        turns_BT: Turn of each sampled token, from 0.
    """
    width = max(map(len, items))
    table = torch.tensor([[*row, *[0.0] * (width - len(row))] for row in items], dtype=torch.float64)
    return table.to(turns_BT.device).gather(1, torch.where(mask_BT, turns_BT, 0))
