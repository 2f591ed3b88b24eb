"""Updates turn by turn, with one step per turn, from the last turn or from the first (SeeUPO, arXiv 2602.06554).

An episode of T turns is treated as T agents with the same weights, which learn one after the other. A carry accounts
for earlier steps: each later step weights an episode by how much likelier its already updated turns became.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from starpod.trainer.algorithms.turns import Units
from starpod.trainer.data.batch import Advantages, Batch
from starpod.trainer.data.episode import Episode, Group, episodes_of, part_sums
from starpod.trainer.data.updates import UpdateRecord
from starpod.trainer.update import Learner

LARGEST = 3.0
"""Bound of a normalised advantage."""
MOVE = 0.2
"""Maximum distance from 1 of the carry and of each of its factors."""
SMALLEST_STD = 1e-6
"""Advantages are only divided by a deviation above this."""


def normalised(advantages_B: Tensor) -> Tensor:
    """Normalise to mean 0 and standard deviation 1 (ddof=1) over a turn's rows, not groups; clamp to LARGEST."""
    if len(advantages_B) > 1:
        std = advantages_B.std()
        if std > SMALLEST_STD:
            advantages_B = (advantages_B - advantages_B.mean()) / std
    return advantages_B.clamp(-LARGEST, LARGEST)


def carried(carry_B: Tensor, log_ratio_B: Tensor) -> Tensor:
    """Return the carry after a step that changed each row's mean log-probability per token by `log_ratio_B`."""
    factor_B = log_ratio_B.exp().clamp(1 - MOVE, 1 + MOVE)
    return (carry_B * factor_B).clamp(1 - MOVE, 1 + MOVE)


def turn_alone(episode: Episode, turn: int) -> Episode:
    """Return one turn as an episode. Everything before it is its prompt, and its reward is the whole episode's."""
    context: list[int] = []
    for before in episode.turns[:turn]:
        context = [*([] if before.fresh else context), *before.prompt, *before.reply]
    own = episode.turns[turn]
    prompt = own.prompt if own.fresh else [*context, *own.prompt]
    return replace(episode, turns=[replace(own, prompt=prompt, fresh=True, parts=part_sums(episode.turns))])


class TurnwiseLearner(Learner):
    """A learner that updates turn by turn if `algorithm.order` says so."""

    def learn(
        self,
        groups: Sequence[Group],
        *,
        version: int,
        scale: float = 1.0,
        rate: float = 1.0,
        record: UpdateRecord | None = None,
    ) -> dict[str, float]:
        if self.algorithm.order == "together":
            return super().learn(groups, version=version, scale=scale, rate=rate, record=record)
        for parameters in self.optimizer.param_groups:
            parameters["lr"] = parameters["rate"] * rate
        episodes = episodes_of(groups)
        whole = Batch(episodes, self.parallel.device)
        turns_BT = whole.turns_BT()
        advantages_BT = torch.zeros(whole.mask_BT.shape, device=whole.device)
        if record is not None:
            record.begin(whole, advantages_BT)
        order = range(max(len(episode.turns) for episode in episodes))
        carry: dict[tuple[int, int], float] = {}
        found: defaultdict[str, list[float]] = defaultdict(list)
        for turn in reversed(order) if self.algorithm.order == "reverse_turns" else order:
            # A turn that fewer than two episodes reached has nothing to be compared with.
            if int((turns_BT == turn).any(1).sum()) < 2:
                continue
            reached = [each for each in episodes if len(each.turns) > turn and each.turns[turn].reply]
            own_record = None if record is None else UpdateRecord()
            # Only the first step starts from the policy that sampled.
            fresh = -1 if found else version
            metrics, own_BT, mask_BT = self._learn_turn(
                reached, turn, carry, version=fresh, scale=scale, record=own_record
            )
            for name, value in metrics.items():
                found[name].append(value)
            # Both masks select the same tokens in the same order, row by row.
            advantages_BT[turns_BT == turn] = own_BT[mask_BT]
            if record is not None and own_record is not None:
                record.found_2BT[:, turns_BT == turn] = own_record.found_2BT[:, mask_BT]
        metrics = {name: max(each) if name.endswith("_max") else sum(each) / len(each) for name, each in found.items()}
        metrics["update/turns"] = float(len(found["update/grad_norm"]))
        metrics["update/learning_rate"] = self.optimizer.param_groups[0]["lr"]
        if record is not None:
            self.parallel.sum(record.found_2BT)
        return metrics

    def _learn_turn(
        self,
        episodes: Sequence[Episode],
        turn: int,
        carry: dict[tuple[int, int], float],
        *,
        version: int,
        scale: float,
        record: UpdateRecord | None,
    ) -> tuple[dict[str, float], Tensor, Tensor]:
        """Take one step on a turn that all these episodes have, and update `carry`, by group and member.

        Returns metrics, the advantages of the turn's tokens, and their mask.
        """
        batch = Batch([turn_alone(episode, turn) for episode in episodes], self.parallel.device)
        rollout, metrics = self.prepare(batch, version)
        # Use the exact returns of the whole episodes, because summing parts in another order changes the last digit.
        returns = [[0.0] * (len(each.turns[turn].reply) - 1) + [each.total_reward] for each in episodes]
        rollout = replace(rollout, rewards_BT=batch.rows(returns, dtype=torch.float64))
        places = [(episode.group, episode.member) for episode in episodes]
        carry_B = torch.tensor([carry.get(place, 1.0) for place in places], device=batch.device)
        advantages_B = normalised(self._advantages(batch, rollout).advantages_BT[:, 0]) * carry_B
        advantages_BT = torch.where(batch.mask_BT, advantages_B.unsqueeze(1), 0.0)
        if record is not None:
            record.begin(batch, advantages_BT)
        self.optimizer.zero_grad(set_to_none=True)
        advantages = Advantages(advantages_BT, None, batch.mask_BT)
        done = self.accumulate(batch, rollout, advantages, range(len(batch)), scale=scale, record=record)
        metrics |= done.metrics | self._step()
        moved_BT = self.score(batch).logprobs_BT - rollout.old_logprobs_BT
        moved_B = Units.of(batch.mask_BT, torch.zeros_like(rollout.turns_BT)).mean(moved_BT)[:, 0]
        carry |= dict(zip(places, carried(carry_B, moved_B).tolist(), strict=True))
        return metrics | {"update/carry_mean": float(carry_B.mean())}, advantages_BT, batch.mask_BT
