"""Implicit step rewards (iStar, arXiv 2509.19199): a second policy learns to prefer success, turn by turn."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from starpod.trainer.algorithms.turns import TurnTable, turn_table
from starpod.trainer.data.batch import Batch
from starpod.trainer.data.episode import Episode
from starpod.trainer.data.group import Group, episodes_of
from starpod.trainer.scorers.base import TurnScorer, outcome
from starpod.trainer.scorers.config import ImplicitConfig

EARLY_FITS = 10
"""Number of fits during which scores are clamped to [-1, 1]. Early on, the largest scores only show that scorer and
policy disagree."""


class _Ratios(NamedTuple):
    """Log-ratios of turns: log p_scorer - log p_sampler, summed over tokens."""

    sums_BK: Tensor
    """Sum of the log-ratios of each turn."""
    table: TurnTable
    """The turns."""


class ImplicitScorer(TurnScorer):
    """The `implicit` scorer. A turn's score is beta times the sum of its tokens' log-ratios.

    A log-ratio is log p_scorer - log p_sampler. The sampler is the policy that played, so the reference changes with
    the policy. In each group, every pair of a better and a worse episode adds -log sigmoid(s_better - s_worse) to the
    loss, where s is an episode's mean score per turn.
    """

    config: ImplicitConfig

    def score(self, episodes: Sequence[Episode]) -> list[list[float]]:
        if not self.fits:  # still equal to the policy: ratios are rounding, which `normalise` would amplify
            return [[0.0] * len(episode.turns) for episode in episodes]
        batch = self._batch(episodes)
        ratios = self._ratios(batch)
        scores_BK = self.config.beta * ratios.sums_BK
        if self.fits < EARLY_FITS:
            scores_BK = scores_BK.clamp(-1, 1)
        if self.config.normalise:
            scores_BK = scores_BK / (scores_BK.abs().max() + 1e-6)
        return self._by_turn(scores_BK, episodes)

    def fit(self, groups: Sequence[Group]) -> dict[str, float]:
        episodes = episodes_of(groups)
        better, worse = pairs_of(episodes)
        lone_groups = [group for group in groups if len({outcome(episode) for episode in episodes_of([group])}) < 2]
        metrics = {"scorer/pairs": float(len(better)), "scorer/groups_without_pairs": len(lone_groups) / len(groups)}
        if not better:
            return metrics
        batch = self._batch(episodes)
        ratios = self._ratios(batch)
        turns_B1 = ratios.table.mask_BK.sum(1, keepdim=True)
        # Compute the loss's derivative by each episode's score first, then backpropagate token by token. The gradient
        # therefore does not depend on the packing.
        scores_B = (self.config.beta * ratios.sums_BK.sum(1) / turns_B1.squeeze(1)).requires_grad_()
        margins = scores_B[better] - scores_B[worse]
        loss = pair_loss(margins)
        (slope_B,) = torch.autograd.grad(loss, scores_B)
        weights_BT = torch.where(batch.mask_BT, (slope_B.unsqueeze(1) * self.config.beta / turns_B1), 0.0)
        self.optimizer.zero_grad(set_to_none=True)
        for block in self._blocks(batch):
            scores = self.model.score(*block.inputs, temperature=self.temperature)
            (weights_BT[block.rows] * block.in_rows(scores.logprobs_N.float())).sum().backward()  # type: ignore[no-untyped-call]
        return metrics | {
            "scorer/loss": loss.item(),
            "scorer/accuracy": (margins > 0).float().mean().item(),
            "scorer/grad_norm": self._step(),
        }

    @torch.no_grad()
    def _ratios(self, batch: Batch) -> _Ratios:
        logprobs_BT = torch.zeros(batch.mask_BT.shape, device=batch.device)
        for block in self._blocks(batch):
            scores = self.model.score(*block.inputs, temperature=self.temperature)
            logprobs_BT[block.rows] += block.in_rows(scores.logprobs_N.float())
        table = turn_table(batch.mask_BT, batch.turns_BT())
        return _Ratios(table.total(logprobs_BT - batch.sampler_logprobs_BT()), table)


def pairs_of(episodes: Sequence[Episode]) -> tuple[list[int], list[int]]:
    """Return the indices of the better and the worse episode of every pair in a group with different outcomes."""
    better, worse = [], []
    for first_index, first in enumerate(episodes):
        for second_index, second in enumerate(episodes):
            if first.group == second.group and outcome(first) > outcome(second):
                better.append(first_index)
                worse.append(second_index)
    return better, worse


def pair_loss(margins: Tensor) -> Tensor:
    """Return the mean of -log sigmoid over pairs."""
    return -logsigmoid(margins).mean()
