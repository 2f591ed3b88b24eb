"""What a policy came to on one environment, in figures with their intervals."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from statistics import fmean
from typing import Any

from starpod.trainer.data.episode import Episode
from starpod.trainer.statistics import clustered_interval, mean_interval, pass_at_k


def summarise(episodes: Sequence[Episode]) -> dict[str, Any]:
    """JSON values. Episodes that the infrastructure failed are counted in `failed` and in nothing else.

    episodes, starts: how many, and from how many start states. failed: episodes.
    success, success_low, success_high: share of episodes that solved their task, and its 95 % interval (Wilson's; with
        several episodes from one start, for the effective number of episodes).
    return_mean, return_low, return_high: of the environment's own reward, and the 95 % interval of the mean over starts
        (Student's).
    turns_mean, actions_mean: per episode. format_rate: share of turns with a well-formed reply. valid_rate: share of
        turns with an action that made sense.
    pass_at_k: k -> share of starts that k episodes solve at least once, for the powers of two up to the number of
        episodes from each start, and that number.
    ends: how many episodes ended for each reason; "" where the policy had no further move.
    Figures of nothing are None.
    """
    played = [episode for episode in episodes if not episode.failed]
    starts: dict[int, list[Episode]] = {}
    for episode in played:
        starts.setdefault(episode.group, []).append(episode)
    groups = list(starts.values())
    wins = [[episode.success is True for episode in group] for group in groups]
    returns = [fmean(episode.own_return for episode in group) for group in groups]
    success = clustered_interval(wins) if wins else (None, None)
    return_ends = mean_interval(returns) if len(returns) > 1 else (None, None)
    turns = [turn for episode in played for turn in episode.turns]
    return {
        "episodes": len(played),
        "starts": len(groups),
        "failed": len(episodes) - len(played),
        "success": _mean([fmean(group) for group in wins]),
        "success_low": success[0],
        "success_high": success[1],
        "return_mean": _mean(returns),
        "return_low": return_ends[0],
        "return_high": return_ends[1],
        "turns_mean": _mean([len(episode.turns) for episode in played]),
        "actions_mean": _mean([sum(turn.executed for turn in episode.turns) for episode in played]),
        "format_rate": _mean([turn.well_formed for turn in turns]),
        "valid_rate": _mean([turn.valid > 0 for turn in turns]),
        "pass_at_k": _pass_at(wins),
        "ends": dict(Counter(episode.end for episode in played).most_common()),
    }


def _pass_at(wins: Sequence[Sequence[bool]]) -> dict[str, float]:
    tries = max(map(len, wins), default=0)
    if tries < 2:
        return {}
    sizes = {tries} | {1 << power for power in range(tries.bit_length()) if 1 << power <= tries}
    found = {}
    for k in sorted(sizes):
        # A start of which an episode failed has fewer tries: it says nothing about more.
        enough = [group for group in wins if len(group) >= k]
        found[str(k)] = fmean(pass_at_k(len(group), sum(group), k) for group in enough)
    return found


def _mean(values: Sequence[float]) -> float | None:
    return fmean(values) if values else None
