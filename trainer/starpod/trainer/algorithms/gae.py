"""Generalised advantage estimation (arXiv 1506.02438) over sampled tokens, and over turns (VAGEN, arXiv 2510.16907)."""

from __future__ import annotations

import torch
from torch import Tensor

from starpod.trainer.algorithms.turns import turn_table


def gae(
    rewards_BT: Tensor,
    values_BT: Tensor,
    mask_BT: Tensor,
    *,
    bootstrap_B: Tensor | None = None,
    gamma: float = 1.0,
    lam: float = 1.0,
    ends_BT: Tensor | None = None,
) -> Tensor:
    """Return advantages [B, T], 0 where the mask is False.

        delta_t = r_t + gamma V_next - V_t,    A_t = delta_t + gamma lam A_next

    `next` is the next position whose mask is True. Positions are tokens, or turns if the arguments are [B, K]. The
    critic's targets are advantages + values.

    Args:
        values_BT: The critic's value of the context before each position.
        mask_BT: Mask of the sampled tokens. Other positions are ignored.
        bootstrap_B: V_next after the last position; None: 0.
        gamma: Discount per position.
        lam: Lambda per position.
        ends_BT: Positions after which the sum begins anew, with V_next 0.
    """
    next_value_B = torch.zeros_like(values_BT[:, 0]) if bootstrap_B is None else bootstrap_B.to(values_BT.dtype)
    next_advantage_B = torch.zeros_like(next_value_B)
    columns: list[Tensor] = []
    for t in reversed(range(values_BT.shape[1])):
        mask_B = mask_BT[:, t]
        value_B, advantage_B = next_value_B, next_advantage_B
        if ends_BT is not None:
            value_B, advantage_B = (torch.where(ends_BT[:, t], 0.0, item) for item in (value_B, advantage_B))
        delta_B = rewards_BT[:, t] + gamma * value_B - values_BT[:, t]
        next_advantage_B = torch.where(mask_B, delta_B + gamma * lam * advantage_B, next_advantage_B)
        next_value_B = torch.where(mask_B, values_BT[:, t], next_value_B)
        columns.append(torch.where(mask_B, next_advantage_B, 0.0))
    return torch.stack(columns[::-1], dim=1)


def trajectory_baseline(
    rewards_BT: Tensor,
    values_BT: Tensor,
    mask_BT: Tensor,
    *,
    bootstrap_B: Tensor | None = None,
    gamma: float = 1.0,
) -> tuple[Tensor, Tensor]:
    """Return advantages and returns [B, T], with the critic's value at the first sampled token as the only baseline.

    Every token's advantage is the episode's return minus that value. Both results are 0 where the mask is False.

    Args:
        values_BT: The critic's values, of which the first sampled token's is used.
        mask_BT: Mask of the sampled tokens (bool).
        bootstrap_B: Value of the state after the last token; None: 0.
        gamma: Discount per sampled token, from the first one.
    """
    zeros_BT = torch.zeros_like(rewards_BT)
    to_go_BT = gae(rewards_BT, zeros_BT, mask_BT, bootstrap_B=bootstrap_B, gamma=gamma, lam=1.0)
    first_BT = first_token(mask_BT)
    return_B = torch.where(first_BT, to_go_BT, 0.0).sum(1)
    baseline_B = torch.where(first_BT, values_BT, 0.0).sum(1)
    advantages_BT = torch.where(mask_BT, (return_B - baseline_B).unsqueeze(1), 0.0)
    return advantages_BT, torch.where(mask_BT, return_B.unsqueeze(1), 0.0)


def first_token(mask_BT: Tensor) -> Tensor:
    """Return a mask [B, T] that is True at the first True of each row."""
    return mask_BT & (mask_BT.cumsum(1) == 1)


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
    """Return advantages [B, T], 0 where the mask is False.

    Turn level: GAE over the sequence of turns, with V at each turn's first sampled token and the turn's total reward.
    Token level: GAE within each turn. The rewards of a turn's tokens sum to the turn's advantage plus V at its first
    token. With gamma = lam = 1, a turn's first token has exactly the turn's advantage.

    Args:
        values_BT: The critic's value of the context before each token.
        mask_BT: Mask of the sampled tokens (bool).
        turns_BT: Turn of each sampled token, from 0, ascending along a row.
        bootstrap_B: Value of the state after the last turn; None: 0.
        gamma: Discount per token within a turn.
        lam: Lambda per token within a turn.
    """
    table = turn_table(mask_BT, turns_BT)
    rewards_BT = torch.where(mask_BT, rewards_BT, 0.0)
    rewards_BK = table.total(rewards_BT)
    values_BK = table.total(torch.where(table.first_BT, values_BT, 0.0))
    turns_BK = gae(rewards_BK, values_BK, table.mask_BK, bootstrap_B=bootstrap_B, gamma=turn_gamma, lam=turn_lam)
    # Other tokens of the turn keep their rewards (a KL penalty). The last token gets the rest of the turn's value.
    other_rewards_BK = table.total(torch.where(table.last_BT, 0.0, rewards_BT))
    last_rewards_BT = table.spread(turns_BK + values_BK - other_rewards_BK)
    rewards_BT = torch.where(table.last_BT, last_rewards_BT, rewards_BT)
    return gae(rewards_BT, values_BT, mask_BT, gamma=gamma, lam=lam, ends_BT=table.last_BT)
