"""Updates turn by turn, with one step per turn, from the last turn or from the first (SeeUPO, arXiv 2602.06554).

An episode of T turns is treated as T agents with the same weights, which learn one after the other. A carry accounts
for earlier steps: each later step weights an episode by how much likelier its already updated turns became.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor

from starpod.trainer.algorithms.turns import Units
from starpod.trainer.data.batch import Advantages, Batch, RolloutBatch
from starpod.trainer.data.episode import Episode, part_sums
from starpod.trainer.update import PolicyTrainer

LARGEST = 3.0
"""Maximum absolute value of a normalised advantage."""
MOVE = 0.2
"""Maximum distance from 1 of the carry and of each of its factors."""
SMALLEST_STD = 1e-6
"""Advantages are normalised only if their standard deviation is above this."""


def normalise_turn(advantages_B: Tensor) -> Tensor:
    """Normalise one turn's advantages over all episodes to mean 0 and standard deviation 1 (ddof=1).

    Groups are not normalised separately. Results are clamped to [-LARGEST, LARGEST].
    """
    if len(advantages_B) > 1:
        std = advantages_B.std()
        if std > SMALLEST_STD:
            advantages_B = (advantages_B - advantages_B.mean()) / std
    return advantages_B.clamp(-LARGEST, LARGEST)


def next_carry(carry_B: Tensor, log_ratio_B: Tensor) -> Tensor:
    """Return the carry after a step that changed each row's mean log-probability per token by `log_ratio_B`."""
    factor_B = log_ratio_B.exp().clamp(1 - MOVE, 1 + MOVE)
    return (carry_B * factor_B).clamp(1 - MOVE, 1 + MOVE)


def turn_as_episode(episode: Episode, turn: int) -> Episode:
    """Return one turn as an episode. Everything before it is its prompt, and its reward is the whole episode's."""
    context: list[int] = []
    for past_turn in episode.turns[:turn]:
        context = [*([] if past_turn.fresh else context), *past_turn.prompt, *past_turn.reply]
    last_turn = episode.turns[turn]
    prompt = last_turn.prompt if last_turn.fresh else [*context, *last_turn.prompt]
    return replace(episode, turns=[replace(last_turn, prompt=prompt, fresh=True, parts=part_sums(episode.turns))])


def turn_steps(
    trainer: PolicyTrainer, batch: Batch, table: RolloutBatch, *, version: int, scale: float
) -> Iterator[tuple[str, dict[str, float]]]:
    """Take the policy's step on each turn, in the order of `algorithm.order`, and yield the metrics of each.

    Args:
        batch: Whole episodes.
        table: Their table, which receives advantages, ratios and marks.
    """
    table.advantages = Advantages(torch.zeros_like(table.old_logprobs_BT), None, table.mask_BT)
    turns_BT, episodes = table.turns_BT, batch.episodes
    max_turns = max(len(episode.turns) for episode in episodes)
    # A turn that fewer than two episodes reached has nothing to be compared with.
    turns = [turn for turn in range(max_turns) if int((turns_BT == turn).any(1).sum()) > 1]
    if trainer.algorithm.order == "reverse_turns":
        turns.reverse()
    carry: dict[tuple[int, int], float] = {}
    for turn in turns:
        members = [episode for episode in episodes if len(episode.turns) > turn and episode.turns[turn].reply]
        turn_batch = Batch([turn_as_episode(episode, turn) for episode in members], batch.device)
        turn_table = trainer.tabulate(turn_batch)
        trainer.score(turn_batch, turn_table)
        mask_BT, old_BT = turn_table.mask_BT, turn_table.old_logprobs_BT
        # Only the first step starts from the policy that sampled.
        fresh_version = version if turn == turns[0] else -1
        metrics = trainer.check_sampler(turn_batch, turn_table, old_BT, fresh_version, mask_BT)
        # Use the exact returns of the whole episodes, because summing parts in another order changes the last digit.
        returns = [[0.0] * (len(episode.turns[turn].reply) - 1) + [episode.total_reward] for episode in members]
        turn_table.rewards_BT = turn_batch.rows(returns, dtype=torch.float64)
        keys = [(episode.group, episode.member) for episode in members]
        carry_B = torch.tensor([carry.get(key, 1.0) for key in keys], device=batch.device)
        advantages_BT = trainer.estimate(turn_table).advantages_BT
        advantages_B = normalise_turn(advantages_BT[:, 0]) * carry_B
        advantages_BT = torch.where(mask_BT, advantages_B.unsqueeze(1), 0.0)
        turn_table.advantages = Advantages(advantages_BT, None, mask_BT)
        metrics |= {"update/turns": float(len(turns)), "update/carry_mean": float(carry_B.mean())}
        rows = range(len(turn_batch))
        yield "", metrics | trainer.take_step(turn_batch, turn_table, rows, version=fresh_version, scale=scale)
        change_B = Units.of(mask_BT, torch.zeros_like(turn_table.turns_BT)).mean(trainer.logprobs(turn_batch) - old_BT)[
            :, 0
        ]
        carry |= dict(zip(keys, next_carry(carry_B, change_B).tolist(), strict=True))
        in_turn_BT = turns_BT == turn
        for whole_BT, part_BT in (
            (table.advantages.advantages_BT, advantages_BT),
            (table.ratios_BT, turn_table.ratios_BT),
            (table.marks_BT, turn_table.marks_BT),
        ):
            assert whole_BT is not None and part_BT is not None
            whole_BT[in_turn_BT] = part_BT[mask_BT]
