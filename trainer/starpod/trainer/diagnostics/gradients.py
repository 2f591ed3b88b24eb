"""Gradient norms by reward deviation of the groups and by term of the loss."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import nn

from starpod.trainer.algorithms.filters import ZERO
from starpod.trainer.data.batch import split
from starpod.trainer.data.episode import Group
from starpod.trainer.parallel import whole

COMPONENTS = ("task", "entropy", "kl")


def reward_buckets(groups: Sequence[Group], count: int) -> dict[str, list[Group]]:
    """Groups by reward deviation: "zero", then up to `count` equal parts from low to high, "1" onwards.

    Groups without any deviation are apart because they have no task gradient at all under group-relative advantages.
    """
    ranked = sorted(groups, key=lambda group: group.reward_std)
    zero = [group for group in ranked if group.reward_std <= ZERO]
    parts = split(ranked[len(zero) :], count)
    return ({"zero": zero} if zero else {}) | {str(index): list(part) for index, part in enumerate(parts, start=1)}


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
        for name, bucket in reward_buckets(groups, buckets).items():
            prefix = f"gradients/{name}"
            tokens = sum(episode.sampled_tokens for group in bucket for episode in group.episodes)
            metrics[f"{prefix}/groups"] = float(len(bucket))
            metrics[f"{prefix}/reward_std_low"] = bucket[0].reward_std
            metrics[f"{prefix}/reward_std_high"] = bucket[-1].reward_std
            for component in components:
                model.zero_grad(set_to_none=True)
                backward(bucket, component)
                gradients = [p.grad for p in model.parameters() if p.grad is not None]
                norm = float(whole(nn.utils.get_total_norm(gradients)))
                metrics[f"{prefix}/{component}"] = norm
                metrics[f"{prefix}/{component}_per_token"] = norm / max(tokens, 1)
    finally:
        model.zero_grad(set_to_none=True)
    return metrics
