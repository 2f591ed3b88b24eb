"""Gradient norms by reward deviation of the groups, by term of the loss and by agent."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from statistics import fmean, variance

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
                norm = gradient_norm(model, partial(backward, bucket, component))
                metrics[f"{prefix}/{component}"] = norm
                metrics[f"{prefix}/{component}_per_token"] = norm / max(tokens, 1)
    finally:
        model.zero_grad(set_to_none=True)
    return metrics


def gradient_norm(model: nn.Module, backward: Callable[[], object]) -> float:
    """Norm of the gradient that `backward` adds to the parameters, which is left there. What was there is lost."""
    model.zero_grad(set_to_none=True)
    backward()
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    return float(whole(nn.utils.get_total_norm(gradients)))


def pooled_factors(scores: Iterable[tuple[int, str, float]]) -> dict[str, float]:
    """What each agent's mean squared advantage is multiplied by where all agents share one mean and deviation (Dr. MAS,
    arXiv 2602.08847): (std_k^2 + (mean_k - mean)^2) / std^2, a mean over the groups in which it has two scores.

    scores: group, agent and score, of one episode each. A gradient grows by about the factor's root.
    """
    groups: defaultdict[int, defaultdict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for group, agent, score in scores:
        groups[group][agent].append(score)
    found: defaultdict[str, list[float]] = defaultdict(list)
    for agents in groups.values():
        pooled = [score for own in agents.values() for score in own]
        spread = variance(pooled) if len(pooled) > 1 else 0.0
        for agent, own in agents.items():
            if spread > ZERO and len(own) > 1:
                found[agent].append((variance(own) + (fmean(own) - fmean(pooled)) ** 2) / spread)
    return {agent: fmean(factors) for agent, factors in found.items()}
