"""Turns and other units as positions of a table [B, K]. Turns are told by their ids: one without reward is one."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Units:
    """A division of each episode's sampled tokens into units, such as turns.

    mask_BT: bool, the sampled tokens. index_BT: unit of each token, 0 outside the mask. mask_BK: bool, True where an
    episode has a sampled token of the unit.
    """

    mask_BT: Tensor
    index_BT: Tensor
    mask_BK: Tensor

    @classmethod
    def of(cls, mask_BT: Tensor, index_BT: Tensor) -> Units:
        """index_BT: from 0; not read outside the mask."""
        index_BT = torch.where(mask_BT, index_BT, 0)
        return cls(mask_BT, index_BT, _count(mask_BT, index_BT) > 0)

    def within(self, inside_BT: Tensor) -> Units:
        """The units' tokens where this is True; units without one are none."""
        mask_BT = self.mask_BT & inside_BT
        found_BK = torch.zeros_like(self.mask_BK, dtype=torch.int64).scatter_add(1, self.index_BT, mask_BT.long())
        return Units(mask_BT, self.index_BT, found_BK > 0)

    def total(self, items_BT: Tensor) -> Tensor:
        """Sum over each unit's sampled tokens: [B, K]."""
        items_BT = torch.where(self.mask_BT, items_BT, 0.0)
        return items_BT.new_zeros(self.mask_BK.shape).scatter_add(1, self.index_BT, items_BT)

    def mean(self, items_BT: Tensor) -> Tensor:
        """Mean over each unit's sampled tokens: [B, K], 0 where there is none."""
        return self.total(items_BT) / self.total(torch.ones_like(items_BT)).clamp(min=1)

    def least(self, items_BT: Tensor) -> Tensor:
        """Smallest of integers on each unit's sampled tokens: [B, K]; the largest of all where there is none."""
        items_BT = torch.where(self.mask_BT, items_BT, items_BT.max())
        return items_BT.max().expand(self.mask_BK.shape).scatter_reduce(1, self.index_BT, items_BT, "amin")

    def spread(self, items_BK: Tensor) -> Tensor:
        """Each unit's item on its sampled tokens: [B, T], 0 elsewhere."""
        return torch.where(self.mask_BT, items_BK.gather(1, self.index_BT), 0.0)


@dataclass(frozen=True, slots=True)
class TurnTable(Units):
    """Places of the turns of a batch. first_BT, last_BT: bool, True at a turn's first and last sampled token."""

    first_BT: Tensor
    last_BT: Tensor


def _count(mask_BT: Tensor, index_BT: Tensor) -> Tensor:
    """Sampled tokens of each unit: [B, K]."""
    shape = (mask_BT.shape[0], int(index_BT.max()) + 1)
    return torch.zeros(shape, dtype=torch.int64, device=mask_BT.device).scatter_add(1, index_BT, mask_BT.long())


def turn_table(mask_BT: Tensor, turns_BT: Tensor) -> TurnTable:
    """mask_BT: sampled tokens. turns_BT: index of each one's turn, ascending along a row; not read elsewhere.

    Raises ValueError where a sampled token has no turn or turns go back.
    """
    index_BT = torch.where(mask_BT, turns_BT, 0)
    # The highest turn so far, so that what lies between sampled tokens changes nothing.
    reached_BT = torch.where(mask_BT, turns_BT, -1).cummax(1).values
    if bool((mask_BT & ((turns_BT < 0) | (turns_BT < reached_BT))).any()):
        raise ValueError("the turn of every sampled token must be given, from 0 and never falling along a row")
    before_BT = torch.cat([torch.full_like(reached_BT[:, :1], -1), reached_BT[:, :-1]], dim=1)
    first_BT = mask_BT & (turns_BT != before_BT)
    tokens_BK = _count(mask_BT, index_BT)
    # A token is its turn's last if as many of the turn's tokens have been seen as there are.
    seen_BT = mask_BT.long().cumsum(1)
    last_BT = mask_BT & (seen_BT == tokens_BK.cumsum(1).gather(1, index_BT))
    return TurnTable(mask_BT, index_BT, tokens_BK > 0, first_BT, last_BT)
