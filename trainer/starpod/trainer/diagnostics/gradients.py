"""Which groups the gradient comes from: its norm by reward deviation and by term of the loss."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import nn

from starpod.trainer.algorithms.filters import ZERO
from starpod.trainer.data.episode import Group

COMPONENTS = ("task", "entropy", "kl")


@dataclass(frozen=True, slots=True)
class Bucket:
    """Groups of similar reward deviation, from `low` to `high`."""

    name: str
    groups: list[Group]

    @property
    def low(self) -> float:
        return min(group.reward_std for group in self.groups)

    @property
    def high(self) -> float:
        return max(group.reward_std for group in self.groups)

    @property
    def tokens(self) -> int:
        """Sampled tokens: what the norm is divided by to compare buckets."""
        return sum(episode.sampled_tokens for group in self.groups for episode in group.episodes)


def reward_buckets(groups: Sequence[Group], count: int) -> list[Bucket]:
    """Groups by reward deviation: "zero", then up to `count` equal parts from low to high, "1" onwards.

    Groups without any deviation are apart because they have no task gradient at all under group-relative advantages.
    """
    zero = [group for group in groups if group.reward_std <= ZERO]
    rest = sorted((group for group in groups if group.reward_std > ZERO), key=lambda group: group.reward_std)
    count = min(count, len(rest))
    cuts = [round(index * len(rest) / count) for index in range(count + 1)] if count else []
    parts = [rest[low:high] for low, high in pairwise(cuts)]
    named = [Bucket("zero", zero)] if zero else []
    return named + [Bucket(str(index), part) for index, part in enumerate(parts, start=1)]


def gradient_report(
    model: nn.Module,
    groups: Sequence[Group],
    backward: Callable[[Sequence[Group], str], None],
    *,
    buckets: int = 6,
    components: Sequence[str] = COMPONENTS,
) -> dict[str, float]:
    """Gradient norms by bucket and component, as metrics `gradients/<bucket>/...`. Takes no optimiser step.

    backward: adds the gradient of one component of the loss over these groups to the parameters' `.grad`.
    Per bucket: groups, reward_std_low and _high; per component: the norm, and `<component>_per_token` (over sampled
    tokens). Gradients that were there before are lost; none are left.
    """
    metrics: dict[str, float] = {}
    try:
        for bucket in reward_buckets(groups, buckets):
            prefix = f"gradients/{bucket.name}"
            metrics[f"{prefix}/groups"] = float(len(bucket.groups))
            metrics[f"{prefix}/reward_std_low"] = bucket.low
            metrics[f"{prefix}/reward_std_high"] = bucket.high
            for component in components:
                model.zero_grad(set_to_none=True)
                backward(bucket.groups, component)
                norm = _norm(model)
                metrics[f"{prefix}/{component}"] = norm
                metrics[f"{prefix}/{component}_per_token"] = norm / max(bucket.tokens, 1)
    finally:
        model.zero_grad(set_to_none=True)
    return metrics


def _norm(model: nn.Module) -> float:
    norm = nn.utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None])
    if hasattr(norm, "full_tensor"):  # parameters that are spread over ranks
        norm = norm.full_tensor()
    return float(norm) if isinstance(norm, torch.Tensor) else 0.0
