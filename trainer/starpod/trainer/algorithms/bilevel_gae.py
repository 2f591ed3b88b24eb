"""Bi-level GAE: credit between turns first, then between the tokens of a turn (VAGEN, arXiv 2510.16907)."""

from __future__ import annotations

import torch
from torch import Tensor

from starpod.trainer.algorithms.gae import gae
from starpod.trainer.algorithms.turns import turn_table


def bilevel_gae(
    rewards_BT: Tensor,
    values_BT: Tensor,
    mask_BT: Tensor,
    turns_BT: Tensor,
    *,
    bootstrap_B: Tensor | None = None,
    turn_gamma: float = 0.95,
    turn_lam: float = 1.0,
    gamma: float = 1.0,
    lam: float = 1.0,
) -> Tensor:
    """Advantages [B, T], 0 where the mask is False.

    Turns: GAE over the sequence of turns, with V at each turn's first sampled token; r_k is all that the turn was
    rewarded. Tokens: GAE inside each turn, alone, with the turn's advantage plus its value as what the turn is worth,
    credited at its last token. With gamma = lam = 1 a turn's first token has exactly the turn's advantage.
    """
    table = turn_table(mask_BT, turns_BT)
    rewards_BT = torch.where(mask_BT, rewards_BT, 0.0)
    rewards_BK = table.total(rewards_BT)
    values_BK = table.total(torch.where(table.first_BT, values_BT, 0.0))
    turns_BK = gae(rewards_BK, values_BK, table.mask_BK, bootstrap_B=bootstrap_B, gamma=turn_gamma, lam=turn_lam)
    # Other tokens of the turn keep what they were rewarded (a KL penalty): the last one gets the rest of the worth.
    elsewhere_BK = table.total(torch.where(table.last_BT, 0.0, rewards_BT))
    worth_BT = table.spread(turns_BK + values_BK - elsewhere_BK)
    rewards_BT = torch.where(table.last_BT, worth_BT, rewards_BT)
    return gae(rewards_BT, values_BT, mask_BT, gamma=gamma, lam=lam, ends_BT=table.last_BT)
