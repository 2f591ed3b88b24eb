"""Terminal output of a run: lines while stages run, and their reports."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console, Group
from rich.table import Table
from rich.text import Text

from starpod.load.comparison import Comparison
from starpod.load.measurements import StageResult
from starpod.load.plan import Stage
from starpod.load.report import describe_paths, describe_servers
from starpod.load.requirements import SearchResult
from starpod.report.figures import milliseconds, show

LINE_SECONDS = 5.0
"""Seconds between lines. The first line comes after FIRST_LINE_SECONDS, to show that the run is alive."""
FIRST_LINE_SECONDS = 1.0


class LoadScreen:
    """Prints the progress of stages and their reports."""

    def __init__(self, console: Console) -> None:
        self.console = console
        self._last = 0.0
        self._stage: Stage | None = None

    def watch(self, result: StageResult) -> None:
        """Show the progress of a stage. Call this several times a second."""
        now = time.monotonic()
        if result.stage is not self._stage:
            self._stage, self._last = result.stage, now - LINE_SECONDS + FIRST_LINE_SECONDS
        if now - self._last >= LINE_SECONDS and result.points:
            self._last = now
            self.console.print(f"{result.stage.name} {_describe_progress(result)}", highlight=False, soft_wrap=True)

    def stage(self, report: Mapping[str, Any]) -> None:
        """Print one line about a stage that has ended."""
        step = report["calls"].get("step", {})
        p50, p99 = milliseconds(step.get("p50_ms")), milliseconds(step.get("p99_ms"))
        self.console.print(
            f"{report['name']}: {show(report['steps_per_second'], 'rate')} steps/s, p50 {p50}, p99 {p99}, "
            f"{report['errors']['total']} errors",
            highlight=False,
            soft_wrap=True,
        )

    def report(self, document: Mapping[str, Any]) -> None:
        """Print the metrics of all stages, then the remarks."""
        for stage in document["stages"]:
            self.console.print(_render_stage_table(stage))
        self.remarks(document)

    def remarks(self, document: Mapping[str, Any]) -> None:
        """Print the number of servers that sessions need, errors, warnings and the verdicts on requirements."""
        say = self.console.print
        if servers := describe_servers(document):
            say(servers, highlight=False, soft_wrap=True)
        for stage in document["stages"]:
            for kind, entry in stage["errors"]["classes"].items():
                calls = ", ".join(f"{count:,} {call}" for call, count in entry["calls"].items())
                say(Text(f"{stage['name']}: {entry['count']:,} {kind} ({calls}): {entry['example']}", style="red"))
        for warning in document["warnings"]:
            say(Text(f"warning: {warning}", style="yellow"))
        for verdict in document.get("requirements", ()):
            mark, style = ("met", "green") if verdict["met"] else ("NOT met", "bold red")
            say(Text(f"{mark}: {verdict['requirement']} ({verdict['measured']}, {verdict['stage']})", style=style))

    def search(self, result: SearchResult) -> None:
        """Print the outcome of a search for the highest rate."""
        table = Table(title="Search for the highest rate", title_justify="left")
        for name in ("Steps/s", "", "Held", "Measured"):
            table.add_column(name)
        for probe in result.probes:
            values = ", ".join(f"{name} {value}" for name, value in probe.measured.items())
            table.add_row(
                show(probe.rate, "rate"),
                "confirmation" if probe.confirming else "probe",
                "yes" if probe.held else f"no: {probe.why}",
                values,
            )
        self.console.print(table)
        rate = (
            "No rate held the target." if result.rate is None else f"Highest rate: {show(result.rate, 'rate')} steps/s."
        )
        self.console.print(rate, style="bold", highlight=False)

    def comparison(self, comparison: Comparison) -> None:
        """Print the changes from one report to another."""
        table = Table(title="What changed", title_justify="left")
        for name in ("Stage", "Figure", "Before", "After", "Change", "99 % interval", "Verdict"):
            table.add_column(name)
        styles = {"better": "green", "worse": "bold red", "same": "dim", "unsure": "dim"}
        for change in comparison.changes:
            unit = "" if change.name == "steps_per_second" else " ms"
            known = change.low is not None and change.high is not None
            table.add_row(
                change.stage,
                change.name.removesuffix("_ms"),
                f"{change.before:,.4g}{unit}",
                f"{change.after:,.4g}{unit}",
                f"{100 * change.change:+.1f} %",
                f"{100 * (change.low or 0):+.1f} to {100 * (change.high or 0):+.1f} %" if known else "too little data",
                Text(change.verdict, style=styles[change.verdict]),
            )
        self.console.print(table)
        for remark in comparison.remarks:
            self.console.print(Text(f"note: {remark}", style="yellow"))


def _describe_progress(result: StageResult) -> str:
    stage = result.stage
    # The second newest interval, because all generators have most likely sent it completely.
    interval = result.points[max(len(result.points) - 2, 0)]
    p50, p99 = interval.of("step").percentiles(50, 99)
    seconds = min(max(time.time() - result.start_time - stage.warmup, 0.0), stage.seconds)
    errors = sum(f.count for totals in (result.measured, result.around) for f in totals.errors.values())
    return (
        f"{seconds:.0f} of {stage.seconds:g} s, {show(interval.steps / stage.interval, 'rate')} steps/s, "
        f"p50 {show(p50, 'seconds')}, p99 {show(p99, 'seconds')}, {errors} errors"
    )


def _render_stage_table(stage: Mapping[str, Any]) -> Group:
    load = f"{stage['sessions']:,} sessions, {stage['seconds']:.1f} s"
    load += f", {show(stage['rate'], 'rate')} steps/s due ({stage['arrivals']})" if stage["rate"] else ", closed loop"
    table = Table(title=f"{stage['name']} ({load})", title_justify="left", box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for name in ("Call", "Count", "Mean", "p50", "p90", "p99", "p99.9", "Max"):
        table.add_column(name, justify="left" if name == "Call" else "right", no_wrap=True)
    for call, figures in stage["calls"].items():
        table.add_row(call, *_format_cells(figures))
        if "service" in figures and call == "step":
            table.add_row("  from sent", *_format_cells(figures["service"]), style="dim")
    lines = [f"{stage['steps_per_second']:,.1f} steps/s"]
    if stage["server_time"]:
        parts = ("latency", "environment", "overhead", "total")
        call, environment, overhead, total = (milliseconds(stage["server_time"][f"{part}_ms"]) for part in parts)
        lines.append(
            f"a call took {call} on average: {environment} in the environment, {overhead} around it ({total} in the"
            " server)"
        )
    shares = ", ".join(f"{100 * generator['loop_cpu_share']:.0f} %" for generator in stage["generators"])
    lines.append(describe_paths(stage))
    lines.append(f"generators' event loops were {shares} busy")
    return Group(table, Text("; ".join(lines)))


def _format_cells(figures: Mapping[str, Any]) -> Sequence[str]:
    names = ("mean_ms", "p50_ms", "p90_ms", "p99_ms", "p99.9_ms", "max_ms")
    return (f"{figures['count']:,}", *(milliseconds(figures[name]) for name in names))
