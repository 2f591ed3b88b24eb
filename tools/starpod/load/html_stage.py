"""One stage of a report as HTML: curves and tables."""

from __future__ import annotations

import math
from collections.abc import Mapping
from html import escape
from typing import Any

from starpod.load.histogram import Histogram
from starpod.report.charts import COLOURS, Mark, Point, Rule, Series, line_chart
from starpod.report.figures import show

LEVELS = (50, 75, 90, 95, 99, 99.5, 99.9, 99.95, 99.99, 99.995, 99.999)
"""Percentiles that the curve goes through, as far as there are latencies for them."""


def stage_section(stage: Mapping[str, Any], *, unfolded: bool, alone: bool) -> str:
    """All there is to say of a stage; folded away, unless it is `alone`.

    unfolded: the reader finds it open.
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
        f'<div class="charts large">{_percentiles(stage)}{_over_time(stage)}{_rate(stage)}</div>'
        f"{_calls(stage)}{_server_time(stage)}{_replicas(stage)}{_errors(stage)}{_generators(stage)}"
    )
    if alone:
        return body
    state = " open" if unfolded else ""
    return f'<details class="stage"{state}><summary>{escape(stage["name"])}</summary>{body}</details>'


def _percentiles(stage: Mapping[str, Any]) -> str:
    """Latency by percentile; each nine has the same room."""
    series = []
    step = stage["calls"].get("step", {})
    if "service" in step:
        series.append(Series("step", _curve(step["hdr"]), 0))
        series.append(Series("from sent", _curve(step["service"]["hdr"]), 5))
    for call, figures in stage["calls"].items():
        if call not in ("open", "close", "renew") and not (call == "step" and series) and len(series) < COLOURS:
            series.append(Series(call, _curve(figures["hdr"]), len(series)))
    return line_chart(
        "Latency by percentile",
        series,
        kind="seconds",
        x_label="percentile",
        x_ticks=[(_place(level), f"{level:g} %") for level in LEVELS],
        logarithmic=True,
        width=420,
        height=240,
    )


def _curve(text: str) -> list[Point]:
    histogram = Histogram.decode(text)
    reached = 100 * (1 - 1 / max(len(histogram), 2))
    levels = [level for level in LEVELS if level <= reached]
    return [(_place(level), histogram.percentile(level)) for level in levels]


def _place(level: float) -> float:
    return -math.log10(1 - level / 100)


def _over_time(stage: Mapping[str, Any]) -> str:
    series = []
    for colour, name in enumerate(("p50", "p95", "p99")):
        points = [
            (interval["at_seconds"], interval["calls"]["step"][f"{name}_ms"] / 1e3)
            for interval in stage["intervals"]
            if interval["calls"].get("step")
        ]
        series.append(Series(name, points, colour))
    return line_chart(
        "Latency of a step over time",
        series,
        kind="seconds",
        x_label="seconds",
        logarithmic=True,
        width=420,
        height=240,
    )


def _rate(stage: Mapping[str, Any]) -> str:
    length = stage["interval_seconds"]
    steps = [(interval["at_seconds"], interval["steps"] / length) for interval in stage["intervals"]]
    rules = [] if stage["rate"] is None else [Rule(stage["rate"], "due")]
    failed = [interval for interval in stage["intervals"] if interval["errors"]]
    marks = [Mark(interval["at_seconds"], f"{interval['errors']:,} errors") for interval in failed[:20]]
    whole = stage["seconds"] / length
    if len(steps) > 1 and whole % 1 > 0.02:
        steps = steps[:-1]  # cut short
    return line_chart(
        "Steps/s over time",
        [Series("steps/s", steps, 2)],
        rules=rules,
        marks=marks,
        kind="rate",
        x_label="seconds",
        width=420,
        height=240,
    )


def _calls(stage: Mapping[str, Any]) -> str:
    names = ("mean", "p50", "p90", "p99", "p99.9", "max")
    rows = ""
    for call, figures in stage["calls"].items():
        lines = [(call, figures)]
        if call == "step" and "service" in figures:
            lines = [("step, from due", figures), ("step, from sent", figures["service"])]
        for label, line in lines:
            cells = "".join(f'<td class="n">{milliseconds(line[f"{name}_ms"])}</td>' for name in names)
            rows += f'<tr><td>{label}</td><td class="n">{line["count"]:,}</td>{cells}</tr>'
    head = "".join(f'<th class="n">{name}</th>' for name in names)
    head = f'<tr><th>Call</th><th class="n">Count</th>{head}</tr>'
    return f'<h3>Calls</h3><div class="scroll"><table>{head}{rows}</table></div>'


def _server_time(stage: Mapping[str, Any]) -> str:
    told = stage["server_time"]
    if not told or not told["latency_ms"]:
        return '<h3>Where the time goes</h3><p class="muted">The server does not tell its own time.</p>'
    parts = [
        ("in the environment", told["environment_ms"], 2),
        ("elsewhere in the server", max(told["total_ms"] - told["environment_ms"], 0.0), 0),
        ("on the way, and in this generator", max(told["latency_ms"] - told["total_ms"], 0.0), 5),
    ]
    whole = sum(value for _, value, _ in parts) or 1.0
    bar = "".join(
        f'<i style="width:{100 * value / whole:.2f}%;background:var(--c{colour})"></i>' for _, value, colour in parts
    )
    key = "".join(
        f'<span><i style="background:var(--c{colour})"></i>{name} {milliseconds(value)}</span>'
        for name, value, colour in parts
    )
    call, around = milliseconds(told["latency_ms"]), milliseconds(told["overhead_ms"])
    return (
        f'<h3>Where the time goes</h3><p class="muted">Means of {told["calls"]:,} calls of all kinds, as the server'
        f" tells them: {call} a call, {around} of it around the environment.</p>"
        f'<div class="split">{bar}</div><p class="key">{key}</p>'
    )


def _replicas(stage: Mapping[str, Any]) -> str:
    replicas = stage["replicas"]
    if len(replicas) < 2:
        return ""
    most = max(replica["steps_per_second"] for replica in replicas) or 1.0
    rows = "".join(
        f"<tr><td>{escape(replica['address'])}</td>"
        f'<td><i class="bar" style="width:{120 * replica["steps_per_second"] / most:.0f}px"></i>'
        f"{replica['steps_per_second']:,.1f}</td>"
        f'<td class="n">{milliseconds(replica["p50_ms"])}</td><td class="n">{milliseconds(replica["p99_ms"])}</td>'
        f'<td class="n">{replica["errors"]:,}</td></tr>'
        for replica in replicas
    )
    return (
        '<h3>Replicas</h3><div class="scroll"><table><tr><th>Address</th><th>Steps/s</th><th class="n">p50</th>'
        f'<th class="n">p99</th><th class="n">Errors</th></tr>{rows}</table></div>'
    )


def _errors(stage: Mapping[str, Any]) -> str:
    rows = "".join(
        f'<tr><td>{kind.replace("_", " ")}</td><td class="n">{entry["count"]:,}</td>'
        f"<td>{escape(', '.join(f'{count:,} {call}' for call, count in entry['calls'].items()))}</td>"
        f"<td>{escape(entry['example'])}</td></tr>"
        for kind, entry in stage["errors"]["classes"].items()
    )
    if not rows:
        return ""
    return (
        '<h3>Errors</h3><p class="muted">They are in no latency.</p><div class="scroll"><table><tr><th>Class</th>'
        f'<th class="n">Count</th><th>Calls</th><th>For example</th></tr>{rows}</table></div>'
    )


def _generators(stage: Mapping[str, Any]) -> str:
    shares = ", ".join(f"{100 * generator['loop_cpu_share']:.0f} %" for generator in stage["generators"])
    late = milliseconds(stage["late_p99_ms"])
    return (
        f'<h3>The generator itself</h3><p class="muted">Its event loops were {shares} busy; timers fired at most {late}'
        " late in 99 of 100 cases. Close to 100 %, it measures itself.</p>"
    )


def milliseconds(value: float | None) -> str:
    """A time in a readable unit."""
    return show(None if value is None else value / 1e3, "seconds")
