"""The report of a run as one self-contained HTML page: metrics, curves, and how to read them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from starpod.load.measurements import Histogram
from starpod.load.report import describe_paths
from starpod.report.curves import COLOURS, Chart, ChartLine, Mark, Point, Rule
from starpod.report.figures import Kind, milliseconds, show
from starpod.report.pages import PageSection, PageTable, render_file

LEVELS = (50, 75, 90, 95, 99, 99.5, 99.9, 99.95, 99.99, 99.995, 99.999)
"""Percentiles on the x axis of the curve. A percentile with too few latencies is left out."""


def write_page(report: Mapping[str, Any], path: Path) -> None:
    """Write the page. Raise OSError if that fails."""
    path.write_text(render_page(report), encoding="utf-8")


def render_page(report: Mapping[str, Any]) -> str:
    stages, server, plan = report["stages"], report["server"], report["plan"]
    replicas = server["replicas"]
    facts = [
        f"{server['name']} {server['version']}".strip() or "a server without a name",
        replicas[0] if len(replicas) == 1 else f"{len(replicas)} replicas",
        describe_paths(stages[-1]),
        f"{plan['policy']} actions",
        report["started"].replace("T", " ").replace("Z", " UTC"),
    ]
    settings = [(key.replace("_", " "), str(value)) for key, value in plan.items() if value not in ({}, None, "")]
    return render_file(
        "load.html", title=f"Load on {plan['environment']}", facts=facts, report=report, tiles=_tiles(report),
        search=_search(report), overview=_overview(stages) if len(stages) > 1 else None,
        stages=[_stage(stage) for stage in stages], settings=PageTable(("", ""), settings, folded="All settings"),
    )  # fmt: skip


# --- the whole run -------------------------------------------------------------------------------------------------


def _tiles(report: Mapping[str, Any]) -> list[tuple[str, ...]]:
    stage, search = report["stages"][-1], report.get("search")
    step = stage["calls"].get("step", {})
    errors = sum(entry["errors"]["total"] for entry in report["stages"])
    tiles: list[tuple[str, ...]] = [
        (show(stage["steps_per_second"], "rate"), "steps/s", _format_interval(stage, "steps_per_second", "rate")),
        (milliseconds(step.get("p50_ms")), "p50 of a step", _format_interval(stage, "step.p50_ms")),
        (milliseconds(step.get("p99_ms")), "p99 of a step", _format_interval(stage, "step.p99_ms")),
        (f"{errors:,}", "errors"),
    ]
    if search:
        rate = "none" if search["rate"] is None else show(search["rate"], "rate")
        tiles.insert(0, (rate, "highest rate, steps/s"))
    return tiles


def _format_interval(stage: Mapping[str, Any], name: str, kind: Kind = "milliseconds") -> str:
    interval = stage["uncertainty"].get(name)
    return f"{show(interval[0], kind)} to {show(interval[1], kind)}" if interval else ""


def _search(report: Mapping[str, Any]) -> PageSection | None:
    search = report.get("search")
    if not search:
        return None
    rows = [
        (
            show(probe["rate"], "rate"),
            "confirmation" if probe["confirming"] else "probe",
            "held" if probe["held"] else f"no: {probe['why']}",
            ", ".join(f"{name} {value}" for name, value in probe["measured"].items()),
        )
        for probe in search["probes"]
    ]
    rate = search["rate"]
    return PageSection(
        f"The highest rate that keeps {' and '.join(search['targets'])}",
        "No rate held it." if rate is None else f"{show(rate, 'rate')} steps/s held it, confirmed.",
        table=PageTable(("#Steps/s due", "Kind", "Outcome", "Measured"), rows),
    )


def _overview(stages: Sequence[Mapping[str, Any]]) -> PageSection:
    """Return charts of latency and throughput against load, and a list of the stages."""
    load = "steps/s due" if all(stage["rate"] for stage in stages[1:]) else "sessions"
    by_load = sorted(stages, key=lambda stage: _load_of(stage, load))
    latencies = []
    for colour, name in enumerate(("p50", "p99")):
        values = [(_load_of(stage, load), stage["calls"].get("step", {}).get(f"{name}_ms")) for stage in by_load]
        latencies.append(ChartLine(name, [(x, value / 1e3) for x, value in values if value], colour, dots=True))
    rates = [(_load_of(stage, load), stage["steps_per_second"]) for stage in by_load]
    rows = [
        (
            stage["name"],
            f"{stage['sessions']:,}",
            f"{stage['steps_per_second']:,.1f}",
            *(milliseconds(stage["calls"].get("step", {}).get(f"{name}_ms")) for name in ("p50", "p99", "p99.9")),
            f"{stage['errors']['total']:,}",
        )
        for stage in stages
    ]
    charts = [
        Chart("Latency of a step", latencies, "seconds", load, logarithmic=True),
        Chart("Steps/s", [ChartLine("steps/s", rates, 2, dots=True)], "rate", load),
    ]
    heads = ("Stage", "#Sessions", "#Steps/s", "#p50", "#p99", "#p99.9", "#Errors")
    return PageSection("Stages", charts=charts, after=PageTable(heads, rows))


def _load_of(stage: Mapping[str, Any], kind: str) -> float:
    """Return a stage's position on the x axis. A closed loop has no target rate, so return its throughput."""
    return float(stage["sessions"] if kind == "sessions" else stage["rate"] or stage["steps_per_second"])


# --- one stage --------------------------------------------------------------------------------------------------------


def _stage(stage: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values of a stage's section."""
    load = f"{stage['sessions']:,} sessions for {stage['seconds']:.1f} s after {stage['warmup_seconds']:g} s of warm-up"
    if stage["loop"] == "closed":
        load += "; closed loop: each session steps again when its reply is there"
    else:
        load += (
            f"; open loop: {show(stage['rate'], 'rate')} steps due per second ({stage['arrivals']}). Latencies count"
            " from when a step was due, so that a server that stalls cannot hide it"
        )
    return {
        "name": stage["name"],
        "load": load,
        "charts": [_percentiles(stage), _latencies(stage), _rates(stage)],
        "calls": _calls(stage),
        "time": _server_time(stage),
        "replicas": _replicas(stage["replicas"]),
        "errors": _errors(stage["errors"]["classes"]),
        "busy": ", ".join(f"{100 * generator['loop_cpu_share']:.0f} %" for generator in stage["generators"]),
        "late": milliseconds(stage["late_p99_ms"]),
    }


def _percentiles(stage: Mapping[str, Any]) -> Chart:
    """Return latency by percentile, on an axis where 90, 99 and 99.9 % are equally far apart."""
    lines = []
    step = stage["calls"].get("step", {})
    if "service" in step:
        lines.append(ChartLine("step", _percentile_curve(step["hdr"]), 0))
        lines.append(ChartLine("from sent", _percentile_curve(step["service"]["hdr"]), 5))
    for call, figures in stage["calls"].items():
        if call not in ("open", "close", "renew") and not (call == "step" and lines) and len(lines) < COLOURS:
            lines.append(ChartLine(call, _percentile_curve(figures["hdr"]), len(lines)))
    ticks = [(_axis_position(level), f"{level:g} %") for level in LEVELS]
    return Chart("Latency by percentile", lines, "seconds", "percentile", x_ticks=ticks, logarithmic=True)


def _percentile_curve(text: str) -> list[Point]:
    histogram = Histogram.decode(text)
    max_level = 100 * (1 - 1 / max(len(histogram), 2))
    levels = [level for level in LEVELS if level <= max_level]
    return list(zip(map(_axis_position, levels), histogram.percentiles(*levels), strict=True))


def _axis_position(level: float) -> float:
    return -math.log10(1 - level / 100)


def _latencies(stage: Mapping[str, Any]) -> Chart:
    lines = []
    for colour, name in enumerate(("p50", "p95", "p99")):
        points = [
            (interval["at_seconds"], interval["calls"]["step"][f"{name}_ms"] / 1e3)
            for interval in stage["intervals"]
            if interval["calls"].get("step")
        ]
        lines.append(ChartLine(name, points, colour))
    return Chart("Latency of a step over time", lines, "seconds", "seconds", logarithmic=True)


def _rates(stage: Mapping[str, Any]) -> Chart:
    length = stage["interval_seconds"]
    steps = [(interval["at_seconds"], interval["steps"] / length) for interval in stage["intervals"]]
    rules = [] if stage["rate"] is None else [Rule(stage["rate"], "due")]
    intervals = [interval for interval in stage["intervals"] if interval["errors"]]
    marks = [Mark(interval["at_seconds"], f"{interval['errors']:,} errors") for interval in intervals[:20]]
    interval_count = stage["seconds"] / length
    if len(steps) > 1 and interval_count % 1 > 0.02:
        steps = steps[:-1]  # drop the last interval, which is shorter than the others
    return Chart("Steps/s over time", [ChartLine("steps/s", steps, 2)], "rate", "seconds", rules, marks)


def _calls(stage: Mapping[str, Any]) -> PageTable:
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
    return PageTable(("Call", "#Count", *(f"#{name}" for name in names)), rows)


def _server_time(stage: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the parts of a call's time as (label, time, share, colour); None if the server does not report them."""
    times = stage["server_time"]
    if not times or not times["latency_ms"]:
        return None
    parts = [
        ("in the environment", times["environment_ms"], 2),
        ("elsewhere in the server", max(times["total_ms"] - times["environment_ms"], 0.0), 0),
        ("on the way, and in this generator", max(times["latency_ms"] - times["total_ms"], 0.0), 5),
    ]
    total = sum(value for _, value, _ in parts) or 1.0
    return {
        **times,
        "parts": [(label, milliseconds(value), f"{100 * value / total:.2f}", colour) for label, value, colour in parts],
    }


def _replicas(replicas: Sequence[Mapping[str, Any]]) -> PageTable | None:
    rows = [
        (
            replica["address"],
            f"{replica['steps_per_second']:,.1f}",
            milliseconds(replica["p50_ms"]),
            milliseconds(replica["p99_ms"]),
            f"{replica['errors']:,}",
        )
        for replica in replicas
    ]
    return PageTable(("Address", "#Steps/s", "#p50", "#p99", "#Errors"), rows) if len(rows) > 1 else None


def _errors(classes: Mapping[str, Any]) -> PageTable | None:
    rows = [
        (
            kind.replace("_", " "),
            f"{entry['count']:,}",
            ", ".join(f"{count:,} {call}" for call, count in entry["calls"].items()),
            entry["example"],
        )
        for kind, entry in classes.items()
    ]
    return PageTable(("Class", "#Count", "Calls", "For example"), rows) if rows else None
