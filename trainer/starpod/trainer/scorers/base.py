"""Interface of turn scorers: models that are trained with the policy and pay the reward part `process`.

In each iteration the scorer first scores the turns and is then fitted to the same episodes. The policy is updated last.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from starpod.trainer.algorithms.terms import PROCESS
from starpod.trainer.checkpoints.state import flatten_optimizer, join_parts, split_parts, unflatten_optimizer
from starpod.trainer.data.batch import Batch
from starpod.trainer.data.episode import Episode
from starpod.trainer.data.group import Group, episodes_of
from starpod.trainer.data.sample import Block
from starpod.trainer.models.policy import Policy
from starpod.trainer.scorers.config import ScorerConfig


class TurnScorer(ABC):
    """Base class of scorers, each with its own model.

    Args:
        model: A policy with the same architecture as the trained one.
        micro_batch_tokens: Maximum number of tokens per forward pass.
    """

    def __init__(
        self, config: ScorerConfig, model: Policy, *, lr: float, micro_batch_tokens: int, temperature: float = 1.0
    ) -> None:
        self.config = config
        self.model = model
        self.micro_batch_tokens = micro_batch_tokens
        self.temperature = temperature
        self.fits = 0
        parameters = [*model.trained_parameters(), *model.critic_parameters()]
        self.optimizer = torch.optim.AdamW(parameters, lr=lr, weight_decay=0.0)

    @abstractmethod
    def score(self, episodes: Sequence[Episode]) -> list[list[float]]:
        """Return a score for each turn of each episode; 0 for turns shared with a parent or without tokens.

        Each episode must have sampled tokens.
        """

    @abstractmethod
    def fit(self, groups: Sequence[Group]) -> dict[str, float]:
        """Take a step towards better scores of these groups. Return metrics `scorer/...`."""

    def begin(self, policy: Policy) -> None:
        """Copy the policy's weights, after its warm start."""
        self.model.model.load_state_dict(policy.model.state_dict())

    # --- checkpoints --------------------------------------------------------------------------------------------------

    def state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Return tensors by name, and JSON values."""
        tensors, values = flatten_optimizer(self.optimizer.state_dict())
        named_tensors = join_parts({"model": self.model.state_dict(), "optimizer": tensors})
        return named_tensors, {"optimizer": values, "fits": self.fits}

    def load_state(self, tensors: Mapping[str, Tensor], values: Mapping[str, Any]) -> None:
        """Restore the values from `state`, except for the learning rate, which stays as configured."""
        parts = split_parts(tensors)
        self.model.load_state_dict(parts["model"])
        lr = self.optimizer.param_groups[0]["lr"]
        # Copies, because the optimiser keeps tensors as they are, and these are mapped from the checkpoint's file.
        tensors = {name: tensor.clone() for name, tensor in parts["optimizer"].items()}
        self.optimizer.load_state_dict(unflatten_optimizer(tensors, values["optimizer"]))
        self.optimizer.param_groups[0]["lr"] = lr
        self.fits = values["fits"]

    # --- for subclasses -----------------------------------------------------------------------------------------------

    def _batch(self, episodes: Sequence[Episode]) -> Batch:
        return Batch(episodes, self.model.device)

    def _by_turn(self, scores_BK: Tensor, episodes: Sequence[Episode]) -> list[list[float]]:
        """Return a table of turns as one list per episode. Turns after the table's last column get 0."""
        return [
            [*row, *[0.0] * len(episode.turns)][: len(episode.turns)]
            for row, episode in zip(scores_BK.tolist(), episodes, strict=True)
        ]

    def _blocks(self, batch: Batch) -> Iterator[Block]:
        for indices in batch.micro_batches(range(len(batch)), self.micro_batch_tokens, self.model.tokens_read):
            yield batch.block(indices)

    def _step(self) -> float:
        """Clip the gradients, and take the optimiser step if their norm is finite. Return the norm before clipping."""
        (group,) = self.optimizer.param_groups
        norm = float(torch.nn.utils.clip_grad_norm_(group["params"], 10.0))
        if math.isfinite(norm):
            self.optimizer.step()
        self.fits += 1
        return norm


def score_and_fit(scorer: TurnScorer, groups: Sequence[Group]) -> dict[str, float]:
    """Reward each turn by its current score, then fit the scorer to the groups. Return metrics.

    If the environment scores its states, `scorer/score_correlation` is the rank correlation of the turns' rewards
    with `Turn.progress`.
    """
    episodes = episodes_of(groups)
    if not episodes:  # the filter kept only branches
        return scorer.fit(groups)
    scores = scorer.score(episodes)
    pay(episodes, scores)
    metrics = {f"reward/{PROCESS}": sum(map(sum, scores)) / len(episodes)}
    pairs = [
        (score, turn.progress)
        for episode, turn_scores in zip(episodes, scores, strict=True)
        for turn, score in zip(episode.own_turns, turn_scores[episode.shared :], strict=True)
        if turn.progress is not None
    ]
    if (correlation := rank_correlation(pairs)) is not None:
        metrics["scorer/score_correlation"] = correlation
    return metrics | scorer.fit(groups)


def pay(episodes: Sequence[Episode], scores: Sequence[Sequence[float]]) -> None:
    """Write scores to the reward part `process` of the turns, replacing earlier scores.

    Turns that an episode shares with its parent are rewarded in the parent.
    """
    for episode, turn_scores in zip(episodes, scores, strict=True):
        for turn, score in zip(episode.own_turns, turn_scores[episode.shared :], strict=True):
            turn.pay({PROCESS: score})


def rank_correlation(pairs: Sequence[tuple[float, float]]) -> float | None:
    """Return Spearman's coefficient, with mean ranks for ties; None if one side does not vary."""
    if len(pairs) < 2:
        return None
    ranks = torch.tensor([_ranks([pair[side] for pair in pairs]) for side in (0, 1)], dtype=torch.float64)
    deviations = ranks - ranks.mean(1, keepdim=True)
    spread = deviations.square().sum(1).prod().sqrt()
    return float((deviations[0] * deviations[1]).sum() / spread) if spread > 0 else None


def _ranks(values: Sequence[float]) -> list[float]:
    order = sorted(range(len(values)), key=lambda index: values[index])
    ranks = [0.0] * len(values)
    starts = [0, *(k for k in range(1, len(order)) if values[order[k]] != values[order[k - 1]]), len(order)]
    for start, end in pairwise(starts):
        for index in order[start:end]:
            ranks[index] = (start + end - 1) / 2
    return ranks


def outcome(episode: Episode, attempt: int | None = None) -> float:
    """Return an episode's success as a number, or the environment's own return if success is unknown.

    attempt: number of the attempt; None is the last one, whose outcome is the episode's.
    """
    turns = [turn for turn in episode.turns if turn.attempt == attempt and "attempt" in turn.parts]
    if turns:
        success, reward = turns[-1].info["success"], sum(turn.parts["attempt"] for turn in turns)
    else:
        success, reward = episode.success, episode.own_return
    return reward if success is None else float(success)
