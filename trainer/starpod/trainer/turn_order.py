"""Updates turn by turn, with one step per turn, from the last turn or from the first (SeeUPO, arXiv 2602.06554).

An episode of T turns is treated as T agents with the same weights, which learn one after the other. A carry accounts
for earlier steps: each later step weights an episode by how much likelier its already updated turns became.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from starpod.trainer.algorithms.turns import Units
from starpod.trainer.data.batch import Advantages, Batch
from starpod.trainer.data.episode import Episode, Group, episodes_of, part_sums
from starpod.trainer.data.updates import UpdateRecord
from starpod.trainer.update import PolicyTrainer, Step, Stream, advantages_by_kind

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
    trainers: Mapping[str, PolicyTrainer], groups: Sequence[Group], version: int, record: UpdateRecord
) -> Iterator[Step]:
    """Yield the policy's step on each turn, in the order of `algorithm.order`."""
    ((agent, trainer),) = trainers.items()
    episodes = episodes_of(groups)
    full_batch = Batch(episodes, trainer.parallel.device)
    record.begin(full_batch, torch.zeros(full_batch.mask_BT.shape, device=full_batch.device))
    turns_BT = full_batch.turns_BT()
    max_turns = max(len(episode.turns) for episode in episodes)
    # A turn that fewer than two episodes reached has nothing to be compared with.
    turns = [turn for turn in range(max_turns) if int((turns_BT == turn).any(1).sum()) > 1]
    if trainer.algorithm.order == "reverse_turns":
        turns.reverse()
    carry: dict[tuple[int, int], float] = {}
    for turn in turns:
        members = [episode for episode in episodes if len(episode.turns) > turn and episode.turns[turn].reply]
        batch = Batch([turn_as_episode(episode, turn) for episode in members], full_batch.device)
        # Only the first step starts from the policy that sampled.
        rollout, metrics = trainer.prepare(batch, version if turn == turns[0] else -1)
        # Use the exact returns of the whole episodes, because summing parts in another order changes the last digit.
        returns = [[0.0] * (len(episode.turns[turn].reply) - 1) + [episode.total_reward] for episode in members]
        rollout = replace(rollout, rewards_BT=batch.rows(returns, dtype=torch.float64))
        keys = [(episode.group, episode.member) for episode in members]
        carry_B = torch.tensor([carry.get(key, 1.0) for key in keys], device=batch.device)
        advantages_BT = advantages_by_kind(trainer.algorithm, rollout).advantages_BT
        advantages_B = normalise_turn(advantages_BT[:, 0]) * carry_B
        advantages_BT = torch.where(batch.mask_BT, advantages_B.unsqueeze(1), 0.0)
        part = UpdateRecord()
        part.begin(batch, advantages_BT)
        stream = Stream(batch, rollout, Advantages(advantages_BT, None, batch.mask_BT), record=part)
        metrics |= {"update/turns": float(len(turns)), "update/carry_mean": float(carry_B.mean())}
        yield Step(agent, [(stream, range(len(batch)))], metrics)
        change_BT = trainer.score(batch).logprobs_BT - rollout.old_logprobs_BT
        change_B = Units.of(batch.mask_BT, torch.zeros_like(rollout.turns_BT)).mean(change_BT)[:, 0]
        carry |= dict(zip(keys, next_carry(carry_B, change_B).tolist(), strict=True))
        record.copy_part(part, turns_BT == turn)
