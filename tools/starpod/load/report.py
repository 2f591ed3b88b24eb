"""The report of a run as JSON values."""

from __future__ import annotations

import math
import time
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

from starpod.load.comparison import intervals_of
from starpod.load.measurements import (
    ErrorKey,
    Failures,
    Histogram,
    Point,
    ServerTime,
    StageResult,
    Summary,
    Totals,
)
from starpod.load.plan import PATHS, LoadPlan, Think
from starpod.load.requirements import CALLS, CLASSES, Threshold

FORMAT = "starpod-load"
FORMAT_VERSION = 1
PERCENTILES = {"p50": 50.0, "p90": 90.0, "p95": 95.0, "p99": 99.0, "p99.9": 99.9, "p99.99": 99.99}
IN_CURVES = ("p50_ms", "p95_ms", "p99_ms", "max_ms")

BUSY = 0.85
"""A generator that uses more than this share of a core is itself the bottleneck."""
PLANNED_SHARE = 2 / 3
"""Share of the steps per second that a server sustained for which it is planned."""
LATE_MS = 5.0
"""Milliseconds that timers may be late. Later ones make latencies look longer than they are."""


def document(
    plan: LoadPlan,
    server: Mapping[str, Any],
    stages: Sequence[Mapping[str, Any]],
    *,
    command: str,
    start_time: float,
) -> dict[str, Any]:
    """Return the report of a run, without the entries `requirements` and `search`.

    Args:
        server: the report's entry `server`.
        start_time: start of the run, in seconds since the epoch.
    """
    return {
        "format": FORMAT,
        "version": FORMAT_VERSION,
        "command": command,
        "started": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(start_time)),
        "server": dict(server),
        "plan": {
            "environment": plan.environment_id,
            "environment_version": plan.version,
            "options": dict(plan.options or {}),
            "transport": plan.wire,
            "policy": plan.turns.kind,
            "mix": dict(plan.mix),
            "think": plan.think.text,
            "episodes_per_session": plan.episodes_per_session,
            "timeout_seconds": plan.timeout,
            "on_overload": "retry" if plan.retry_overload else "count",
            "processes": plan.processes,
            "seed": plan.seed,
        },
        "stages": list(stages),
        "warnings": [f"{stage['name']}: {text}" for stage in stages for text in stage["warnings"]],
    }


def stage_report(result: StageResult, plan: LoadPlan) -> dict[str, Any]:
    """Return the report of one stage."""
    stage = result.stage
    total = result.measured
    seconds = min((summary.seconds for summary in result.summaries), default=0.0)
    report: dict[str, Any] = {
        "name": stage.name,
        "loop": "closed" if stage.rate is None else "open",
        "arrivals": None if stage.rate is None else stage.arrivals,
        "rate": stage.rate,
        "sessions": sum(summary.sessions for summary in result.summaries),
        "sessions_asked": stage.sessions,
        "warmup_seconds": stage.warmup,
        "seconds": seconds,
        "interval_seconds": stage.interval,
        "steps": total.steps.total(),
        "steps_per_second": total.steps.total() / seconds if seconds else 0.0,
        "calls_per_second": total.calls / seconds if seconds else 0.0,
        "unserved": sum(summary.unserved for summary in result.summaries),
        "unanswered": sum(summary.unanswered for summary in result.summaries),
    }
    errors: defaultdict[ErrorKey, Failures] = defaultdict(Failures)  # errors outside the measured time count too
    for totals in (total, result.around):
        for key, failures in totals.errors.items():
            errors[key].add(failures.count, failures.example)
    paths = sum((summary.paths for summary in result.summaries), Counter[str]())
    report["paths"] = {path: paths[path] / paths.total() for path in PATHS if paths[path]}
    report["calls"] = _report_calls(result)
    report["errors"] = _count_errors(errors, total.calls)
    report["server_time"] = _report_server_time(result)
    report["replicas"] = [
        _report_replica(number, place.address, errors, total, seconds) for number, place in enumerate(plan.places)
    ]
    report["generators"] = [_report_generator(summary) for summary in result.summaries]
    report["late_p99_ms"] = _to_ms(*total.late.percentiles(99))
    report["intervals"] = [
        _report_interval(number * stage.interval, point) for number, point in enumerate(result.points)
    ]
    report["uncertainty"] = intervals_of(report)
    report["ended"] = result.ended
    report["interrupted"] = result.interrupted
    report["warnings"] = _collect_warnings(report, plan)
    return report


def describe_paths(stage: Mapping[str, Any]) -> str:
    """Return how a stage's steps travelled, such as "steps travelled in unary calls, 4.1 for each reset"."""
    paths = [f"{PATHS[path]} ({share:.0%})" if share < 1 else PATHS[path] for path, share in stage["paths"].items()]
    if not paths:
        return "no step was answered"
    steps, resets = (stage["calls"].get(call, {}).get("count", 0) for call in ("step", "reset"))
    per_reset = f", {steps / resets:,.1f} for each reset" if resets else ""
    return f"steps travelled {' and '.join(paths)}{per_reset}"


def judge(requirements: Sequence[Threshold], stages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return the verdict on each requirement in each stage."""
    return [
        {
            "requirement": requirement.text,
            "stage": stage["name"],
            "measured": requirement.show(value := requirement.measured(stage)),
            "met": requirement.met(value),
        }
        for stage in stages
        for requirement in requirements
    ]


def describe_servers(report: Mapping[str, Any]) -> str:
    """Return how many servers sessions need, by the highest throughput of a run; "" if it measured none.

    Stages with pauses or at a fixed rate say nothing about what the servers can do, unless the rate was searched.
    """
    search = report.get("search")
    is_closed = report["plan"]["think"] == Think("0").text
    rates = [stage["steps_per_second"] for stage in report["stages"] if stage["loop"] == "closed" and is_closed]
    sustained = max([search["rate"] or 0.0] if search else rates, default=0.0) / len(report["server"]["replicas"])
    planned = PLANNED_SHARE * sustained
    if not planned:
        return ""
    sizes = ", ".join(
        f"{math.ceil(sessions / planned - 1e-9) + 1:,} for {sessions:,}" for sessions in (1_000, 5_000, 20_000)
    )
    number = f"{planned:,.0f}" if planned >= 100 else f"{planned:.3g}"
    return (
        f"servers for sessions at one turn a second: {sizes} (N sessions at R turns a second: N x R / {number}, "
        f"rounded up, and one spare; {number} steps/s is two thirds of what a server sustained here)"
    )


# --- parts ---------------------------------------------------------------------------------------------------------


def figures(histogram: Histogram) -> dict[str, Any]:
    return {
        "count": len(histogram),
        "mean_ms": _to_ms(histogram.mean),
        **_report_percentiles(histogram),
        "hdr": histogram.encode(),
    }


def _report_percentiles(histogram: Histogram) -> dict[str, float | None]:
    levels = {**{f"{name}_ms": level for name, level in PERCENTILES.items()}, "max_ms": 100.0}
    return {name: _to_ms(value) for name, value in zip(levels, histogram.percentiles(*levels.values()), strict=True)}


def _report_calls(result: StageResult) -> dict[str, Any]:
    calls: dict[str, Any] = {}
    for call in CALLS:
        response, service = (
            Histogram.sum([result.measured.of(call, sent=sent), result.around.of(call, sent=sent)])
            for sent in (False, True)
        )
        if not len(response):
            continue
        calls[call] = figures(response)
        if len(service):
            calls[call]["service"] = figures(service)
    return calls


def _count_errors(errors: Mapping[ErrorKey, Failures], calls: int) -> dict[str, Any]:
    classes: dict[str, Any] = {}
    for (_, call, kind), failures in sorted(errors.items(), key=lambda item: CLASSES.index(item[0][2])):
        entry = classes.setdefault(kind, {"count": 0, "calls": {}, "example": failures.example})
        entry["count"] += failures.count
        entry["calls"][call] = entry["calls"].get(call, 0) + failures.count
    total = sum(entry["count"] for entry in classes.values())
    return {"total": total, "share": total / (calls + total) if total else 0.0, "classes": classes}


def _report_server_time(result: StageResult) -> dict[str, Any] | None:
    """Return mean times of the measured calls: in environments, in the server, and as seen by the client."""
    times = ServerTime()
    for summary in result.summaries:
        times.add(summary.server)
    if not times.calls:
        return None
    latencies = result.measured.latencies
    latency = Histogram.sum(
        histogram for (call, sent), histogram in latencies.items() if sent is ((call, True) in latencies)
    )
    environment, total = times.environment / times.calls, times.total / times.calls
    return {
        "calls": times.calls,
        "environment_ms": _to_ms(environment),
        "queue_ms": _to_ms(times.queue / times.calls) if times.queue else None,
        "total_ms": _to_ms(total),
        "latency_ms": _to_ms(latency.mean),
        "overhead_ms": _to_ms(latency.mean - environment),
    }


def _report_replica(
    number: int, address: str, errors: Mapping[ErrorKey, Failures], whole: Totals, seconds: float
) -> dict[str, Any]:
    step_count = whole.steps.get(number, 0)
    p50, p99 = whole.replicas.get(number, Histogram()).percentiles(50, 99)
    return {
        "address": address,
        "steps": step_count,
        "steps_per_second": step_count / seconds if seconds else 0.0,
        "p50_ms": _to_ms(p50),
        "p99_ms": _to_ms(p99),
        "errors": sum(failures.count for (server, _, _), failures in errors.items() if server == number),
    }


def _report_generator(summary: Summary) -> dict[str, Any]:
    seconds = summary.seconds or 1.0
    return {
        "sessions": summary.sessions,
        "loop_cpu_share": summary.thread / seconds,
        "process_cpu_share": summary.process / seconds,
    }


def _report_interval(at: float, point: Point) -> dict[str, Any]:
    calls = {}
    for call in CALLS:
        if call in point.latencies:
            histogram = point.of(call)
            percentiles = {name: value for name, value in _report_percentiles(histogram).items() if name in IN_CURVES}
            calls[call] = {"count": len(histogram), **percentiles, "hdr": point.latencies[call]}
    return {"at_seconds": at, "steps": point.steps, "errors": point.errors, "calls": calls}


def _collect_warnings(report: Mapping[str, Any], plan: LoadPlan) -> list[str]:
    warnings = []
    if report["ended"]:
        warnings.append(f"ended early: {report['ended']}")
    if report["interrupted"]:
        warnings.append("interrupted: the figures cover the time until then")
    if report["sessions"] < report["sessions_asked"] and not report["ended"]:
        warnings.append(f"only {report['sessions']} of {report['sessions_asked']} sessions could be opened")
    max_share = max((generator["loop_cpu_share"] for generator in report["generators"]), default=0.0)
    if max_share > BUSY:
        warnings.append(
            f"a generator's event loop was {100 * max_share:.0f} % busy: the generator, not the server, is the limit;"
            f" use more than --workers {plan.processes}, or more machines"
        )
    elif (report["late_p99_ms"] or 0.0) > LATE_MS:
        warnings.append(
            f"timers fired up to {report['late_p99_ms']:.3g} ms late (p99): the generator had to wait for a core, "
            "and its latencies are too long by about as much; give it its own machine"
        )
    if report["unserved"]:
        warnings.append(
            f"{report['unserved']} steps were due and never sent: all sessions were busy; the rate is higher than "
            "the server sustains, or more --sessions are needed"
        )
    if report["unanswered"]:
        warnings.append(f"{report['unanswered']} calls had no reply by the end, and latencies do not include them")
    return warnings


def _to_ms(seconds: float) -> float | None:
    return round(1e3 * seconds, 6) if math.isfinite(seconds) else None
