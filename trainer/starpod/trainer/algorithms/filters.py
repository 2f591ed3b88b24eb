"""Filters of groups: StarPO-S (arXiv 2504.20073), RAGEN-2 (arXiv 2604.06268), dynamic sampling (arXiv 2503.14476)."""

from __future__ import annotations

import itertools
import math
from collections.abc import Container, Sequence

from starpod.trainer.algorithms.config import AlgorithmConfig
from starpod.trainer.algorithms.sections import DynamicSamplingConfig, Filter, KeepAll, TopFraction
from starpod.trainer.data.group import Group, by_kind
from starpod.trainer.data.updates import Verdict

ZERO = 1e-10
"""Scores up to this count as zero."""

SLACK = 0.01
"""Tolerance of `top_p`, as in RAGEN-2: the kept deviations may sum to this much less than their share of the total. It
is in units of return."""


def filter_groups(config: Filter, groups: Sequence[Group]) -> list[Group]:
    """Return the groups that the filter keeps, in order. The result may be empty.

    Unless the strategy is `none`, groups with the highest standard deviation of their raw returns are kept.

    Each kind of group is filtered separately, because returns of several environments are not comparable.
    """
    kept_ids = {id(group) for peers in by_kind(groups).values() for group in _filter_alike(config, peers)}
    return [group for group in groups if id(group) in kept_ids]


def _filter_alike(config: Filter, groups: Sequence[Group]) -> list[Group]:
    scores = [group.reward_std for group in groups]
    identical_indices = {index for index, group in enumerate(groups) if config.drop_identical and group.identical}
    return [groups[index] for index in select(config, scores, without=identical_indices)]


def verdicts(config: Filter, groups: Sequence[Group], kept_groups: Sequence[Group]) -> dict[int, Verdict]:
    """Return the filter's verdict on each group by its id.

    Args:
        kept_groups: Result of `filter_groups` for these groups.
    """
    kept_ids = {group.id for group in kept_groups}
    verdict_by_id: dict[int, Verdict] = {}
    for peers in by_kind(groups).values():
        scores = [group.reward_std for group in peers]
        ranking = sorted(scores, reverse=True)
        count = sum(group.id in kept_ids for group in peers)
        rule = f"{config.strategy} {config.value:g}" if config.value is not None else config.strategy
        zeros = sum(score <= ZERO for score in scores)
        note = f", and always drops the {zeros} with deviation 0" if zeros else ""
        for group, score in zip(peers, scores, strict=True):
            if group.id not in kept_ids and config.drop_identical and group.identical:
                reason = "All members gave the same replies."
            elif config.strategy == "none":
                reason = "The run has no filter: all groups are trained on."
            else:
                rank = ranking.index(score) + 1
                reason = f"Its reward_std of {score:.3g} is number {rank} of {len(peers)}; {rule} keeps {count}{note}."
            verdict_by_id[group.id] = Verdict(group.id in kept_ids, reason)
    return verdict_by_id


def loss_scale(config: AlgorithmConfig, kept_fraction: float) -> float:
    """Return the factor by which to multiply the loss: 1, the fraction of groups kept, or its square root."""
    if config.filter_loss_scaling == "linear":
        return kept_fraction
    return math.sqrt(kept_fraction) if config.filter_loss_scaling == "sqrt" else 1.0


# --- selection --------------------------------------------------------------------------------------------------------


def select(config: Filter, scores: Sequence[float], *, without: Container[int] = ()) -> list[int]:
    """Return the indices of the scores to keep, ascending.

    Among equal scores, earlier ones are preferred. Scores of 0 are dropped unless the strategy is `none`.

    Args:
        scores: Standard deviation of each group's returns, at least 0.
        without: Indices that are dropped regardless of their scores.
    """
    if isinstance(config, KeepAll):
        return [index for index in range(len(scores)) if index not in without]
    candidates = [index for index, score in enumerate(scores) if index not in without and score > ZERO]
    ranking = sorted(candidates, key=lambda index: -scores[index])
    if isinstance(config, TopFraction):
        # Subtract 1e-9, because a product such as 0.07 * 100 is slightly above the intended whole number.
        return sorted(ranking[: math.ceil(config.value * len(scores) - 1e-9)])
    sorted_scores = [scores[index] for index in ranking]
    return sorted(ranking[: _shortest_prefix(sorted_scores, config.value * sum(sorted_scores) - SLACK)])


def _shortest_prefix(items: list[float], bound: float) -> int:
    """Return the length of the shortest non-empty prefix whose sum reaches the bound; 0 if none does."""
    for count, total in enumerate(itertools.accumulate(items), start=1):
        if total >= bound:
            return count
    return 0


# --- dynamic sampling -------------------------------------------------------------------------------------------------


def needs_reask(config: DynamicSamplingConfig, groups: Sequence[Group]) -> list[bool]:
    """Return for each group whether another start state should replace it, because all its returns are equal.

    A group with branches stays, since they can be learnt from.
    """
    return [config.enabled and group.reward_std <= ZERO and not group.branches for group in groups]
