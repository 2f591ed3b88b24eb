"""HTML sections of a run's report, which the live site shows as well.

lines: lines of metrics.jsonl. evaluations: lines of evaluations.jsonl. final, facts: contents of final.json and
run.json.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from html import escape
from typing import Any

from starpod.report.charts import COLOURS, Mark, Point, Rule, Series, line_chart, share_chart, smooth
from starpod.report.figures import Kind, duration, show
from starpod.report.page import dotted
from starpod.trainer.output.words import (
    AGENTS,
    METRICS,
    TASKS,
    Metric,
    evaluation_after_best,
    is_graded,
    metric,
    missing_result,
    return_with_interval,
    standing_warnings,
    with_interval,
)

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


def curve(lines: Sequence[Mapping[str, Any]], name: str) -> list[Point]:
    """Return (step, value) for every step at which a metric was logged as a finite number."""
    return [(line["step"], line["metrics"][name]) for line in lines if line["metrics"].get(name) is not None]


def section(title: str, sentence: str, body: str) -> str:
    """Return a heading, a sentence and the body; "" if the body is empty."""
    return f'{heading(title)}<p class="muted">{sentence}</p>{body}' if body else ""


def heading(title: str) -> str:
    """Return a heading with an anchor."""
    return f'<h2 id="{title.lower().replace(" ", "-")}">{title}</h2>'


def headline(
    title: str,
    facts: Mapping[str, Any],
    lines: Sequence[Mapping[str, Any]],
    evaluations: Sequence[Mapping[str, Any]],
    final: Mapping[str, Any] | None,
    best_step: int | None,
    header: str = "",
) -> str:
    """Return the title, success before and after training in large type, and a verdict.

    header: HTML below the title.
    """
    measured_lines = [line for line in lines if line["metrics"]]
    tiles = []
    verdict = ""
    if evaluations:
        before, after = evaluations[0], final or evaluations[-1]
        is_compared = final is not None or len(evaluations) > 1
        label = "final" if final else "latest" if is_compared else "success"
        last_summary = evaluation_after_best(final, evaluations)
        last_html = f"<div>{_score(last_summary, 'last')}</div>" if last_summary else ""
        tiles.append(
            f'<div class="tile main"><div>{_score(before, "before")}</div><div class="arrow" aria-hidden="true">→</div>'
            f'<div class="after">{_score(after, label)}</div>{last_html}</div>'
            if is_compared
            else f'<div class="tile main"><div class="after">{_score(after, label)}</div></div>'
        )
        verdict = _verdict(before, after, evaluations, final, best_step) if is_compared else ""
    if measured_lines:
        tiles.append(_tile(duration(wall_seconds(facts, measured_lines)), "wall time"))
        tiles.append(_tile(f"{measured_lines[-1]['step']:,}", "steps"))
        warning_count = len(standing_warnings(_warnings(lines)))
        tiles.append(_tile(str(warning_count), "warning" if warning_count == 1 else "warnings"))
    outcome = facts.get("ended", {}).get("outcome")
    status_text = " · ".join(text for text in (facts.get("model"), outcome) if text)
    status = f'<p class="muted">{escape(status_text)}</p>' if status_text else ""
    return f'<h1>{escape(title)}</h1>{status}{header}<div class="hero">{"".join(tiles)}</div>{verdict}'


def wall_seconds(facts: Mapping[str, Any], lines: Sequence[Mapping[str, Any]]) -> float:
    """Return the run's duration in seconds, as recorded at its end.

    For an unfinished run, it is the time from the start to the last line of metrics. If such a run was resumed, it is
    counted from the first line of metrics.
    """
    end, first_time = facts.get("ended"), lines[0]["time"]
    start_time = first_time if facts.get("resumed") else min(facts.get("time", first_time), first_time)
    return float(end["seconds"]) if end else float(lines[-1]["time"] - start_time)


def _score(summary: Mapping[str, Any], label: str) -> str:
    low, high = summary.get("success_low"), summary.get("success_high")
    interval = f"{show(low, 'share')} to {show(high, 'share')}" if low is not None else missing_result(summary)
    return_html = f"<span>return {escape(return_with_interval(summary))}</span>" if is_graded(summary) else ""
    return f"<span>{label}</span><b>{show(summary['success'], 'share')}</b><span>{interval}</span>{return_html}"


def _tile(number: str, label: str) -> str:
    return f'<div class="tile"><b>{escape(number)}</b><span>{escape(label)}</span></div>'


def _verdict(
    before: Mapping[str, Any],
    after: Mapping[str, Any],
    evaluations: Sequence[Mapping[str, Any]],
    final: Mapping[str, Any] | None,
    best_step: int | None,
) -> str:
    if problem := missing_result(after):
        return f"<p>The final evaluation has no success rate, because {escape(problem)}.</p>"
    count = after.get("episodes")
    text = f"Success on {count:,} episodes, with 95 % intervals. " if count else "Success with 95 % intervals. "
    if final:
        text += (
            f"Final: the checkpoint of step {final['step']:,}, which the selection seeds chose, on start states that "
            "neither taught nor chose it. Before: the first policy, on the selection seeds. "
        )
    else:
        text += "Both are from the selection seeds; the final seeds are played when the run is over. "
    text += _compare_intervals(before, after, "success", "The intervals")
    best, last = max(evaluations, key=lambda summary: summary["success"]), evaluations[-1]
    if best["success"] > last["success"]:
        text += f"The best selection evaluation was {show(best['success'], 'share')} at step {best['step']:,}"
        has_fallen = best.get("success_low") is not None and best["success_low"] > last["success_high"]
        text += ", and the policy has become worse since. " if has_fallen else ". "
    if best_step is not None:
        text += f"The checkpoint called best holds step {best_step:,}. "
    for method, description in (("greedy", "Sampled greedily"), ("best_of", "With the best of several replies")):
        result = after.get(method)
        if result and result.get("success") is not None:
            text += f"{description}, it reaches {show(result['success'], 'share')}. "
    if is_graded(before) or is_graded(after):
        text += f"The return went from {return_with_interval(before)} to {return_with_interval(after)}. "
        text += _compare_intervals(before, after, "return", "Its intervals")
    return f"<p>{escape(text)}</p>"


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


PHONE = 344
"""Width in pixels of a chart that is legible on a phone."""


def for_each_width(draw: Callable[[int], str], *, widest: int = 1072) -> str:
    """Return a chart in two widths: `widest`, and the width of a phone. The page's CSS chooses between them."""
    wide_chart, narrow_chart = draw(widest), draw(PHONE)
    return wide_chart and f'<div class="roomy">{wide_chart}</div><div class="tight">{narrow_chart}</div>'


def _reference(evaluations: Sequence[Mapping[str, Any]]) -> dict[str, Mapping[str, Any]]:
    reference: dict[str, Mapping[str, Any]] = {}
    for summary in evaluations:
        reference |= summary.get("reference") or {}
    return reference


def _warnings(lines: Sequence[Mapping[str, Any]]) -> list[tuple[int, str]]:
    return [(line["step"], text) for line in lines for text in line.get("warnings", ())]


def warning_marks(lines: Sequence[Mapping[str, Any]]) -> list[Mark]:
    """Return marks for charts at the steps with warnings."""
    return [Mark(step, text) for step, text in _warnings(lines)]


def evaluation(evaluations: Sequence[Mapping[str, Any]], lines: Sequence[Mapping[str, Any]] = ()) -> str:
    if not evaluations:
        return ""
    reference, marks = _reference(evaluations), warning_marks(lines)
    chart = _evaluation_chart(
        "Success on selection seeds",
        evaluations,
        reference,
        marks,
        name="success",
        interval="success",
        kind="share",
    )
    if any(map(is_graded, evaluations)):
        chart += _evaluation_chart(
            "Return on selection seeds",
            evaluations,
            reference,
            marks,
            name="return_mean",
            interval="return",
            kind="number",
        )
    rows = "".join(
        f'<tr><td class="n">{s["step"]:,}</td><td class="n">{escape(with_interval(s))}</td>'
        f'<td class="n">{escape(return_with_interval(s))}</td><td class="n">{show(s.get("turns_mean"))}</td>'
        f'<td class="n">{show(s.get("format_rate"), "share")}</td></tr>'
        for s in evaluations
    )
    references = "The dotted lines are simple policies on the same seeds. " if reference else ""
    return section(
        "Selection",
        "Evaluations during training, which choose the best checkpoint: the highest of them flatters it. "
        f"The band is the 95 % interval. {references}",
        f'<div class="wide">{chart}</div><details><summary class="muted">As a table</summary><table>'
        '<tr><th class="n">Step</th><th class="n">Success</th><th class="n">Return</th>'
        '<th class="n">Turns</th><th class="n">Well-formed</th></tr>'
        f"{rows}</table></details>",
    )


def environments(
    lines: Sequence[Mapping[str, Any]], evaluations: Sequence[Mapping[str, Any]], final: Mapping[str, Any] | None
) -> str:
    """Return the section about each environment of the run; "" for a run with only one."""
    steps = [(summary["step"], summary["environments"]) for summary in evaluations if summary.get("environments")]
    if not steps:
        return ""
    names = list(steps[-1][1])
    series = [
        Series(
            name,
            [(step, envs[name]["success"]) for step, envs in steps if name in envs],
            colour % COLOURS,
            band=[
                (step, envs[name]["success_low"], envs[name]["success_high"]) for step, envs in steps if name in envs
            ],
            dots=True,
        )
        for colour, name in enumerate(names)
    ]
    chart = for_each_width(
        lambda width: line_chart(
            "Success on selection seeds", series, kind="share", width=width, height=340 if width > PHONE else 230
        )
    )
    rows = ""
    for name in names:
        before, last_summary = steps[0][1].get(name), steps[-1][1][name]
        references = (before or {}).get("reference") or {}
        reference_text = ", ".join(f"{policy} {show(row['success'], 'share')}" for policy, row in references.items())
        final_summary = (final or {}).get("environments", {}).get(name)
        cells = [with_interval(summary) if summary else "-" for summary in (before, last_summary, final_summary)]
        cells += [return_with_interval(final_summary or last_summary), reference_text or "-"]
        rows += f"<tr><td>{escape(name)}</td>{''.join(f'<td>{escape(cell)}</td>' for cell in cells)}</tr>"
    table = (
        "<table><tr><th>Environment</th><th>Before</th><th>Last selection</th><th>Final</th><th>Return</th>"
        f"<th>Policies without a model</th></tr>{rows}</table>"
    )
    metric_names = ("success", "return_mean", "kept_fraction", "turns_mean", "level")
    panels = small_charts(lines, [f"{TASKS}/{name}/{metric_name}" for metric_name in metric_names for name in names])
    return section(
        "Environments",
        "The figures above are means in which each environment counts alike; the best checkpoint is the one with the "
        "highest mean success.",
        f'{table}<div class="wide">{chart}</div>{panels}',
    )


def agents(lines: Sequence[Mapping[str, Any]]) -> str:
    """Return the section with metrics and gradients per agent; "" for a run without them."""
    names = sorted({name for line in lines for name in line["metrics"]})
    agent_names = dict.fromkeys(name.split("/")[1] for name in names if name.startswith(f"{AGENTS}/"))
    suffixes = ("policy/entropy", "policy/kl", "update/grad_norm")
    panels = small_charts(lines, [f"{AGENTS}/{name}/{suffix}" for suffix in suffixes for name in agent_names])
    gradient_agents = dict.fromkeys(name.split("/")[2] for name in names if name.startswith(f"gradients/{AGENTS}/"))
    charts = [
        line_chart(
            f"{name}: growth of its squared gradients with one scale of rewards for all",
            [
                Series(label, curve(lines, f"gradients/{AGENTS}/{name}/{factor}"), colour)
                for colour, (label, factor) in enumerate(
                    (("predicted", "pooled_factor"), ("measured", "measured_factor"))
                )
            ],
        )
        for name in gradient_agents
    ]
    chart_html = "".join(f"<div>{chart}</div>" for chart in charts if chart)
    return section(
        "Agents",
        "Each agent's policy by itself, and what sharing one mean and deviation of rewards would do to its gradients.",
        panels + (chart_html and f'<div class="charts">{chart_html}</div>'),
    )


def _evaluation_chart(
    title: str,
    evaluations: Sequence[Mapping[str, Any]],
    reference: Mapping[str, Mapping[str, Any]],
    marks: Sequence[Mark],
    *,
    name: str,
    interval: str,
    kind: Kind,
) -> str:
    """Return a chart of one metric of the evaluations, with its interval and the reference policies."""
    low, high = f"{interval}_low", f"{interval}_high"
    points = [(s["step"], s[name]) for s in evaluations if s.get(name) is not None]
    band = [(s["step"], s[low], s[high]) for s in evaluations if s.get(low) is not None]
    series = [Series("sampled", points, band=band, dots=True)]
    rules = [Rule(r[name], f"{policy} {show(r[name], kind)}") for policy, r in reference.items() if name in r]
    last_step = points[-1][0] if points else 0
    return for_each_width(
        lambda width: line_chart(
            title,
            series,
            rules=rules,
            marks=[mark for mark in marks if mark.x <= last_step],
            kind=kind,
            width=width,
            height=340 if width > PHONE else 230,
        )
    )


def small_charts(
    lines: Sequence[Mapping[str, Any]],
    names: Iterable[str],
    marks: Sequence[Mark] = (),
    colour: int = 0,
    *,
    large: bool = False,
) -> str:
    """Return small charts of the logged metrics, with thin lines for values and thick ones for their moving mean."""
    charts = []
    for name in names:
        points = curve(lines, name)
        if len(points) < 2:
            continue
        draw = partial(_metric_chart, metric(name), points, marks, colour)
        charts.append(for_each_width(draw, widest=430) if large else draw(PHONE))
    size = " large" if large else ""
    return f'<div class="charts{size}">{"".join(f"<div>{chart}</div>" for chart in charts)}</div>' if charts else ""


def _metric_chart(known: Metric, points: Sequence[Point], marks: Sequence[Mark], colour: int, width: int) -> str:
    return line_chart(
        known.label,
        [Series(known.label, smooth(points), colour, faint=[points])],
        marks=[mark for mark in marks if points[0][0] <= mark.x <= points[-1][0]],
        kind=known.kind,
        width=width,
    )


def learning(lines: Sequence[Mapping[str, Any]]) -> str:
    changed_names = [name for name in LEARNING if len({value for _, value in curve(lines, name)}) > 1]
    charts = small_charts(lines, changed_names, warning_marks(lines))
    return section("Learning", "Collected episodes, step by step.", charts)


def echo_trap(lines: Sequence[Mapping[str, Any]]) -> str:
    warnings = _warnings(lines)
    charts = small_charts(lines, SIGNALS, warning_marks(lines), colour=3, large=True)
    if not charts:
        return ""
    warning_list = (
        '<ul class="warnings">'
        + "".join(f"<li><b>Step {step:,}</b>{escape(text)}</li>" for step, text in warnings)
        + "</ul>"
        if warnings
        else '<p class="muted">No warning was given.</p>'
    )
    return section(
        "Echo Trap signals",
        "A policy that begins to repeat itself shows it here before its success falls: deviation, entropy and "
        "diversity drop, the gradient norm rises. Warnings are marked.",
        charts + warning_list,
    )


def information(lines: Sequence[Mapping[str, Any]]) -> str:
    charts = []
    for sampler, label in (("first_turn", "first turns"), ("random_turn", "random turns")):
        prefix = f"information/{sampler}/"
        metrics = [
            ("mutual_information", "Mutual information"),
            ("bound", "its bound"),
            ("conditional_entropy", "H(Z | X)"),
        ]
        series = [Series(text, curve(lines, prefix + name), index) for index, (name, text) in enumerate(metrics)]
        charts.append(line_chart(f"{label.capitalize()} (nats)", series[:2]))
        charts.append(line_chart(f"H(reasoning | prompt), {label}", series[2:]))
        charts.append(
            line_chart(
                f"Own prompt recognised, {label}",
                [Series("first guess", curve(lines, prefix + "retrieval_at_1"))],
                kind="share",
            )
        )
    chart_html = "".join(f"<div>{chart}</div>" for chart in charts if chart)
    return section(
        "Does the reasoning depend on the state?",
        "Mutual information near 0 is a template that is recited whatever the state, even where entropy is high.",
        chart_html and f'<div class="charts">{chart_html}</div>',
    )


def time_spent(lines: Sequence[Mapping[str, Any]]) -> str:
    timed_lines = [line for line in lines if line["metrics"].get("time/step")]
    if len(timed_lines) < 2:
        return ""
    layers = []
    for label, name in PARTS:
        points = [
            (line["step"], min((line["metrics"].get(name) or 0.0) / line["metrics"]["time/step"], 1.0))
            for line in timed_lines
        ]
        layers.append((label, points))
    # Scale down shares whose sum exceeds 1: waits overlap if episodes are collected in parallel.
    totals = [sum(points[index][1] for _, points in layers) for index in range(len(timed_lines))]
    layers = [
        (label, [(x, y / max(total, 1.0)) for (x, y), total in zip(points, totals, strict=True)])
        for label, points in layers
    ]
    other_shares = [(line["step"], max(0.0, 1 - total)) for line, total in zip(timed_lines, totals, strict=True)]
    layers = [(label, smooth(points)) for label, points in [*layers, ("Everything else", other_shares)]]
    total_seconds = sum(line["metrics"]["time/step"] for line in timed_lines)
    text = f"A step took {show(total_seconds / len(timed_lines), 'seconds')} on average. "
    rest_shares = [value for _, value in curve(lines, "time/share_outside")]
    if rest_shares:
        text += f"{show(sum(rest_shares) / len(rest_shares), 'share')} of the time was outside generation and update."
    shares = for_each_width(lambda width: share_chart("Share of each step", layers, width=width, height=240))
    charts = small_charts(lines, SPEED, colour=2)
    return section("Where the time went", escape(text), f'<div class="wide">{shares}</div>{charts}')


def configuration(facts: Mapping[str, Any]) -> str:
    differences = facts.get("differs_from_defaults")
    if differences is None:
        return ""
    if not differences:
        return f'{heading("Configuration")}<p class="muted">All defaults.</p>'
    rows = "".join(
        f"<tr><td>{dotted(key)}</td><td><code>{escape(format_value(value))}</code></td>"
        f'<td class="muted"><code>{escape(format_value(default))}</code></td></tr>'
        for key, (value, default) in differences.items()
    )
    table = f"<table><tr><th>Setting</th><th>This run</th><th>Default</th></tr>{rows}</table>"
    return section("Configuration", "What differs from the defaults; config.yaml has all of it.", table)


def format_value(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def provenance(facts: Mapping[str, Any], lines: Sequence[Mapping[str, Any]]) -> str:
    if not facts:
        return ""
    rows = {"run": facts.get("id", "")}
    git = facts.get("git")
    if git:
        rows["code"] = git["commit"] + (" with uncommitted changes" if git["dirty"] else "")
    machine = facts.get("platform", {})
    gpus = ", ".join(machine.get("gpus") or []) or "no GPU"
    rows["machine"] = (
        f"{machine.get('system', '')}, {machine.get('cores', '?')} cores, {gpus}, Python {machine.get('python', '')}"
    )
    rows["packages"] = ", ".join(f"{name} {version}" for name, version in facts.get("packages", {}).items())
    rows["command"] = " ".join(facts.get("command", []))
    resumptions = facts.get("resumed", [])
    if resumptions:
        rows["resumed"] = "once" if len(resumptions) == 1 else f"{len(resumptions)} times"
    body = "".join(
        f'<tr><td class="key">{escape(key)}</td><td><code>{escape(str(value))}</code></td></tr>'
        for key, value in rows.items()
    )
    metrics = ""
    if lines:
        other_names = sorted({name for line in lines for name in line["metrics"]} - set(METRICS))
        last_metrics = lines[-1]["metrics"]
        values = "".join(
            f'<tr><td>{dotted(name)}</td><td class="n">{show(last_metrics.get(name), metric(name).kind)}</td></tr>'
            for name in [*(name for name in METRICS if name in last_metrics), *other_names]
        )
        metrics = (
            f'<details><summary class="muted">All metrics of the last step</summary><table>{values}</table></details>'
        )
    return f"{heading('Provenance')}<table>{body}</table>{metrics}"
