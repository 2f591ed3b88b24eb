"""The page of a run: its figures, charts and tables, for the live site and for report.html.

lines: lines of metrics.jsonl. evaluations: lines of evaluations.jsonl. final, facts: contents of final.json and
run.json.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from starpod.report.curves import COLOURS, Chart, ChartLine, Mark, Point, Rule, spread
from starpod.report.figures import Kind, duration, show
from starpod.report.pages import PageSection, PageTable, dotted
from starpod.trainer.data.metric_names import AGENTS, SHOWN, TASKS, metric
from starpod.trainer.output.words import (
    brief,
    evaluation_after_best,
    figure_of,
    is_graded,
    missing_result,
    return_with_interval,
    standing_warnings,
    trend,
    with_interval,
)

Lines = Sequence[Mapping[str, Any]]

LEARNING = """
collect/success collect/first_attempt_success collect/attempts_mended collect/attempts_spoilt collect/attempts_identical
collect/return_mean collect/format_rate collect/turns_mean collect/kept_fraction collect/truncated_rate
policy/kl policy/clip_fraction_high critic/explained_variance search/pivots_early search/pivots_late
""".split()
SIGNALS = """
collect/own_std_in_group policy/entropy collect/response_diversity update/grad_norm collect/identical_fraction
""".split()
SPEED = """
rate/sampled_tokens_per_s rate/trained_tokens_per_s rate/environment_steps_per_s environment/latency_p50
environment/latency_p99 policy/logprob_gap_mean
""".split()
PARTS = (
    ("Waiting for generation", "time/generate_wait"),
    ("Waiting for environments", "time/environment_wait"),
    ("Update", "time/update"),
)
SPARK_POINTS = 60


def run_values(
    title: str,
    facts: Mapping[str, Any],
    lines: Lines,
    evaluations: Lines,
    final: Mapping[str, Any] | None,
    best_step: int | None,
) -> dict[str, Any]:
    """Return the values of the template run.html that depend on the run's figures alone.

    Args:
        facts: Contents of run.json.
        lines: Lines of metrics.jsonl, in order of their steps.
        evaluations: Evaluations on the selection seeds, in order of their steps.
        final, best_step: The final evaluation, and the step of the best checkpoint; None before there is one.
    """
    sections = [
        evaluation(evaluations, lines),
        environments(lines, evaluations, final),
        learning(lines),
        agents(lines),
        echo_trap(lines),
        information(lines),
        time_spent(lines),
    ]
    return {
        "title": title,
        "subtitle": " · ".join(str(text) for text in (facts.get("model"), _outcome(facts)) if text),
        **_scores(evaluations, final, best_step),
        "tiles": _tiles(facts, lines),
        "metrics": metrics_table(lines),
        "sections": [section for section in sections if section],
        "configuration": configuration(facts),
        "provenance": provenance(facts),
    }


def curve(lines: Lines, name: str) -> list[Point]:
    """Return (step, value) for every step at which a metric was logged as a finite number."""
    return [(line["step"], line["metrics"][name]) for line in lines if line["metrics"].get(name) is not None]


def warning_marks(lines: Lines) -> list[Mark]:
    """Return marks for charts at the steps with warnings in metrics.jsonl."""
    return [Mark(step, text) for step, text in _warnings(lines)]


def _warnings(lines: Lines) -> list[tuple[int, str]]:
    return [(line["step"], text) for line in lines for text in line.get("warnings", ())]


def _outcome(facts: Mapping[str, Any]) -> str:
    ended = facts.get("ended")
    return str(ended.get("outcome") or "") if isinstance(ended, dict) else ""


# --- the head --------------------------------------------------------------------------------------------------------


def _scores(evaluations: Lines, final: Mapping[str, Any] | None, best_step: int | None) -> dict[str, Any]:
    """Return success before and after training, each as (label, success, interval, return), and a verdict."""
    if not evaluations:
        return {"scores": [], "verdict": ""}
    before, after = evaluations[0], final or evaluations[-1]
    if final is None and len(evaluations) == 1:
        return {"scores": [_score(after, figure_of([after])[0])], "verdict": ""}
    scores = [_score(before, "before"), _score(after, "final" if final else "latest")]
    if last := evaluation_after_best(final, evaluations):
        scores.append(_score(last, "last"))
    return {"scores": scores, "verdict": _verdict(before, after, evaluations, final, best_step)}


def _score(summary: Mapping[str, Any], label: str) -> tuple[str, str, str, str]:
    figure, name, kind = figure_of([summary])
    low, high = summary.get(f"{figure}_low"), summary.get(f"{figure}_high")
    interval = f"{show(low, kind)} to {show(high, kind)}" if low is not None else missing_result(summary)
    returns = f"return {return_with_interval(summary)}" if is_graded(summary) else ""
    # "success" is left out, as the usual figure.
    label = f"return {label}" if figure == "return" and label != "return" else label
    return label, show(summary.get(name), kind), interval, returns


def _tiles(facts: Mapping[str, Any], lines: Lines) -> list[tuple[str, str]]:
    measured_lines = [line for line in lines if line["metrics"]]
    if not measured_lines:
        return []
    count = len(standing_warnings(_warnings(lines)))
    return [
        (duration(wall_seconds(facts, measured_lines)), "wall time"),
        (f"{measured_lines[-1]['step']:,}", "steps"),
        (str(count), "warning" if count == 1 else "warnings"),
    ]


def wall_seconds(facts: Mapping[str, Any], lines: Lines) -> float:
    """Return the run's duration in seconds, as recorded at its end.

    For an unfinished run, it is the time from the start to the last line of metrics. If such a run was resumed, it is
    counted from the first line of metrics.
    """
    end, first_time = facts.get("ended"), lines[0]["time"]
    start_time = first_time if facts.get("resumed") else min(facts.get("time", first_time), first_time)
    return float(end["seconds"]) if end else float(lines[-1]["time"] - start_time)


def _verdict(
    before: Mapping[str, Any],
    after: Mapping[str, Any],
    evaluations: Lines,
    final: Mapping[str, Any] | None,
    best_step: int | None,
) -> str:
    if problem := missing_result(after):
        return f"The final evaluation has no result, because {problem}."
    figure, name, _ = figure_of([after])
    count = after.get("episodes")
    text = f"{figure.capitalize()} {f'on {count:,} episodes, ' if count else ''}with 95 % intervals. "
    if final:
        text += (
            f"Final: the checkpoint of step {final['step']:,}, which the selection seeds chose, on start states that "
            "neither taught nor chose it. Before: the first policy, on the selection seeds. "
        )
    else:
        text += "Both are from the selection seeds; the final seeds are played when the run is over. "
    text += _compare_intervals(before, after, figure, "The intervals")
    best, last = max(evaluations, key=lambda summary: summary.get(name) or 0.0), evaluations[-1]
    if (best.get(name) or 0.0) > (last.get(name) or 0.0):
        text += f"The best selection evaluation was {brief(best)} at step {best['step']:,}"
        low, high = best.get(f"{figure}_low"), last.get(f"{figure}_high")
        has_fallen = low is not None and high is not None and low > high
        text += ", and the policy has become worse since. " if has_fallen else ". "
    if best_step is not None:
        text += f"The checkpoint called best holds step {best_step:,}. "
    for method, description in (("greedy", "Sampled greedily"), ("best_of", "With the best of several replies")):
        result = after.get(method)
        if result and not missing_result(result):
            text += f"{description}, it reaches {brief(result)}. "
    if is_graded(before) or is_graded(after):
        text += f"The return went from {return_with_interval(before)} to {return_with_interval(after)}. "
        text += _compare_intervals(before, after, "return", "Its intervals")
    return text


def _compare_intervals(before: Mapping[str, Any], after: Mapping[str, Any], figure: str, intervals: str) -> str:
    """Return a comparison of two intervals in words; "" without intervals."""
    low, high = f"{figure}_low", f"{figure}_high"
    if after.get(low) is None or before.get(high) is None:
        return ""
    if after[low] > before[high]:
        return f"{intervals} do not overlap: the policy has improved. "
    if after[high] < before[low]:
        return f"{intervals} do not overlap: the policy has become worse. "
    return f"{intervals} overlap: the difference may be chance. "


def metrics_table(lines: Lines) -> list[dict[str, Any]]:
    """Return a row for each metric, with its newest value, formatted as on the terminal's screen."""
    points = [line["metrics"] for line in lines if line["metrics"]]
    if not points:
        return []
    row = points[-1]
    rows = []
    for name in [*(name for name in SHOWN if name in row), *sorted(name for name in row if name not in SHOWN)]:
        values = [value for metrics in points if (value := metrics.get(name)) is not None]
        spec, arrow = metric(name), trend(values)
        sign = {"↗": 1, "↘": -1}.get(arrow, 0) * spec.better
        rows.append(
            {
                "name": name,
                "label": spec.label,
                "kind": spec.kind,
                "value": show(row[name], spec.kind),
                "trend": arrow.strip(),
                "tone": "plus" if sign > 0 else "minus" if sign < 0 else "muted",
                "spark": spread(values, SPARK_POINTS),
                "main": name in SHOWN,
            }
        )
    return rows


# --- sections --------------------------------------------------------------------------------------------------------


def evaluation(evaluations: Lines, lines: Lines = ()) -> PageSection:
    reference: dict[str, Mapping[str, Any]] = {}
    for summary in evaluations:
        reference |= summary.get("reference") or {}
    marks = warning_marks(lines)
    figures = [figure_of(evaluations)[0], *(["return"] if any(map(is_graded, evaluations)) else [])]
    charts = [_evaluation_chart(figure, evaluations, reference, marks) for figure in figures]
    rows = [
        (
            f"{s['step']:,}",
            with_interval(s),
            return_with_interval(s),
            show(s.get("turns_mean")),
            show(s.get("format_rate"), "share"),
        )
        for s in evaluations
    ]
    references = " The dotted lines are simple policies on the same seeds." if reference else ""
    return PageSection(
        "Selection",
        "Evaluations during training, which choose the best checkpoint: the highest of them flatters it. "
        f"The band is the 95 % interval.{references}",
        charts,
        after=PageTable(("#Step", "#Success", "#Return", "#Turns", "#Well-formed"), rows, folded="As a table"),
    )


def _evaluation_chart(
    figure: str, evaluations: Lines, reference: Mapping[str, Mapping[str, Any]], marks: Sequence[Mark]
) -> Chart:
    """Return a chart of success or return in evaluations, with its interval and the reference policies."""
    kind: Kind = "share" if figure == "success" else "number"
    name = {"return": "return_mean"}.get(figure, figure)
    rules = [
        Rule(row[name], f"{policy} {show(row[name], kind)}")
        for policy, row in reference.items()
        if row.get(name) is not None
    ]
    line = evaluated("sampled", evaluations, figure)
    return Chart(f"{figure.capitalize()} on selection seeds", [line], kind, rules=rules, marks=marks, size="wide")


def evaluated(label: str, evaluations: Lines, figure: str = "success", colour: int = 0) -> ChartLine:
    """Return success or return in evaluations as a line with its interval.

    Args:
        figure: "success" or "return".
        colour: Number of the line's colour, from 0.
    """
    name, low, high = {"return": "return_mean"}.get(figure, figure), f"{figure}_low", f"{figure}_high"
    points = [(row["step"], row[name]) for row in evaluations if row.get(name) is not None]
    ends = [row for row in evaluations if row.get(low) is not None and row.get(high) is not None]
    return ChartLine(label, points, colour, band=[(row["step"], row[low], row[high]) for row in ends], dots=True)


def environments(lines: Lines, evaluations: Lines, final: Mapping[str, Any] | None) -> PageSection | None:
    """Return the section about each environment of the run; None for a run with only one."""
    rows_of: dict[str, list[dict[str, Any]]] = {}
    for summary in evaluations:
        for name, result in (summary.get("environments") or {}).items():
            rows_of.setdefault(name, []).append({"step": summary["step"], **result})
    if not rows_of:
        return None
    curves = [evaluated(name, rows, colour=index % COLOURS) for index, (name, rows) in enumerate(rows_of.items())]
    table = []
    for name, rows in rows_of.items():
        references = rows[0].get("reference") or {}
        final_row = (final or {}).get("environments", {}).get(name)
        table.append(
            (
                name,
                *(with_interval(row) if row else "-" for row in (rows[0], rows[-1], final_row)),
                return_with_interval(final_row or rows[-1]),
                ", ".join(f"{policy} {brief(row)}" for policy, row in references.items()) or "-",
            )
        )
    names = ("success", "return_mean", "kept_fraction", "turns_mean", "level")
    return PageSection(
        "Environments",
        "The figures above are means in which each environment counts alike; the best checkpoint is the one with the "
        "highest mean success.",
        [
            Chart("Success on selection seeds", curves, "share", size="wide"),
            *metric_charts(lines, [f"{TASKS}/{name}/{figure}" for figure in names for name in rows_of]),
        ],
        PageTable(("Environment", "Before", "Last selection", "Final", "Return", "Policies without a model"), table),
    )


def agents(lines: Lines) -> PageSection:
    """Return the section with metrics and gradients per agent, which is empty for a run without them."""
    names = sorted({name for line in lines for name in line["metrics"]})
    agent_names = dict.fromkeys(name.split("/")[1] for name in names if name.startswith(f"{AGENTS}/"))
    suffixes = ("policy/entropy", "policy/kl", "update/grad_norm")
    gradient_agents = dict.fromkeys(name.split("/")[2] for name in names if name.startswith(f"gradients/{AGENTS}/"))
    return PageSection(
        "Agents",
        "Each agent's policy by itself, and what sharing one mean and deviation of rewards would do to its gradients.",
        [
            *metric_charts(lines, [f"{AGENTS}/{name}/{suffix}" for suffix in suffixes for name in agent_names]),
            *(
                Chart(
                    f"{name}: growth of its squared gradients with one scale of rewards for all",
                    [
                        ChartLine(label, curve(lines, f"gradients/{AGENTS}/{name}/{factor}_factor"), colour)
                        for colour, (label, factor) in enumerate((("predicted", "pooled"), ("measured", "measured")))
                    ],
                )
                for name in gradient_agents
            ),
        ],
    )


def metric_charts(lines: Lines, names: Iterable[str], marks: Sequence[Mark] = (), colour: int = 0) -> list[Chart]:
    """Return a chart of each metric that was logged at least twice."""
    points = {name: curve(lines, name) for name in names}
    return [
        Chart(metric(name).label, [ChartLine(metric(name).label, values, colour)], metric(name).kind, marks=marks)
        for name, values in points.items()
        if len(values) > 1
    ]


def learning(lines: Lines) -> PageSection:
    changed_names = [name for name in LEARNING if len({value for _, value in curve(lines, name)}) > 1]
    charts = metric_charts(lines, changed_names, warning_marks(lines))
    return PageSection("Learning", "Collected episodes, step by step.", charts)


def echo_trap(lines: Lines) -> PageSection:
    return PageSection(
        "Echo Trap signals",
        "A policy that begins to repeat itself shows it here before its success falls: deviation, entropy and "
        "diversity drop, the gradient norm rises. Warnings are marked.",
        metric_charts(lines, SIGNALS, warning_marks(lines), colour=3),
        warnings=_warnings(lines),
    )


def information(lines: Lines) -> PageSection:
    charts = []
    for sampler, label in (("first_turn", "first turns"), ("random_turn", "random turns")):
        of = {
            name: curve(lines, f"information/{sampler}/{name}")
            for name in ("mutual_information", "bound", "conditional_entropy", "retrieval_at_1")
        }
        both = [ChartLine("Mutual information", of["mutual_information"]), ChartLine("its bound", of["bound"], 1)]
        charts += [
            Chart(f"{label.capitalize()} (nats)", both),
            Chart(f"H(reasoning | prompt), {label}", [ChartLine("H(Z | X)", of["conditional_entropy"], 2)]),
            Chart(f"Own prompt recognised, {label}", [ChartLine("first guess", of["retrieval_at_1"])], "share"),
        ]
    return PageSection(
        "Does the reasoning depend on the state?",
        "Mutual information near 0 is a template that is recited whatever the state, even where entropy is high.",
        charts,
    )


def time_spent(lines: Lines) -> PageSection | None:
    timed_lines = [line for line in lines if line["metrics"].get("time/step")]
    if len(timed_lines) < 2:
        return None
    layers: dict[str, list[Point]] = {label: [] for label in (*(label for label, _ in PARTS), "Everything else")}
    for line in timed_lines:
        metrics, step = line["metrics"], line["step"]
        shares = [min((metrics.get(name) or 0.0) / metrics["time/step"], 1.0) for _, name in PARTS]
        # Waits overlap if episodes are collected in parallel, so that shares may sum to more than 1.
        total = max(sum(shares), 1.0)
        for label, share in zip(layers, (*shares, total - sum(shares)), strict=True):
            layers[label].append((step, share / total))
    mean = sum(line["metrics"]["time/step"] for line in timed_lines) / len(timed_lines)
    text = f"A step took {show(mean, 'seconds')} on average."
    if rest := [value for _, value in curve(lines, "time/share_outside")]:
        text += f" {show(sum(rest) / len(rest), 'share')} of the time was outside generation and update."
    shares_chart = Chart(
        "Share of each step",
        [ChartLine(label, points, colour) for colour, (label, points) in enumerate(layers.items())],
        "share",
        stacked=True,
        size="wide",
    )
    return PageSection("Where the time went", text, [shares_chart, *metric_charts(lines, SPEED, colour=2)])


def configuration(facts: Mapping[str, Any]) -> PageSection | None:
    differences = facts.get("differs_from_defaults")
    if not isinstance(differences, dict):
        return None
    rows = [(dotted(key), format_value(value), format_value(default)) for key, (value, default) in differences.items()]
    table = PageTable(("Setting", "This run", "Default"), rows or [("All defaults", "", "")])
    return PageSection("Configuration", "What differs from the defaults; config.yaml has all of it.", table=table)


def format_value(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def provenance(facts: Mapping[str, Any]) -> PageSection | None:
    if not facts:
        return None
    rows = {"run": facts.get("id", "")}
    if git := facts.get("git"):
        rows["code"] = git["commit"] + (" with uncommitted changes" if git["dirty"] else "")
    machine = facts.get("platform", {})
    gpus = ", ".join(machine.get("gpus") or []) or "no GPU"
    rows["machine"] = (
        f"{machine.get('system', '')}, {machine.get('cores', '?')} cores, {gpus}, Python {machine.get('python', '')}"
    )
    rows["packages"] = ", ".join(f"{name} {version}" for name, version in facts.get("packages", {}).items())
    rows["command"] = " ".join(facts.get("command", []))
    if resumptions := facts.get("resumed", []):
        rows["resumed"] = "once" if len(resumptions) == 1 else f"{len(resumptions)} times"
    return PageSection("Provenance", table=PageTable(("", ""), [(key, str(value)) for key, value in rows.items()]))
