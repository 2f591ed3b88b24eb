"""Interface of turn scorers: models that are trained beside the policy and pay the reward part `process`.

In an iteration the present scorer scores the turns, is fitted to the same episodes, and then the policy is updated.
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
from starpod.trainer.data.episode import Episode, Group, episodes_of
from starpod.trainer.models.policy import Policy
from starpod.trainer.scorers.config import ScorerConfig


class TurnScorer(ABC):
    """Scores turns by a model of its own.

    model: a policy like the one that is trained. lr: of its optimiser. micro_batch_tokens: as for the policy.
    fits: how often it was fitted.
    """

    def __init__(
        self, config: ScorerConfig, model: Policy, *, lr: float, micro_batch_tokens: int, temperature: float = 1.0
    ) -> None:
        self.config = config
        self.model = model
        self.micro_batch_tokens = micro_batch_tokens
        self.temperature = temperature
        self.fits = 0
        trained = [*model.trained_parameters(), *model.critic_parameters()]
        self.optimizer = torch.optim.AdamW(trained, lr=lr, weight_decay=0.0)

    @abstractmethod
    def score(self, episodes: Sequence[Episode]) -> list[list[float]]:
        """A number for each turn of each episode, 0 for those before its own and those without tokens.

        Episodes have sampled tokens.
        """

    @abstractmethod
    def fit(self, groups: Sequence[Group]) -> dict[str, float]:
        """Takes a step towards scoring such episodes better; returns metrics, `scorer/...`."""

    def begin(self, policy: Policy) -> None:
        """Starts from the policy's weights, after its warm start."""
        self.model.model.load_state_dict(policy.model.state_dict())

    # --- what a checkpoint holds --------------------------------------------------------------------------------------

    def state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Tensors by name, and JSON values."""
        tensors, values = flatten_optimizer(self.optimizer.state_dict())
        named = join_parts({"model": self.model.state_dict(), "optimizer": tensors})
        return named, {"optimizer": values, "fits": self.fits}

    def load_state(self, tensors: Mapping[str, Tensor], values: Mapping[str, Any]) -> None:
        """Puts back what `state` gave; the learning rate is the one that is configured now."""
        parts = split_parts(tensors)
        self.model.load_state_dict(parts["model"])
        lr = self.optimizer.param_groups[0]["lr"]
        self.optimizer.load_state_dict(unflatten_optimizer(parts["optimizer"], values["optimizer"]))
        self.optimizer.param_groups[0]["lr"] = lr
        self.fits = values["fits"]

    # --- for those that are scorers -----------------------------------------------------------------------------------

    def _batch(self, episodes: Sequence[Episode]) -> Batch:
        return Batch(episodes, self.model.device)

    def _by_turn(self, scores_BK: Tensor, episodes: Sequence[Episode]) -> list[list[float]]:
        """A table of turns as a list of each episode's. The table ends with the last turn that was sampled."""
        return [
            [*row, *[0.0] * len(episode.turns)][: len(episode.turns)]
            for row, episode in zip(scores_BK.tolist(), episodes, strict=True)
        ]

    def _blocks(self, batch: Batch) -> Iterator[list[int]]:
        yield from batch.micro_batches(range(len(batch)), self.micro_batch_tokens, self.model.tokens_read)

    def _step(self) -> float:
        """Clips the gradients and takes the step; returns their norm. One that is not finite takes none."""
        (group,) = self.optimizer.param_groups
        norm = float(torch.nn.utils.clip_grad_norm_(group["params"], 10.0))
        if math.isfinite(norm):
            self.optimizer.step()
        self.fits += 1
        return norm


def score_and_fit(scorer: TurnScorer, groups: Sequence[Group]) -> dict[str, float]:
    """Pays the turns by the scorer as it is, and then fits it to them. Returns metrics.

    Where the environment scores its states, `scorer/score_correlation` is that of a turn's reward and its progress.
    """
    episodes = episodes_of(groups)
    scores = scorer.score(episodes)
    pay(episodes, scores)
    metrics = {f"reward/{PROCESS}": sum(map(sum, scores)) / len(episodes)}
    told = [
        (score, turn.progress)
        for episode, own in zip(episodes, scores, strict=True)
        for turn, score in zip(episode.own_turns, own[episode.shared :], strict=True)
        if turn.progress is not None
    ]
    if (correlation := rank_correlation(told)) is not None:
        metrics["scorer/score_correlation"] = correlation
    return metrics | scorer.fit(groups)


def pay(episodes: Sequence[Episode], scores: Sequence[Sequence[float]]) -> None:
    """Writes scores as the part `process` of the turns' rewards, over what it was.

    An episode's own turns alone: those that it shares with its parent are paid there.
    """
    for episode, own in zip(episodes, scores, strict=True):
        for turn, score in zip(episode.own_turns, own[episode.shared :], strict=True):
            turn.pay({PROCESS: score})


def rank_correlation(pairs: Sequence[tuple[float, float]]) -> float | None:
    """Spearman's coefficient, equal values at their mean rank; None where one side does not vary."""
    if len(pairs) < 2:
        return None
    ranks = torch.tensor([_ranks([pair[side] for pair in pairs]) for side in (0, 1)], dtype=torch.float64)
    centred = ranks - ranks.mean(1, keepdim=True)
    spread = centred.square().sum(1).prod().sqrt()
    return float((centred[0] * centred[1]).sum() / spread) if spread > 0 else None


def _ranks(values: Sequence[float]) -> list[float]:
    order = sorted(range(len(values)), key=lambda index: values[index])
    ranks = [0.0] * len(values)
    starts = [0, *(at for at in range(1, len(order)) if values[order[at]] != values[order[at - 1]]), len(order)]
    for start, end in pairwise(starts):
        for place in order[start:end]:
            ranks[place] = (start + end - 1) / 2
    return ranks


def outcome(episode: Episode, attempt: int | None = None) -> float:
    """Its success as a number; the environment's own return where that cannot say. attempt: of this one; None: the last
    one, whose outcome is the episode's."""
    earlier = [turn for turn in episode.turns if turn.attempt == attempt and "attempt" in turn.parts]
    if earlier:
        success, earned = earlier[-1].info["success"], sum(turn.parts["attempt"] for turn in earlier)
    else:
        success, earned = episode.success, episode.own_return
    return earned if success is None else float(success)
