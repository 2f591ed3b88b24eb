"""Turns as positions of a table [B, K]. They are told by their ids, so a turn without reward is a turn."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class TurnTable:
    """Where the turns of a batch are.

    mask_BT: bool, the sampled tokens. index_BT: turn of each token, 0 outside the mask. mask_BK: bool, True where an
    episode has a sampled token of the turn. first_BT, last_BT: bool, True at a turn's first and last sampled token.
    """

    mask_BT: Tensor
    index_BT: Tensor
    mask_BK: Tensor
    first_BT: Tensor
    last_BT: Tensor

    def total(self, items_BT: Tensor) -> Tensor:
        """Sum over each turn's sampled tokens: [B, K]."""
        items_BT = torch.where(self.mask_BT, items_BT, 0.0)
        return items_BT.new_zeros(self.mask_BK.shape).scatter_add(1, self.index_BT, items_BT)

    def mean(self, items_BT: Tensor) -> Tensor:
        """Mean over each turn's sampled tokens: [B, K], 0 where there is none."""
        return self.total(items_BT) / self.total(torch.ones_like(items_BT)).clamp(min=1)

    def spread(self, items_BK: Tensor) -> Tensor:
        """Each turn's item on its sampled tokens: [B, T], 0 elsewhere."""
        return torch.where(self.mask_BT, items_BK.gather(1, self.index_BT), 0.0)


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
    count = int(index_BT.max()) + 1
    shape = (mask_BT.shape[0], count)
    tokens_BK = torch.zeros(shape, dtype=torch.int64, device=mask_BT.device).scatter_add(1, index_BT, mask_BT.long())
    # A token is its turn's last if as many of the turn's tokens have been seen as there are.
    seen_BT = mask_BT.long().cumsum(1)
    last_BT = mask_BT & (seen_BT == tokens_BK.cumsum(1).gather(1, index_BT))
    return TurnTable(mask_BT, index_BT, tokens_BK > 0, first_BT, last_BT)
