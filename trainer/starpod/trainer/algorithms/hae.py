"""Hierarchical advantage estimation (HiPER, arXiv 2602.16165), over turns and over segments that follow one subgoal."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from starpod.trainer.algorithms.turns import on_tokens, turn_table
from starpod.trainer.data.episode import Episode, lines_of
from starpod.trainer.prompts.grammar import BLOCKS

TERM, HIGH, LOW = range(3)
"""Stages of a reply in order, each with its own value head: deciding whether to switch, choosing a subgoal, acting."""

_STAGES = {"think": TERM, "switch": TERM, "subgoal": HIGH}

LEAST = 8
"""Advantages are only whitened over at least this number of units. The deviation of fewer is unreliable."""


@dataclass(frozen=True, slots=True)
class Hierarchical:
    """Advantages by stage of the replies: [B, K] for K turns, 0 where there is no turn."""

    low_BK: Tensor
    high_BK: Tensor
    """Advantage of the segment that starts at the turn; 0 if none does."""
    term_BK: Tensor


def subgoal_begins(episodes: Sequence[Episode], mask_BT: Tensor, turns_BT: Tensor) -> Tensor:
    """Return a mask [B, T] of all tokens of turns that begin a subgoal.

    These are the turns that switch to another subgoal, and the first turn of each line (see `lines_of`).

    Args:
        mask_BT: Mask of their sampled tokens (bool).
        turns_BT: Turn of each sampled token, from 0.
    """
    marks = []
    for episode in episodes:
        first_ids = {id(line[0]) for line in lines_of(episode.turns)}
        marks.append([turn.switches or id(turn) in first_ids for turn in episode.turns])
    return mask_BT & on_tokens(marks, mask_BT, turns_BT).bool()


def stages(blocks_BT: Tensor) -> Tensor:
    """Return the stage of each token by its block: int64 [B, T]. An ill-formed reply has the stage LOW throughout."""
    block_stages = torch.tensor([*(_STAGES.get(name, LOW) for name in BLOCKS), LOW], device=blocks_BT.device)
    return block_stages[blocks_BT]  # index -1 is the last one


def hierarchical_gae(
    rewards_BK: Tensor,
    values_BK3: Tensor,
    starts_BK: Tensor,
    mask_BK: Tensor,
    *,
    bootstrap_B: Tensor | None = None,
    turn_gamma: float = 1.0,
    turn_lam: float = 1.0,
    segment_lam: float = 0.95,
) -> Hierarchical:
    """Return advantages over K turns, some of which start a segment.

        low:   delta_t = r_t + gamma V_next - V_low(t),  A_t = delta_t + gamma lam A_next  inside a segment
        high:  delta_k = sum_j gamma^j r + gamma^d V_high(next) - V_high(k),  A_k = delta_k + gamma^d lam_seg A_next
        term:  A_t = (rewards to the segment's end, and V_high there) - V_term(t)

    d is the number of turns in the segment. V_next is V_low of the next turn within a segment, V_high of the next
    segment at the last turn of a segment, and `bootstrap_B` at the last turn of the episode.

    Args:
        rewards_BK: Rewards of turns.
        values_BK3: The critic's values by stage (TERM, HIGH, LOW). V_high is only read at starts.
        starts_BK: Whether a segment starts at the turn (bool).
        mask_BK: Whether the turn exists (bool).
        bootstrap_B: Value of the state after the last turn; None: 0.
        turn_gamma: Discount per turn (gamma).
        turn_lam: Lambda per turn inside a segment (lam).
        segment_lam: Lambda per segment (lam_seg).
    """
    after_B = torch.zeros_like(rewards_BK[:, 0]) if bootstrap_B is None else bootstrap_B.to(rewards_BK.dtype)
    ends_B = torch.ones_like(mask_BK[:, 0])  # whether a segment ends before the next position
    value_B, low_B, worth_B, high_B, discount_B = (torch.zeros_like(after_B) for _ in range(5))
    columns: list[tuple[Tensor, Tensor, Tensor]] = []
    for k in reversed(range(mask_BK.shape[1])):
        mask_B, reward_B = mask_BK[:, k], rewards_BK[:, k]
        term_value_B, high_value_B, low_value_B = values_BK3[:, k].unbind(1)
        delta_B = reward_B + turn_gamma * torch.where(ends_B, after_B, value_B) - low_value_B
        new_low_B = delta_B + turn_gamma * turn_lam * torch.where(ends_B, 0.0, low_B)
        new_worth_B = reward_B + turn_gamma * torch.where(ends_B, after_B, worth_B)
        new_discount_B = turn_gamma * torch.where(ends_B, 1.0, discount_B)
        new_high_B = new_worth_B - high_value_B + new_discount_B * segment_lam * high_B
        starts_B = mask_B & starts_BK[:, k]
        columns.append(
            (
                torch.where(mask_B, new_low_B, 0.0),
                torch.where(starts_B, new_high_B, 0.0),
                torch.where(mask_B, new_worth_B - term_value_B, 0.0),
            )
        )
        low_B, value_B = torch.where(mask_B, new_low_B, low_B), torch.where(mask_B, low_value_B, value_B)
        worth_B = torch.where(mask_B, new_worth_B, worth_B)
        discount_B = torch.where(mask_B, new_discount_B, discount_B)
        high_B, after_B = torch.where(starts_B, new_high_B, high_B), torch.where(starts_B, high_value_B, after_B)
        ends_B = torch.where(mask_B, starts_B, ends_B)
    return Hierarchical(*(torch.stack(items[::-1], dim=1) for items in zip(*columns, strict=True)))


def whiten_units(items_BK: Tensor, mask_BK: Tensor, least: int = LEAST) -> Tensor:
    """Return the items normalised to mean 0 and standard deviation 1 (ddof=0) over the existing units.

    Args:
        mask_BK: Whether the unit exists (bool).
        least: If fewer units exist, the items are returned unchanged.
    """
    items_N = items_BK[mask_BK]
    if items_N.numel() < least:
        return items_BK
    return torch.where(mask_BK, (items_BK - items_N.mean()) / (items_N.std(correction=0) + 1e-8), 0.0)


def hae(
    rewards_BT: Tensor,
    values_BT: Tensor,
    mask_BT: Tensor,
    turns_BT: Tensor,
    *,
    blocks_BT: Tensor,
    switches_BT: Tensor,
    bootstrap_B: Tensor | None = None,
    turn_gamma: float = 1.0,
    turn_lam: float = 1.0,
    segment_lam: float = 0.95,
    whiten: bool = True,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return advantages [B, T], targets of the values [B, T], and the mask of tokens that the critic learns from.

    A turn's V_term is read at its first token, V_high at its first subgoal token, and V_low at the first token after
    that. A segment starts at the first turn of an episode, and at turns with a subgoal where `switches_BT` is True.
    Switch tokens get A_term, subgoal tokens A_high if a segment starts, and all others A_low.

    Args:
        values_BT: Value of each token by the head of its stage.
        mask_BT: Mask of the sampled tokens (bool).
        turns_BT: Turn of each sampled token, from 0, ascending along a row.
        blocks_BT: Block of each token as an index of BLOCKS; -1 in ill-formed replies.
        switches_BT: Mask of the tokens of turns that begin a subgoal (bool).
        bootstrap_B: Value of the state after the last turn; None: 0.
        turn_lam: Lambda per turn inside a segment.
        whiten: Whether to whiten the advantages of each stage over its units.
    """
    turns = turn_table(mask_BT, turns_BT)
    stages_BT = stages(blocks_BT)
    parts = turn_table(mask_BT, turns_BT * 3 + stages_BT)
    count = turns.mask_BK.shape[1]

    def by_turn(items: Tensor) -> Tensor:
        """Reshape [B, 3K] (or fewer columns) to [B, K, 3]."""
        return torch.nn.functional.pad(items, (0, 3 * count - items.shape[1])).view(-1, count, 3)

    mask_BK3 = by_turn(parts.mask_BK)
    # The segment before a start bootstraps from V_high, which does not exist without a subgoal.
    switches_BK = (turns.total(switches_BT.double()) > 0) & mask_BK3[..., HIGH]
    starts_BK = switches_BK | (turns.mask_BK & (turns.mask_BK.cumsum(1) == 1))
    values_BK3 = by_turn(parts.total(torch.where(parts.first_BT, values_BT, 0.0)))
    advantages = hierarchical_gae(
        turns.total(rewards_BT),
        values_BK3.to(rewards_BT.dtype),
        starts_BK,
        turns.mask_BK,
        bootstrap_B=bootstrap_B,
        turn_gamma=turn_gamma,
        turn_lam=turn_lam,
        segment_lam=segment_lam,
    )
    switch_mask_BT, subgoal_mask_BT = (blocks_BT == BLOCKS.index(name) for name in ("switch", "subgoal"))
    high_mask_BK = mask_BK3[..., HIGH] & starts_BK
    targets_BK3 = torch.stack([advantages.term_BK, advantages.high_BK, advantages.low_BK], dim=2) + values_BK3
    flat_targets = targets_BK3.flatten(1)[:, : parts.mask_BK.shape[1]]
    value_mask_BT = parts.first_BT & ((stages_BT != HIGH) | turns.spread(starts_BK.double()).bool())
    low_BK, high_BK, term_BK = advantages.low_BK, advantages.high_BK, advantages.term_BK
    if whiten:
        low_BK = whiten_units(low_BK, turns.mask_BK)
        high_BK = whiten_units(high_BK, high_mask_BK)
        term_BK = whiten_units(term_BK, turns.total(switch_mask_BT.double()) > 0)
    advantages_BT = torch.where(
        switch_mask_BT,
        turns.spread(term_BK),
        torch.where(subgoal_mask_BT, turns.spread(torch.where(starts_BK, high_BK, 0.0)), turns.spread(low_BK)),
    )
    advantages_BT = torch.where(mask_BT, advantages_BT, 0.0)
    return advantages_BT, torch.where(value_mask_BT, parts.spread(flat_targets), 0.0), value_mask_BT
