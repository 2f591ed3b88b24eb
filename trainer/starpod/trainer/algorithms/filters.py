"""Filters of groups: StarPO-S (arXiv 2504.20073), RAGEN-2 (arXiv 2604.06268), dynamic sampling (arXiv 2503.14476)."""

from __future__ import annotations

import math
import statistics
from collections.abc import Container, Sequence

from starpod.trainer.algorithms.config import AlgorithmConfig
from starpod.trainer.algorithms.sections import DynamicSamplingConfig, FilterConfig
from starpod.trainer.data.episode import Episode, Group, by_kind
from starpod.trainer.data.updates import Verdict

ZERO = 1e-10
"""Scores up to this size are zero."""

SLACK = 0.01
"""How far top_p's sum may stay below its share of the total, in units of the score, as in RAGEN-2."""


def filter_groups(config: FilterConfig, groups: Sequence[Group]) -> list[Group]:
    """The groups to keep, by their scores on raw returns, in their order; may be none.

    Each kind of groups is filtered by itself: returns of several environments do not compare.
    """
    kept = {id(group) for alike in by_kind(groups).values() for group in _filter_alike(config, alike)}
    return [group for group in groups if id(group) in kept]


def _filter_alike(config: FilterConfig, groups: Sequence[Group]) -> list[Group]:
    scores = [group_score(config.score, group) for group in groups]
    identical = {index for index, group in enumerate(groups) if config.drop_identical and group.identical}
    return [groups[index] for index in select(config, scores, without=identical)]


def verdicts(config: FilterConfig, groups: Sequence[Group], kept: Sequence[Group]) -> dict[int, Verdict]:
    """By the id of each group, what `filter_groups` made of it. kept: what that returned."""
    chosen = {group.id for group in kept}
    found: dict[int, Verdict] = {}
    for alike in by_kind(groups).values():
        scores = [group_score(config.score, group) for group in alike]
        ranked = sorted(scores, reverse=config.largest)
        count = sum(group.id in chosen for group in alike)
        rule = f"{config.strategy} {config.value:g}" if config.value is not None else config.strategy
        zeros = 0 if config.include_zero else sum(abs(score) <= ZERO for score in scores)
        known = f"{len(alike)}, {zeros} of them 0 and never kept" if zeros else f"{len(alike)}"
        for group, score in zip(alike, scores, strict=True):
            if group.id not in chosen and config.drop_identical and group.identical:
                why = "All its members gave the same replies."
            elif config.strategy == "none":
                why = "The run filters no groups: all are trained on."
            else:
                place = ranked.index(score) + 1
                why = f"Its {config.score} of {score:.3g} is number {place} of {known}; {rule} keeps {count}."
            found[group.id] = Verdict(group.id in chosen, why)
    return found


def loss_scale(config: AlgorithmConfig, kept_fraction: float) -> float:
    """What the loss is multiplied by if this share of the groups was kept: 1, the share, or its square root."""
    if config.filter_loss_scaling == "linear":
        return kept_fraction
    return math.sqrt(kept_fraction) if config.filter_loss_scaling == "sqrt" else 1.0


# --- scores -----------------------------------------------------------------------------------------------------------


def group_score(score: str, group: Group) -> float:
    """One number for a group; 0 for an empty one. Raises ValueError for another name.

    reward_std (ddof=1), reward_mean, reward_sum: of the episodes' raw returns. entropy, entropy_variance: mean and
    variance (ddof=1) over episodes of the mean surprise of a sampled token, in nats. length: mean sampled tokens.
    """
    if not group.episodes:
        return 0.0
    if score == "reward_std":
        return group.reward_std
    if score == "reward_mean":
        return statistics.fmean(group.returns)
    if score == "reward_sum":
        return math.fsum(group.returns)
    if score == "entropy":
        return statistics.fmean(map(_surprise, group.episodes))
    if score == "entropy_variance":
        return statistics.variance(map(_surprise, group.episodes)) if len(group.episodes) > 1 else 0.0
    if score == "length":
        return statistics.fmean(episode.sampled_tokens for episode in group.episodes)
    raise ValueError(f"no filter score {score!r}")


def _surprise(episode: Episode) -> float:
    """Mean of -log p over the sampled tokens: an estimate of the policy's entropy."""
    logprobs = [logprob for turn in episode.turns for logprob in turn.logprobs]
    return -statistics.fmean(logprobs) if logprobs else 0.0


# --- selection --------------------------------------------------------------------------------------------------------


def select(config: FilterConfig, scores: Sequence[float], *, without: Container[int] = ()) -> list[int]:
    """Indices of the scores to keep, ascending. Of equal scores the earlier goes first.

    without: indices that are not kept, whatever their scores.
    """
    if config.strategy == "none":
        return [index for index in range(len(scores)) if index not in without]
    candidates = [
        index
        for index, score in enumerate(scores)
        if index not in without and (config.include_zero or abs(score) > ZERO)
    ]
    sign = 1 if config.largest else -1
    ranked = sorted(candidates, key=lambda index: -sign * scores[index])
    return sorted(_cut(config, [scores[index] for index in ranked], ranked, len(scores)))


def _cut(config: FilterConfig, scores: list[float], ranked: list[int], total: int) -> list[int]:
    """The part of `ranked`, best first, that is kept. scores: theirs, in that order. total: number of all groups."""
    value = config.value
    assert value is not None
    if not ranked:
        return []
    if config.strategy == "top_fraction":
        # A product such as 0.07 * 100 lies a rounding error above the whole number that is meant.
        return ranked[: math.ceil(value * total - 1e-9)]
    if config.strategy == "top_k":
        return ranked[: int(value)]
    if config.strategy == "min_p":
        bound = scores[0] * value if config.largest else scores[0] / value
        return [
            index
            for index, score in zip(ranked, scores, strict=True)
            if (score >= bound if config.largest else score <= bound)
        ]
    if config.strategy == "top_p" and value >= 1 and config.include_zero:
        return ranked  # no filter, as RAGEN-2 has it: else the sum is reached before the zeros
    if config.strategy == "top_p":
        positive = [score for score in scores if score > 0]
        return ranked[: _shortest_prefix(positive, value * sum(scores) - SLACK)]
    sign = 1 if config.largest else -1
    weights = [math.exp(sign * (score - scores[0])) for score in scores]
    return ranked[: _shortest_prefix(weights, value * sum(weights) * (1 - 1e-12))]


def _shortest_prefix(items: list[float], bound: float) -> int:
    """Length of the shortest prefix, of at least one item, whose sum reaches the bound; 0 if none does."""
    reached = 0.0
    for count, item in enumerate(items, start=1):
        reached += item
        if reached >= bound:
            return count
    return 0


# --- dynamic sampling -------------------------------------------------------------------------------------------------


def needs_reask(config: DynamicSamplingConfig, groups: Sequence[Group]) -> list[bool]:
    """Whether each group's returns are all the same, so that another start state should take its place."""
    return [config.enabled and group.reward_std <= ZERO for group in groups]
