"""Metrics of one training step, by the names under which they are logged."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import get_args

from starpod.trainer.algorithms.filters import ZERO
from starpod.trainer.data.episode import End, Episode, lines_of, reports_success
from starpod.trainer.data.group import Group, by_kind, episodes_of
from starpod.trainer.diagnostics.diversity import diversity

THIRDS = ("early", "middle", "late")
"""Names of an episode's thirds. Metrics count in which third a search branches."""
ENDS: tuple[End, ...] = tuple(end for end in get_args(End) if end != "failed")


def episode_metrics(groups: Sequence[Group]) -> dict[str, float]:
    """Return metrics of the collected episodes, before any filter and without failed episodes."""
    episodes = [episode for group in groups for episode in group.episodes]
    if not episodes:
        return {}
    turns = [turn for episode in episodes for turn in episode.turns]
    count, turn_count = len(episodes), max(len(turns), 1)
    returns = [episode.total_reward for episode in episodes]
    metrics = {
        "collect/return_mean": statistics.fmean(returns),
        "collect/return_std": statistics.pstdev(returns),
        "collect/reward_std_in_group": statistics.fmean(group.reward_std for group in groups),
        "collect/own_std_in_group": statistics.fmean(group.own_std for group in groups),
        "collect/episodes": float(count),
        "collect/turns_mean": len(turns) / count,
        "collect/tokens_per_turn": sum(len(turn.reply) for turn in turns) / turn_count,
        "collect/actions_per_turn": sum(turn.executed for turn in turns) / turn_count,
        "collect/format_rate": sum(turn.well_formed for turn in turns) / turn_count,
        "collect/valid_rate": sum(turn.valid > 0 for turn in turns) / turn_count,
        "collect/effective_rate": sum(turn.effective > 0 for turn in turns) / turn_count,
        "collect/truncated_rate": sum(turn.finish == "length" for turn in turns) / turn_count,
    }
    ends = Counter(episode.end for episode in episodes)
    metrics |= {f"end/{end or 'agent'}": ends[end] / count for end in ENDS}
    if reports_success(episodes):
        metrics["collect/success"] = sum(episode.success is True for episode in episodes) / count
    if any("switch" in turn.blocks for turn in turns):
        lines = [line for episode in episodes for line in lines_of(episode.turns)]
        starts = sum(turn.switches or turn is line[0] for line in lines for turn in line)
        metrics |= {
            "collect/switch_rate": sum(turn.switches for turn in turns) / turn_count,
            "collect/segment_turns": len(turns) / max(starts, 1),
        }
    return metrics | _reward_parts(episodes) | _pass_at_n(groups) | _identical(groups) | _attempts(episodes)


def search_metrics(groups: Sequence[Group]) -> dict[str, float]:
    """Return the cost of a search, including discarded replies, and the depth of its branches."""
    costs = [group.spent for group in groups if group.spent is not None]
    metrics = {
        "search/environment_steps": float(sum(cost.steps for cost in costs)),
        "search/sampled_tokens": float(sum(cost.tokens for cost in costs)),
        "search/forks": float(sum(cost.forks for cost in costs)),
    }
    weights = [turn.weight for episode in episodes_of(groups) for turn in episode.own_turns if turn.weight != 1]
    if weights:
        metrics["search/weight"] = statistics.fmean(weights)
    branches = [branch for group in groups for branch in group.branches]
    if branches:
        turns = {(group.id, episode.member): len(episode.turns) for group in groups for episode in group.episodes}
        states = {(branch.group, *branch.parent) for branch in branches if branch.parent is not None}
        depths = [turn / turns[group, member] for group, member, turn in states if (group, member) in turns]
        metrics["search/branches"] = float(len(branches))
        metrics["search/branch_return"] = statistics.fmean(branch.total_reward for branch in branches)
        metrics["search/branch_depth"] = statistics.fmean(sorted(depths))
        thirds = Counter(min(int(3 * depth), 2) for depth in depths)
        metrics |= {f"search/pivots_{name}": thirds[index] / len(depths) for index, name in enumerate(THIRDS)}
    return metrics


def tokens_spent(groups: Sequence[Group]) -> int:
    """Return the number of tokens sampled for the groups, including tokens that a search discarded."""
    return sum(
        group.spent.tokens if group.spent is not None else sum(episode.sampled_tokens for episode in group.members)
        for group in groups
    )


def spent_in(metrics: Mapping[str, float | None]) -> dict[str, float]:
    """Return environment steps, sampled tokens and forks of an iteration, from its metrics.

    The counts include replies that a search discarded. They are 0 if episodes came from files. They are not computed
    from rates and times, whose periods differ if episodes continue during updates.
    """
    played = "time/collect" in metrics
    steps = (metrics.get("collect/episodes") or 0.0) * (metrics.get("collect/turns_mean") or 0.0) * played
    counts = {
        "environment_steps": steps,
        "sampled_tokens": steps * (metrics.get("collect/tokens_per_turn") or 0.0),
        "forks": 0.0,
    }
    return {name: metrics.get(f"search/{name}") or count for name, count in counts.items()}


def metrics_by_task(groups: Sequence[Group]) -> dict[str, float]:
    """Return the metrics of each of several environments, as `environments/<name>/<metric>`."""
    metrics: dict[str, float] = {}
    for name, peers in by_kind(groups).items():
        figures = episode_metrics(peers) | diversity(episodes_of(peers)) | {"collect/groups": float(len(peers))}
        metrics |= {
            f"environments/{name}/{metric.removeprefix('collect/')}": value
            for metric, value in figures.items()
            if metric.startswith("collect/")
        }
    return metrics


def kept_by_task(groups: Sequence[Group], kept_groups: Sequence[Group]) -> dict[str, float]:
    """Return the share of each environment's groups that a filter kept, as `environments/<name>/kept_fraction`."""
    kept_by_kind = by_kind(kept_groups)
    return {
        f"environments/{name}/kept_fraction": len(kept_by_kind.get(name, ())) / len(peers)
        for name, peers in by_kind(groups).items()
    }


def _identical(groups: Sequence[Group]) -> dict[str, float]:
    """Return, among groups with unequal returns, the share whose members all gave the same replies.

    The result is empty if no group has unequal returns. Returns of identical replies differ only by chance, and the
    group-relative gradients of such a group cancel out.
    """
    differing = [group for group in groups if group.reward_std > ZERO]
    return {"collect/identical_fraction": statistics.fmean(g.identical for g in differing)} if differing else {}


def _attempts(episodes: Sequence[Episode]) -> dict[str, float]:
    """Return metrics that compare last attempts with first ones (SCoRe, arXiv 2409.12917); empty without attempts.

    Last attempts that repeat the first and correct nothing are the collapse that SCoRe prevents.
    """
    first_successes, last_successes, repeats = [], [], []
    for episode in episodes:
        first_turns = [turn for turn in episode.turns if "attempt" in turn.parts and not turn.attempt]
        if first_turns:
            first_successes.append(bool(first_turns[-1].info.get("success")))
            last_successes.append(bool(episode.success))
            last_actions = [turn.actions for turn in episode.turns if "attempt" not in turn.parts]
            repeats.append([turn.actions for turn in first_turns] == last_actions)
    if not first_successes:
        return {}
    pairs = Counter(zip(first_successes, last_successes, strict=True))
    return {
        "collect/first_attempt_success": statistics.fmean(first_successes),
        "collect/last_attempt_success": statistics.fmean(last_successes),
        "collect/attempts_mended": pairs[False, True] / len(first_successes),
        "collect/attempts_spoilt": pairs[True, False] / len(first_successes),
        "collect/attempts_identical": statistics.fmean(repeats),
    }


def _reward_parts(episodes: Sequence[Episode]) -> dict[str, float]:
    """Return the mean over episodes of each reward part's sum; empty if there is only the environment's reward."""
    names = {name for episode in episodes for turn in episode.turns for name in turn.parts}
    if names <= {"environment"}:
        return {}
    return {
        f"reward/{name}": sum(turn.parts.get(name, 0.0) for episode in episodes for turn in episode.turns)
        / len(episodes)
        for name in sorted(names)
    }


def _pass_at_n(groups: Sequence[Group]) -> dict[str, float]:
    """Return the share of groups in which any member succeeded."""
    groups = [group for group in groups if len(group.episodes) > 1]
    if not groups:
        return {}
    successes = sum(any(episode.success for episode in group.episodes) for group in groups)
    return {"collect/pass_at_n": successes / len(groups)}


def staleness_metrics(groups: Sequence[Group], version: int) -> dict[str, float]:
    """Return the mean and maximum number of versions between the sampled tokens and `version`; empty without tokens."""
    lags = [
        version - token_version
        for group in groups
        for episode in group.episodes
        for turn in episode.turns
        for token_version in turn.versions
    ]
    if not lags:
        return {}
    return {"collect/staleness_mean": statistics.fmean(lags), "collect/staleness_max": float(max(lags))}


def latency_metrics(latencies: Sequence[float]) -> dict[str, float]:
    """Return the median and 99th percentile of the environments' response times, in seconds, as seen by the trainer."""
    if not latencies:
        return {}
    sorted_latencies = sorted(latencies)
    return {
        "environment/latency_p50": sorted_latencies[len(sorted_latencies) // 2],
        "environment/latency_p99": sorted_latencies[min(len(sorted_latencies) - 1, int(len(sorted_latencies) * 0.99))],
    }
