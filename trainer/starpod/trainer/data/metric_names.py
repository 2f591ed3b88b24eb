"""The known metrics: their names in metrics.jsonl, labels, units and order on a page."""

from __future__ import annotations

from dataclasses import dataclass, replace
from difflib import get_close_matches

from starpod.report.figures import Kind

TASKS, AGENTS = "environments", "agents"
"""Name prefixes of the metrics of one environment among several, and of one policy among several."""


@dataclass(frozen=True, slots=True)
class Metric:
    """A known metric and how it is shown."""

    name: str
    """Name in metrics.jsonl."""
    label: str
    kind: Kind = "number"
    better: int = 0
    """1 if higher is better, -1 if lower is better, 0 if neither."""


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
        Metric("collect/tasks_never", "Tasks of the pool that were never solved lately", "share", -1),
        Metric("collect/tasks_sometimes", "Tasks of the pool that were solved sometimes", "share"),
        Metric("collect/tasks_always", "Tasks of the pool that were always solved lately", "share", 1),
        Metric("collect/tasks_effective", "Effective number of tasks", "count"),
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
        Metric("distillation/reverse_kl", "Reverse KL to the teacher (nats per token)", "number", -1),
        Metric("distillation/gate_share", "Share of the teacher's advantage that the gate passes", "share"),
        Metric("update/grad_norm", "Gradient norm"),
        Metric("update/loss", "Loss"),
        Metric("update/learning_rate", "Learning rate"),
        Metric("update/signal_to_noise", "Signal to noise of a collection's gradient", "number", 1),
        Metric("update/critical_batch_episodes", "Critical batch (episodes)", "count"),
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
"""Order of metrics on a page. All others follow by name."""


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
