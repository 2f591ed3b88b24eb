"""The report of a run as one self-contained HTML page: metrics, curves, and how to read them."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from starpod.load.measurements import Histogram
from starpod.load.report import describe_paths
from starpod.report.charts import COLOURS, Mark, Point, Rule, Series, line_chart
from starpod.report.figures import Kind, milliseconds, show
from starpod.report.page import page

STYLE = """
.split { display: flex; height: 30px; border-radius: 6px; overflow: hidden; margin: 10px 0 6px; }
.split i { display: block; min-width: 2px; }
.key i, td i.bar { display: inline-block; height: 10px; border-radius: 2px; }
.key i { width: 10px; margin: 0 6px 0 0; } .key span { margin-right: 18px; white-space: nowrap; }
td i.bar { background: var(--c0); margin-right: 8px; vertical-align: baseline; }
.verdicts { list-style: none; padding: 0; margin: 14px 0; } .verdicts li { margin: 4px 0; }
.verdicts b { display: inline-block; min-width: 74px; } .met b { color: var(--c2); } .unmet b { color: var(--c4); }
details.stage > summary { cursor: pointer; font-size: 18px; font-weight: 650; margin: 44px 0 4px; }
h3 { font-size: 15px; margin: 30px 0 2px; } .scroll { overflow-x: auto; }
table { min-width: 520px; } td, th { overflow-wrap: normal; }
td:first-child { white-space: nowrap; }
.command { white-space: pre-wrap; overflow-wrap: anywhere; background: var(--panel); border-radius: 8px;
  padding: 12px 14px; }
"""


_render_chart = functools.partial(line_chart, width=420, height=240)


def write_page(report: Mapping[str, Any], path: Path) -> None:
    """Write the page. Raise OSError if that fails."""
    path.write_text(render_page(report), encoding="utf-8")


def render_page(report: Mapping[str, Any]) -> str:
    stages = report["stages"]
    sections = [_render_head(report), _render_verdicts(report), _render_warnings(report), _render_search(report)]
    if len(stages) > 1:
        sections.append(_render_overview(stages))
    for number, stage in enumerate(stages):
        sections.append(_render_stage(stage, unfolded=number == len(stages) - 1, alone=len(stages) == 1))
    sections.append(_render_settings(report))
    return page(f"{_title(report)} · Starpod", "\n".join(filter(None, sections)), style=STYLE)


def _render_table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return an HTML table. A head that begins with `#` marks a column of numbers. Cells are HTML."""
    kinds = [' class="n"' if head.startswith("#") else "" for head in heads]
    head = "".join(f"<th{kind}>{head.removeprefix('#')}</th>" for kind, head in zip(kinds, heads, strict=True))
    body = "".join(
        f"<tr>{''.join(f'<td{kind}>{cell}</td>' for kind, cell in zip(kinds, row, strict=True))}</tr>" for row in rows
    )
    return f'<div class="scroll"><table><tr>{head}</tr>{body}</table></div>'


# --- the whole run -------------------------------------------------------------------------------------------------


def _title(report: Mapping[str, Any]) -> str:
    return f"Load on {report['plan']['environment']}"


def _render_head(report: Mapping[str, Any]) -> str:
    server, plan = report["server"], report["plan"]
    replicas = server["replicas"]
    facts = [
        f"{server['name']} {server['version']}".strip() or "a server without a name",
        replicas[0] if len(replicas) == 1 else f"{len(replicas)} replicas",
        describe_paths(report["stages"][-1]),
        f"{plan['policy']} actions",
        report["started"].replace("T", " ").replace("Z", " UTC"),
    ]
    stage = report["stages"][-1]
    step = stage["calls"].get("step", {})
    search = report.get("search")
    tiles = []
    if search:
        tiles.append(
            _render_tile("none" if search["rate"] is None else show(search["rate"], "rate"), "highest rate, steps/s")
        )
    tiles += [
        _render_tile(
            show(stage["steps_per_second"], "rate"), "steps/s", _format_interval(stage, "steps_per_second", "rate")
        ),
        _render_tile(milliseconds(step.get("p50_ms")), "p50 of a step", _format_interval(stage, "step.p50_ms")),
        _render_tile(milliseconds(step.get("p99_ms")), "p99 of a step", _format_interval(stage, "step.p99_ms")),
        _render_tile(f"{sum(entry['errors']['total'] for entry in report['stages']):,}", "errors"),
    ]
    note = (
        "" if len(report["stages"]) == 1 else f'<p class="muted">The figures below are of: {escape(stage["name"])}</p>'
    )
    return (
        f"<h1>{escape(_title(report))}</h1>"
        f'<p class="muted">{escape(" · ".join(facts))}</p>{note}<div class="hero">{"".join(tiles)}</div>'
    )


def _render_tile(number: str, label: str, interval: str = "") -> str:
    note = f"<span>{escape(interval)}</span>" if interval else ""
    return f'<div class="tile"><b>{escape(number)}</b><span>{escape(label)}</span>{note}</div>'


def _format_interval(stage: Mapping[str, Any], name: str, kind: Kind = "milliseconds") -> str:
    interval = stage["uncertainty"].get(name)
    if not interval:
        return ""
    return f"{show(interval[0], kind)} to {show(interval[1], kind)}"


def _render_verdicts(report: Mapping[str, Any]) -> str:
    rows = "".join(
        f'<li class="{"met" if verdict["met"] else "unmet"}"><b>{"met" if verdict["met"] else "not met"}</b>'
        f"<code>{escape(verdict['requirement'])}</code> "
        f'<span class="muted">{escape(verdict["measured"])}, {escape(verdict["stage"])}</span></li>'
        for verdict in report.get("requirements", ())
    )
    return f'<ul class="verdicts">{rows}</ul>' if rows else ""


def _render_warnings(report: Mapping[str, Any]) -> str:
    rows = "".join(f"<li>{escape(warning)}</li>" for warning in report["warnings"])
    return f'<ul class="warnings">{rows}</ul>' if rows else ""


def _render_search(report: Mapping[str, Any]) -> str:
    search = report.get("search")
    if not search:
        return ""
    rows = [
        (
            show(probe["rate"], "rate"),
            "confirmation" if probe["confirming"] else "probe",
            "held" if probe["held"] else escape(f"no: {probe['why']}"),
            escape(", ".join(f"{name} {value}" for name, value in probe["measured"].items())),
        )
        for probe in search["probes"]
    ]
    outcome = (
        "No rate held it." if search["rate"] is None else f"{show(search['rate'], 'rate')} steps/s held it, confirmed."
    )
    return (
        f"<h2>The highest rate that keeps {escape(' and '.join(search['targets']))}</h2><p>{outcome}</p>"
        + _render_table(("#Steps/s due", "", "Outcome", "Measured"), rows)
    )


def _render_overview(stages: Sequence[Mapping[str, Any]]) -> str:
    """Chart latency and throughput against load, and list the stages."""
    load = "steps/s due" if all(stage["rate"] for stage in stages[1:]) else "sessions"
    by_load = sorted(stages, key=lambda stage: _load_of(stage, load))
    latencies = []
    for colour, name in enumerate(("p50", "p99")):
        values = [(_load_of(stage, load), stage["calls"].get("step", {}).get(f"{name}_ms")) for stage in by_load]
        latencies.append(Series(name, [(x, value / 1e3) for x, value in values if value], colour, dots=True))
    steps = Series("steps/s", [(_load_of(stage, load), stage["steps_per_second"]) for stage in by_load], 2, dots=True)
    charts = _render_chart("Latency of a step", latencies, kind="seconds", logarithmic=True, x_label=load)
    charts += _render_chart("Steps/s", [steps], kind="rate", x_label=load)
    percentiles = ("p50", "p99", "p99.9")
    rows = [
        (
            escape(stage["name"]),
            f"{stage['sessions']:,}",
            f"{stage['steps_per_second']:,.1f}",
            *(milliseconds(stage["calls"].get("step", {}).get(f"{name}_ms")) for name in percentiles),
            f"{stage['errors']['total']:,}",
        )
        for stage in stages
    ]
    heads = ("Stage", "#Sessions", "#Steps/s", *(f"#{name}" for name in percentiles), "#Errors")
    return f'<h2>Stages</h2><div class="charts large">{charts}</div>{_render_table(heads, rows)}'


def _load_of(stage: Mapping[str, Any], kind: str) -> float:
    """Return a stage's position on the x axis. A closed loop has no target rate, so return its throughput."""
    return float(stage["sessions"] if kind == "sessions" else stage["rate"] or stage["steps_per_second"])


def _render_settings(report: Mapping[str, Any]) -> str:
    rows = "".join(
        f'<tr><td class="key">{escape(key.replace("_", " "))}</td><td>{escape(str(value))}</td></tr>'
        for key, value in report["plan"].items()
        if value not in ({}, None, "")
    )
    return (
        f'<h2>How it was run</h2><pre class="command">{escape(report["command"])}</pre>'
        f'<details><summary class="muted">All settings</summary><table>{rows}</table></details>'
        '<p class="muted">99 % bootstrap intervals over time slices. '
        f"Replicas: {escape(', '.join(report['server']['replicas']))}</p>"
    )


# --- one stage --------------------------------------------------------------------------------------------------------

LEVELS = (50, 75, 90, 95, 99, 99.5, 99.9, 99.95, 99.99, 99.995, 99.999)
"""Percentiles on the x axis of the curve. A percentile with too few latencies is left out."""


def _render_stage(stage: Mapping[str, Any], *, unfolded: bool, alone: bool) -> str:
    """Return a stage's section, which the reader can fold unless it is the only one (`alone`).

    unfolded: whether the section is open when the page is loaded.
    """
    load = f"{stage['sessions']:,} sessions for {stage['seconds']:.1f} s after {stage['warmup_seconds']:g} s of warm-up"
    if stage["loop"] == "closed":
        load += "; closed loop: each session steps again when its reply is there"
    else:
        load += (
            f"; open loop: {show(stage['rate'], 'rate')} steps due per second ({stage['arrivals']}). Latencies count"
            " from when a step was due, so that a server that stalls cannot hide it"
        )
    body = (
        f'<p class="muted">{escape(load)}.</p>'
        f'<div class="charts large">{_render_percentiles(stage)}{_render_latencies(stage)}{_render_rates(stage)}</div>'
        f"{_render_calls(stage)}{_render_server_time(stage)}{_render_replicas(stage)}"
        f"{_render_errors(stage)}{_render_generators(stage)}"
    )
    if alone:
        return body
    state = " open" if unfolded else ""
    return f'<details class="stage"{state}><summary>{escape(stage["name"])}</summary>{body}</details>'


def _render_percentiles(stage: Mapping[str, Any]) -> str:
    """Chart latency by percentile, on an axis where 90, 99 and 99.9 % are equally far apart."""
    series = []
    step = stage["calls"].get("step", {})
    if "service" in step:
        series.append(Series("step", _percentile_curve(step["hdr"]), 0))
        series.append(Series("from sent", _percentile_curve(step["service"]["hdr"]), 5))
    for call, figures in stage["calls"].items():
        if call not in ("open", "close", "renew") and not (call == "step" and series) and len(series) < COLOURS:
            series.append(Series(call, _percentile_curve(figures["hdr"]), len(series)))
    ticks = [(_axis_position(level), f"{level:g} %") for level in LEVELS]
    return _render_chart(
        "Latency by percentile", series, kind="seconds", x_label="percentile", x_ticks=ticks, logarithmic=True
    )


def _percentile_curve(text: str) -> list[Point]:
    histogram = Histogram.decode(text)
    max_level = 100 * (1 - 1 / max(len(histogram), 2))
    levels = [level for level in LEVELS if level <= max_level]
    return list(zip(map(_axis_position, levels), histogram.percentiles(*levels), strict=True))


def _axis_position(level: float) -> float:
    return -math.log10(1 - level / 100)


def _render_latencies(stage: Mapping[str, Any]) -> str:
    series = []
    for colour, name in enumerate(("p50", "p95", "p99")):
        points = [
            (interval["at_seconds"], interval["calls"]["step"][f"{name}_ms"] / 1e3)
            for interval in stage["intervals"]
            if interval["calls"].get("step")
        ]
        series.append(Series(name, points, colour))
    return _render_chart("Latency of a step over time", series, kind="seconds", x_label="seconds", logarithmic=True)


def _render_rates(stage: Mapping[str, Any]) -> str:
    length = stage["interval_seconds"]
    steps = [(interval["at_seconds"], interval["steps"] / length) for interval in stage["intervals"]]
    rules = [] if stage["rate"] is None else [Rule(stage["rate"], "due")]
    intervals = [interval for interval in stage["intervals"] if interval["errors"]]
    marks = [Mark(interval["at_seconds"], f"{interval['errors']:,} errors") for interval in intervals[:20]]
    interval_count = stage["seconds"] / length
    if len(steps) > 1 and interval_count % 1 > 0.02:
        steps = steps[:-1]  # drop the last interval, which is shorter than the others
    line = Series("steps/s", steps, 2)
    return _render_chart("Steps/s over time", [line], rules=rules, marks=marks, kind="rate", x_label="seconds")


def _render_calls(stage: Mapping[str, Any]) -> str:
    names = ("mean", "p50", "p90", "p99", "p99.9", "max")
    lines = []
    for call, figures in stage["calls"].items():
        if call == "step" and "service" in figures:
            lines += [("step, from due", figures), ("step, from sent", figures["service"])]
        else:
            lines.append((call, figures))
    rows = [
        (label, f"{line['count']:,}", *(milliseconds(line[f"{name}_ms"]) for name in names)) for label, line in lines
    ]
    return "<h3>Calls</h3>" + _render_table(("Call", "#Count", *(f"#{name}" for name in names)), rows)


def _render_server_time(stage: Mapping[str, Any]) -> str:
    times = stage["server_time"]
    if not times or not times["latency_ms"]:
        return '<h3>Where the time goes</h3><p class="muted">The server does not report its own times.</p>'
    parts = [
        ("in the environment", times["environment_ms"], 2),
        ("elsewhere in the server", max(times["total_ms"] - times["environment_ms"], 0.0), 0),
        ("on the way, and in this generator", max(times["latency_ms"] - times["total_ms"], 0.0), 5),
    ]
    total = sum(value for _, value, _ in parts) or 1.0
    bar = "".join(
        f'<i style="width:{100 * value / total:.2f}%;background:var(--c{colour})"></i>' for _, value, colour in parts
    )
    key = "".join(
        f'<span><i style="background:var(--c{colour})"></i>{name} {milliseconds(value)}</span>'
        for name, value, colour in parts
    )
    call, overhead = milliseconds(times["latency_ms"]), milliseconds(times["overhead_ms"])
    return (
        f'<h3>Where the time goes</h3><p class="muted">Means of {times["calls"]:,} calls of all kinds, as the server'
        f" reports them: {call} a call, {overhead} of it around the environment.</p>"
        f'<div class="split">{bar}</div><p class="key">{key}</p>'
    )


def _render_replicas(stage: Mapping[str, Any]) -> str:
    replicas = stage["replicas"]
    if len(replicas) < 2:
        return ""
    max_rate = max(replica["steps_per_second"] for replica in replicas) or 1.0
    rows = [
        (
            escape(replica["address"]),
            f'<i class="bar" style="width:{120 * replica["steps_per_second"] / max_rate:.0f}px"></i>'
            f"{replica['steps_per_second']:,.1f}",
            milliseconds(replica["p50_ms"]),
            milliseconds(replica["p99_ms"]),
            f"{replica['errors']:,}",
        )
        for replica in replicas
    ]
    return "<h3>Replicas</h3>" + _render_table(("Address", "Steps/s", "#p50", "#p99", "#Errors"), rows)


def _render_errors(stage: Mapping[str, Any]) -> str:
    classes = stage["errors"]["classes"]
    if not classes:
        return ""
    rows = [
        (
            kind.replace("_", " "),
            f"{entry['count']:,}",
            ", ".join(f"{count:,} {call}" for call, count in entry["calls"].items()),
            escape(entry["example"]),
        )
        for kind, entry in classes.items()
    ]
    return '<h3>Errors</h3><p class="muted">They are in no latency.</p>' + _render_table(
        ("Class", "#Count", "Calls", "For example"), rows
    )


def _render_generators(stage: Mapping[str, Any]) -> str:
    shares = ", ".join(f"{100 * generator['loop_cpu_share']:.0f} %" for generator in stage["generators"])
    late = milliseconds(stage["late_p99_ms"])
    return (
        f'<h3>The generator itself</h3><p class="muted">Its event loops were {shares} busy; timers fired at most {late}'
        " late in 99 of 100 cases. Close to 100 %, the generator measures itself.</p>"
    )
