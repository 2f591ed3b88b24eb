"""Labels and formats of metrics, shared by the screen and the report."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from difflib import get_close_matches
from itertools import pairwise
from typing import Any

from starpod.report.figures import Kind, show


@dataclass(frozen=True, slots=True)
class Metric:
    """A known metric and how it is shown."""

    name: str
    """Name in metrics.jsonl."""
    label: str
    kind: Kind = "number"
    better: int = 0
    """1 if higher is better, -1 if lower is better, 0 if neither."""


WITHDRAWN = "Withdrawn: the warning about "


def withdrawal(subject: str, reason: str) -> str:
    """Return the text that withdraws a warning. subject: words that the warning begins with, after an optional "an"."""
    return f"{WITHDRAWN}{subject}; {reason}."


def standing_warnings(warnings: Iterable[tuple[int, str]]) -> list[tuple[int, str]]:
    """Return the (step, text) warnings that were not withdrawn, without the withdrawals."""
    active_warnings: list[tuple[int, str]] = []
    for step, text in warnings:
        if not text.startswith(WITHDRAWN):
            active_warnings.append((step, text))
            continue
        subject = text.removeprefix(WITHDRAWN).partition(";")[0].removeprefix("an ")
        if warning := next((warning for warning in reversed(active_warnings) if warning[1].startswith(subject)), None):
            active_warnings.remove(warning)
    return active_warnings


METRICS = {
    metric.name: metric
    for metric in (
        Metric("evaluation/success", "Success on selection seeds", "share", 1),
        Metric("evaluation/return", "Return on selection seeds", "number", 1),
        Metric("collect/success", "Success", "share", 1),
        Metric("collect/first_attempt_success", "Success of first attempts", "share", 1),
        Metric("collect/last_attempt_success", "Success of last attempts", "share", 1),
        Metric("collect/attempts_mended", "Wrong at first, right at last", "share", 1),
        Metric("collect/attempts_spoilt", "Right at first, wrong at last", "share", -1),
        Metric("collect/attempts_identical", "Last attempts that repeat the first", "share", -1),
        Metric("collect/return_mean", "Return", "number", 1),
        Metric("collect/return_std", "Return deviation"),
        Metric("collect/reward_std_in_group", "Reward deviation in groups"),
        Metric("collect/own_std_in_group", "Own reward deviation in groups"),
        Metric("collect/identical_fraction", "Deviation by chance: identical replies", "share", -1),
        Metric("collect/response_diversity", "Response diversity", "share"),
        Metric("collect/turns_mean", "Turns per episode"),
        Metric("collect/actions_per_turn", "Actions per turn"),
        Metric("collect/tokens_per_turn", "Tokens per turn", "count"),
        Metric("collect/format_rate", "Well-formed replies", "share", 1),
        Metric("collect/switch_rate", "Turns that switch the subgoal", "share"),
        Metric("collect/segment_turns", "Turns per subgoal"),
        Metric("collect/valid_rate", "Valid actions", "share", 1),
        Metric("collect/truncated_rate", "Replies cut by the token limit", "share", -1),
        Metric("collect/kept_fraction", "Groups kept by the filter", "share"),
        Metric("collect/groups_dropped", "Groups dropped", "count", -1),
        Metric("collect/stale_dropped", "Stale groups dropped", "count", -1),
        Metric("collect/level", "Level of the curriculum", "count"),
        Metric("collect/groups", "Groups", "count"),
        Metric("collect/failed", "Failed episodes", "count", -1),
        Metric("search/environment_steps", "Environment steps, with those of a search", "count"),
        Metric("search/sampled_tokens", "Sampled tokens, with those of a search", "count"),
        Metric("search/forks", "Forks", "count"),
        Metric("search/weight", "Weight of replies that a search chose"),
        Metric("search/branches", "Branches", "count"),
        Metric("search/branch_return", "Return of branches", "number", 1),
        Metric("search/branch_depth", "Where branches begin", "share"),
        Metric("search/pivots_early", "Pivots in the first third of an episode", "share"),
        Metric("search/pivots_middle", "Pivots in the second third", "share"),
        Metric("search/pivots_late", "Pivots in the last third", "share"),
        Metric("policy/entropy", "Entropy (nats)"),
        Metric("policy/kl", "KL of the update (nats)"),
        Metric("policy/clip_fraction_low", "Clipped below", "share"),
        Metric("policy/clip_fraction_high", "Clipped above", "share"),
        Metric("policy/ratio_max", "Largest ratio"),
        Metric("policy/logprob_gap_max", "Sampler-trainer gap, largest"),
        Metric("policy/logprob_gap_q99", "Sampler-trainer gap, 0.99 quantile"),
        Metric("policy/logprob_gap_mean", "Sampler-trainer gap, mean"),
        Metric("critic/loss", "Critic loss"),
        Metric("critic/explained_variance", "Critic explained variance", "number", 1),
        Metric("critic/grad_norm", "Critic gradient norm"),
        Metric("scorer/loss", "Turn scorer's loss"),
        Metric("scorer/accuracy", "Turn scorer's pairs in order", "share", 1),
        Metric("scorer/score_correlation", "Turn rewards beside progress, rank correlation", "number", 1),
        Metric("update/grad_norm", "Gradient norm"),
        Metric("update/loss", "Loss"),
        Metric("update/learning_rate", "Learning rate"),
        Metric("update/skipped", "Skipped updates", "count", -1),
        Metric("time/step", "Seconds per step", "seconds"),
        Metric("time/generate_wait", "Waiting for generation", "seconds"),
        Metric("time/environment_wait", "Waiting for environments", "seconds"),
        Metric("time/update", "Update", "seconds"),
        Metric("time/collect", "Collecting", "seconds"),
        Metric("time/sync", "Handing weights over", "seconds"),
        Metric("time/share_outside", "Outside generation and update", "share", -1),
        Metric("rate/sampled_tokens_per_s", "Sampled tokens/s", "rate", 1),
        Metric("rate/trained_tokens_per_s", "Trained tokens/s", "rate", 1),
        Metric("rate/prompt_reused", "Prompt tokens found in the cache", "share", 1),
        Metric("rate/environment_steps_per_s", "Environment steps/s", "rate", 1),
        Metric("rate/episodes_per_s", "Episodes/s", "rate", 1),
        Metric("environment/latency_p50", "Environment latency p50", "seconds", -1),
        Metric("environment/latency_p99", "Environment latency p99", "seconds", -1),
    )
}
"""Known metrics by name. The label of any other metric is its name."""


SHOWN = """
collect/success collect/first_attempt_success collect/attempts_mended collect/attempts_spoilt collect/attempts_identical
collect/return_mean collect/reward_std_in_group collect/response_diversity collect/format_rate
collect/turns_mean collect/kept_fraction collect/identical_fraction policy/entropy policy/kl update/grad_norm
critic/explained_variance rate/sampled_tokens_per_s rate/environment_steps_per_s environment/latency_p99 time/step
time/share_outside
""".split()
"""Order of metrics on a screen. All others follow if there is room."""


def metric(name: str) -> Metric:
    """Return the metric of that name; an unknown metric has its name as its label.

    `environments/<name>/<metric>` is shown as `collect/<metric>`, and `agents/<agent>/<metric>` as `<metric>`.
    """
    prefix, _, suffix = name.partition("/")
    owner, _, metric_name = suffix.partition("/")
    if entry := METRICS.get({TASKS: f"collect/{metric_name}", AGENTS: metric_name}.get(prefix, "")):
        return replace(entry, name=name, label=f"{owner}: {entry.label[0].lower()}{entry.label[1:]}")
    return METRICS.get(name) or Metric(name, name)


def misspelt(name: str) -> list[str]:
    """Return the metrics of an iteration that a misspelt name was meant for; empty if it may be another metric."""
    if name in METRICS:
        return []
    names = [known for known in METRICS if not known.startswith("evaluation/")]
    # The metrics of an iteration that are not listed here resemble listed ones by at most 0.85.
    return [known for known in names if known.endswith(f"/{name}")] or get_close_matches(name, names, 1, cutoff=0.9)


TASKS, AGENTS = "environments", "agents"
"""Name prefixes of the metrics of one environment among several, and of one policy among several."""


def by_task(summary: Mapping[str, Any]) -> str:
    """Return `; bandit 90 %, lake 41 %` for an evaluation of several environments; "" for one."""
    environments = summary.get("environments") or {}
    successes = ", ".join(f"{name} {show(result['success'], 'share')}" for name, result in environments.items())
    return f"; {successes}" if successes else ""


def missing_result(summary: Mapping[str, Any]) -> str:
    """Return why an evaluation has no success rate, such as `3 of 4 episodes failed`; "" if it has one."""
    if summary.get("success") is not None:
        return ""
    failed = summary.get("failed") or 0
    return f"{failed} of {failed + (summary.get('episodes') or 0)} episodes failed"


def with_interval(summary: Mapping[str, Any]) -> str:
    """Return the success of an evaluation, such as `72 % (66 to 77 %)`."""
    text = show(summary["success"], "share")
    low, high = summary.get("success_low"), summary.get("success_high")
    return f"{text} ({100 * low:.0f} to {100 * high:.0f} %)" if low is not None and high is not None else text


def return_with_interval(summary: Mapping[str, Any]) -> str:
    """Return the mean return of an evaluation, such as `0.61 (0.58 to 0.64)`."""
    text = show(summary.get("return_mean"))
    low, high = summary.get("return_low"), summary.get("return_high")
    return f"{text} ({show(low)} to {show(high)})" if low is not None and high is not None else text


def final_line(final: Mapping[str, Any]) -> str:
    """Return the line of the final evaluation.

    Example: success 72 % (66 to 77 %) of 256 episodes, by the checkpoint of step 80; greedy 75 %

    If mean returns differ from success rates, each success rate is followed by the mean return.
    """
    if problem := missing_result(final):
        return f"no success rate, because {problem}{by_task(final)}, by the checkpoint of step {final['step']}"
    graded = is_graded(final)
    line = f"success {with_interval(final)} of {final['episodes']} episodes"
    line += f", return {return_with_interval(final)}" if graded else ""
    line += by_task(final)
    line += f", by the checkpoint of step {final['step']}"
    line += f"; greedy {format_success(final['greedy'], graded)}" if final.get("greedy") else ""
    return line + (
        f"; best of several replies {format_success(final['best_of'], graded)}" if final.get("best_of") else ""
    )


def evaluation_after_best(
    final: Mapping[str, Any] | None, evaluations: Sequence[Mapping[str, Any]]
) -> Mapping[str, Any] | None:
    """Return the latest evaluation if the run continued after the checkpoint of the final evaluation, else None.

    A run that collapses ends far below its best checkpoint. Its final evaluation alone would hide the collapse.
    """
    if not (final and evaluations):
        return None
    best_step, last_step = final.get("step"), evaluations[-1].get("step")
    # The site reads files that others wrote, where a step may be anything.
    if isinstance(best_step, int | float) and isinstance(last_step, int | float) and last_step > best_step:
        return evaluations[-1]
    return None


def format_success(summary: Mapping[str, Any], graded: bool) -> str:
    """Return the success, such as `75 %`, followed by the return if graded: `75 % (0.91)`."""
    text = show(summary.get("success"), "share")
    return f"{text} ({show(summary.get('return_mean'))})" if graded else text


def is_graded(summary: Mapping[str, Any]) -> bool:
    """Return whether the mean return differs from success. They are equal if a reward of 1 is paid for success only."""
    value = summary.get("return_mean")
    return value is not None and abs(value - summary["success"]) > 1e-9


TICKS = "▁▂▃▄▅▆▇█"


def sparkline(values: Sequence[float], width: int) -> str:
    """Return the latest values as bars between their minimum and maximum. Neighbours are averaged to fit the width."""
    finite = [value for value in values if math.isfinite(value)]
    if not finite:
        return ""
    if len(finite) > width:
        edges = [round(index * len(finite) / width) for index in range(width + 1)]
        finite = [sum(finite[low:high]) / (high - low) for low, high in pairwise(edges) if high > low]
    low, high = min(finite), max(finite)
    if high - low < 1e-12:
        return TICKS[3] * len(finite)
    return "".join(TICKS[min(int(8 * (value - low) / (high - low)), 7)] for value in finite)


def trend(values: Sequence[float]) -> str:
    """Return an arrow that compares the mean of the last fifth of the values with the rest, in standard deviations."""
    finite = [value for value in values if math.isfinite(value)]
    recent_count = max(len(finite) // 5, 2)
    if len(finite) < 2 * recent_count:
        return " "
    before, after = finite[:-recent_count], finite[-recent_count:]
    mean = sum(before) / len(before)
    spread = math.sqrt(sum((value - mean) ** 2 for value in before) / len(before))
    change = sum(after) / len(after) - mean
    if abs(change) <= max(0.5 * spread, 1e-9):
        return "→"
    return "↗" if change > 0 else "↘"
