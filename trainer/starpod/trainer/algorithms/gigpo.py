"""Group-in-group advantages (GiGPO, arXiv 2505.10978): episodes against episodes, and turns against turns that began in
the same state."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from starpod.trainer.algorithms.group_baseline import EPSILON, dr_grpo, group_statistics, grpo
from starpod.trainer.algorithms.turns import turn_table


def gigpo(
    rewards_BT: Tensor,
    mask_BT: Tensor,
    turns_BT: Tensor,
    groups_B: Tensor,
    state_keys: Sequence[Sequence[bytes]],
    *,
    weight: float = 1.0,
    gamma: float = 0.95,
    normalise: bool = False,
) -> Tensor:
    """Advantages [B, T], 0 where the mask is False: A = A_episode + weight A_step.

    A_episode: the return against the group's mean. A_step: a turn's discounted return from there on against the mean of
    all turns of the group that began in the same state; 0 where no other did. normalise: divide both by their standard
    deviation (ddof=1). state_keys: per episode and turn, the state's digest before the turn.

    Raises ValueError if `weight` is not 0 and a state has no key.
    """
    returns_B = torch.where(mask_BT, rewards_BT, 0.0).sum(1)
    episode_B = (grpo if normalise else dr_grpo)(returns_B, groups_B)
    advantages_BT = torch.where(mask_BT, episode_B.unsqueeze(1), 0.0)
    if not weight:
        return advantages_BT
    table = turn_table(mask_BT, turns_BT)
    step_BK = step_advantages(
        table.total(rewards_BT), table.mask_BK, groups_B, state_keys, gamma=gamma, normalise=normalise
    )
    return advantages_BT + weight * table.spread(step_BK)


def step_advantages(
    rewards_BK: Tensor,
    mask_BK: Tensor,
    groups_B: Tensor,
    state_keys: Sequence[Sequence[bytes]],
    *,
    gamma: float,
    normalise: bool,
) -> Tensor:
    """Of each turn among those of its group that began in the same state: [B, K]."""
    returns_BK = torch.zeros_like(rewards_BK)
    following_B = torch.zeros_like(rewards_BK[:, 0])
    for k in reversed(range(rewards_BK.shape[1])):
        mask_B = mask_BK[:, k]
        following_B = torch.where(mask_B, rewards_BK[:, k] + gamma * following_B, following_B)
        returns_BK[:, k] = following_B
    buckets: dict[tuple[int, bytes], int] = {}
    places = mask_BK.nonzero().tolist()
    groups = groups_B.tolist()
    bucket_n = []
    for row, turn in places:
        key = state_keys[row][turn] if row < len(state_keys) and turn < len(state_keys[row]) else b""
        if not key:
            raise ValueError(
                f"algorithm.advantage gigpo: turn {turn} of episode {row} has no state_key; the environment must "
                "report it, and its sessions must be opened so that it does"
            )
        bucket_n.append(buckets.setdefault((groups[row], key), len(buckets)))
    statistics = group_statistics(returns_BK[mask_BK], torch.tensor(bucket_n, device=mask_BK.device))
    step_n = statistics.deviation_n
    if normalise:
        step_n = step_n / (statistics.std_n + EPSILON)
    step_BK = torch.zeros_like(rewards_BK)
    step_BK[mask_BK] = step_n
    return step_BK
