"""Metrics of evaluations and of reference policies, with their confidence intervals."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict
from statistics import fmean
from typing import Any

from starpod.client import Fleet, StarpodError
from starpod.trainer.agents.base import Task
from starpod.trainer.agents.scripted import ReferenceAgents
from starpod.trainer.configuration.section import ConfigError
from starpod.trainer.configuration.user_file import UserCodeError
from starpod.trainer.data.episode import Episode, reports_success
from starpod.trainer.evaluation.statistics import (
    clustered_interval,
    interval_of_mean,
    mean_interval,
    pass_at_k,
    pass_hat_k,
)
from starpod.trainer.rollout.collect import Collected, Collector, starts_from

_SUCCESS = ("success", "success_low", "success_high")
_OUTCOMES = (*_SUCCESS, "return_mean", "return_low", "return_high")
"""Metrics that describe what a policy reaches."""


def summarise(episodes: Sequence[Episode]) -> dict[str, Any]:
    """Return metrics of episodes as JSON values. A metric without data is None.

    If half of the episodes failed or more, success, return, pass_at_k and pass_hat_k are empty as well: the others are
    a selection, not a sample. Success, pass_at_k and pass_hat_k are empty if the environment does not report success.

    episodes, starts: number of episodes, and of their start states.
    failed: number of episodes that the infrastructure or a bug of the environment failed. No other metric includes
        them.
    success, success_low, success_high: share of episodes that solved their task, and its 95 % interval (Wilson's;
        with several episodes per start, for the effective number of episodes).
    return_mean, return_low, return_high: mean return of the environment's own reward, and the 95 % interval of the
        mean over starts (Student's).
    turns_mean, actions_mean: mean number of turns, and of actions, per episode.
    tokens_mean: mean number of tokens in the replies of an episode, sampled here or counted by an endpoint; None if
        there are none, as for a scripted policy.
    seconds_mean: mean time that an episode waits for replies and for the environment.
    format_rate: share of turns with a well-formed reply.
    valid_rate: share of turns with a valid action.
    pass_at_k: k -> share of starts that at least one of k episodes solves, for all powers of two up to the number
        of episodes per start, and for that number.
    pass_hat_k: the same for the share of starts that all of k episodes solve.
    ends: number of episodes for each reason to end; "" if the policy had no move left.
    """
    played_episodes = [episode for episode in episodes if not episode.failed]
    turns = [turn for episode in played_episodes for turn in episode.turns]
    figures = {
        **summarise_outcomes((episode.group, episode.success, episode.own_return) for episode in played_episodes),
        "failed": len(episodes) - len(played_episodes),
        "turns_mean": _mean([len(episode.turns) for episode in played_episodes]),
        "actions_mean": _mean([sum(turn.executed for turn in episode.turns) for episode in played_episodes]),
        "format_rate": _mean([turn.well_formed for turn in turns]),
        "valid_rate": _mean([turn.valid > 0 for turn in turns]),
        "tokens_mean": _mean([reply_tokens(episode) for episode in played_episodes]) or None,
        "seconds_mean": _mean([sum(t.generating + t.stepping for t in episode.turns) for episode in played_episodes]),
        "ends": dict(Counter(episode.end for episode in played_episodes).most_common()),
    }
    is_selection = 2 * len(played_episodes) <= len(episodes)
    if is_selection or not reports_success(played_episodes):
        figures |= dict.fromkeys(_OUTCOMES if is_selection else _SUCCESS) | {"pass_at_k": {}, "pass_hat_k": {}}
    return figures


def summarise_outcomes(results: Iterable[tuple[int, bool | None, float]]) -> dict[str, Any]:
    """Return the metrics of `summarise` that depend on success and return. results: start state, success and return."""
    starts: dict[int, list[tuple[bool, float]]] = {}
    for start, success, value in results:
        starts.setdefault(start, []).append((success is True, value))
    wins = [[is_solved for is_solved, _ in start] for start in starts.values()]
    returns = [fmean(value for _, value in start) for start in starts.values()]
    success_low, success_high = clustered_interval(wins) if wins else (None, None)
    return_low, return_high = mean_interval(returns) if len(returns) > 1 else (None, None)
    return {
        "episodes": sum(map(len, wins)),
        "starts": len(starts),
        "success": _mean([fmean(start) for start in wins]),
        "success_low": success_low,
        "success_high": success_high,
        "return_mean": _mean(returns),
        "return_low": return_low,
        "return_high": return_high,
        "pass_at_k": _over_attempts(wins, pass_at_k),
        "pass_hat_k": _over_attempts(wins, pass_hat_k),
    }


def episode_results(episodes: Sequence[Episode]) -> dict[str, list[Any]]:
    """Return the results of single episodes, as JSON columns with one entry per episode that did not fail.

    `compare` pairs evaluations by them. Columns: seed; sample, the episode's number for that seed; success, null if the
    environment cannot say; return, of the environment's own rewards.
    """
    played_episodes = [episode for episode in episodes if not episode.failed]
    return {
        "seed": [episode.seed for episode in played_episodes],
        "sample": [episode.member for episode in played_episodes],
        "success": [episode.success for episode in played_episodes],
        "return": [episode.own_return for episode in played_episodes],
    }


def reply_tokens(episode: Episode) -> int:
    """Return the number of tokens in the replies, sampled here or counted by an endpoint."""
    return episode.sampled_tokens or episode.usage.get("completion_tokens", 0)


def _over_attempts(wins: Sequence[Sequence[bool]], estimate: Callable[[int, int, int], float]) -> dict[str, float]:
    """Return the mean estimate over starts by k. estimate: `pass_at_k` or `pass_hat_k`."""
    tries = max(map(len, wins), default=0)
    if tries < 2:
        return {}
    sizes = {tries} | {1 << power for power in range(tries.bit_length()) if 1 << power <= tries}
    shares = {}
    for k in sorted(sizes):
        # Skip starts with fewer than k episodes (some failed): nothing can be estimated from them.
        groups = [group for group in wins if len(group) >= k]
        shares[str(k)] = fmean(estimate(len(group), sum(group), k) for group in groups)
    return shares


def _mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None


_REFERENCE = (*_OUTCOMES, "turns_mean")
"""Metrics of reference policies."""
_HELD_OUT = ("episodes", "failed", *_REFERENCE, "format_rate")


def held_out_figures(collected: Collected) -> dict[str, Any]:
    """Return the metrics of `summarise` that a run's evaluations keep."""
    figures = summarise([*collected.episodes, *collected.failed_episodes])
    figures["format_rate"] = figures["format_rate"] or 0.0  # a policy may have no turn
    return {name: figures[name] for name in _HELD_OUT}


def overall(figures: Mapping[str, dict[str, Any]]) -> dict[str, Any]:
    """Combine the metrics of a run's tasks.

    The metrics of a single task are returned as they are. For several tasks, the result is their unweighted mean, and
    `environments` contains the metrics of each.
    """
    if list(figures) == [""]:
        return figures[""]
    task_figures = list(figures.values())
    summary = _mean_figures(task_figures)
    for mode in ("greedy", "best_of"):
        if all(mode in item for item in task_figures):
            summary[mode] = _mean_figures([item[mode] for item in task_figures])
    references = [item.get("reference") or {} for item in task_figures]
    if common := [name for name in references[0] if all(name in reference for reference in references)]:
        summary["reference"] = {name: _mean_figures([reference[name] for reference in references]) for name in common}
    return summary | {"environments": dict(figures)}


def _mean_figures(evaluations: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the sums of counts, the means of other metrics, and the intervals of these means."""
    mean: dict[str, Any] = {}
    for name in _HELD_OUT:
        if name in evaluations[0]:
            values = [figures[name] for figures in evaluations]
            mean[name] = sum(values) if name in ("episodes", "failed") else None if None in values else fmean(values)
    for figure, name in (("success", "success"), ("return", "return_mean")):
        low, high = f"{figure}_low", f"{figure}_high"
        if mean[low] is not None:
            mean[low], mean[high] = interval_of_mean([(item[name], item[low], item[high]) for item in evaluations])
    return mean


def facts_of(task: Task, episodes: Sequence[Episode]) -> dict[str, Any]:
    """Return what is reported of a task beside its metrics, as JSON values: its settings, and `episode_results`."""
    return {
        "environment": task.environment,
        "version": episodes[0].version if episodes else "",
        "options": task.options,
        "limits": asdict(task.limits),
        "results": episode_results(episodes),
    }


def renumber_groups(results: Sequence[Sequence[Episode]]) -> list[Episode]:
    """Return all episodes, renumbering groups so that they are unique across environments."""
    first = 0
    for episodes in results:
        groups = 1 + max((episode.group for episode in episodes), default=-1)
        for episode in episodes:
            episode.group += first
        first += groups
    return [episode for episodes in results for episode in episodes]


async def evaluate_reference(
    fleet: Fleet,
    name: str,
    task: Task,
    seeds: Sequence[int],
    watch: Callable[[Episode], None] = lambda _: None,
) -> dict[str, Any]:
    """Play a reference policy, and return its metrics under its name.

    Args:
        name: Name of the reference policy, such as "random" or "expert".
        seeds: Seeds of the start states, with one episode each.
        watch: Called with each finished episode.

    Raises:
        ConfigError: It cannot play this environment.
        StarpodError: The infrastructure failed an episode.
    """
    collector = Collector(fleet=fleet, agents=ReferenceAgents(name), task=task, watch=watch)
    try:
        collected = await collector.collect(starts_from(seeds), 1)
    except UserCodeError as error:
        refusal = error.__cause__ if isinstance(error.__cause__, ValueError) else error
        raise ConfigError(f"remove {name} from evaluation.reference: {refusal}") from error
    if collected.failed:
        raise StarpodError(f"the reference policy {name} could not be played: {collected.error}")
    figures = held_out_figures(collected)
    return {name: figures[name] for name in _REFERENCE}
