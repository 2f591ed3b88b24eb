"""The report of a run as JSON values; docs/load.md explains each field."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from typing import Any

from starpod.load.comparison import intervals_of
from starpod.load.measurements import ErrorKey, Failures, Histogram, Point, ServerTime, StageResult, Summary, Totals
from starpod.load.plan import Plan
from starpod.load.requirements import CALLS, CLASSES, Requirement

FORMAT = "starpod-load"
FORMAT_VERSION = 1
PERCENTILES = {"p50": 50.0, "p90": 90.0, "p95": 95.0, "p99": 99.0, "p99.9": 99.9, "p99.99": 99.99}
IN_CURVES = ("p50_ms", "p95_ms", "p99_ms", "max_ms")

BUSY = 0.85
"""Above this share of a core, an event loop has little left to wait with."""
LATE_MS = 5.0
"""Timers that fire later than this make latencies look longer than they are."""


def document(
    plan: Plan,
    server: Mapping[str, Any],
    stages: Sequence[Mapping[str, Any]],
    *,
    command: str,
    started: float,
) -> dict[str, Any]:
    """The whole report, without requirements and search."""
    return {
        "format": FORMAT,
        "version": FORMAT_VERSION,
        "command": command,
        "started": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(started)),
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


def stage_report(result: StageResult, plan: Plan) -> dict[str, Any]:
    """One stage."""
    stage = result.stage
    whole = result.measured
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
        "steps": sum(whole.steps.values()),
        "steps_per_second": sum(whole.steps.values()) / seconds if seconds else 0.0,
        "calls_per_second": whole.calls / seconds if seconds else 0.0,
        "unserved": sum(summary.unserved for summary in result.summaries),
        "unanswered": sum(summary.unanswered for summary in result.summaries),
    }
    errors = _errors(result)
    report["calls"] = _calls(result)
    report["errors"] = _count_errors(errors, whole.calls)
    report["server_time"] = _server_time(result)
    report["replicas"] = [
        _replica(number, place.address, errors, whole, seconds) for number, place in enumerate(plan.places)
    ]
    report["generators"] = [_generator(summary) for summary in result.summaries]
    report["late_p99_ms"] = _ms(*whole.late.percentiles(99))
    report["intervals"] = [_point(number * stage.interval, point) for number, point in enumerate(result.points)]
    report["uncertainty"] = intervals_of(report)
    report["ended"] = result.ended
    report["interrupted"] = result.interrupted
    report["warnings"] = _warnings(report, plan)
    return report


def figures(histogram: Histogram) -> dict[str, Any]:
    """Count, mean, percentiles and maximum of a histogram, and the histogram itself."""
    return {
        "count": len(histogram),
        "mean_ms": _ms(histogram.mean),
        **_percentiles(histogram),
        "hdr": histogram.encode(),
    }


def judge(requirements: Sequence[Requirement], stages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Each requirement against each stage."""
    verdicts = []
    for stage in stages:
        for requirement in requirements:
            value = requirement.measured(stage)
            verdicts.append(
                {
                    "requirement": requirement.text,
                    "stage": stage["name"],
                    "measured": requirement.show(value),
                    "met": requirement.met(value),
                }
            )
    return verdicts


# --- parts ---------------------------------------------------------------------------------------------------------


def _percentiles(histogram: Histogram) -> dict[str, float | None]:
    levels = {**{f"{name}_ms": level for name, level in PERCENTILES.items()}, "max_ms": 100.0}
    return {name: _ms(value) for name, value in zip(levels, histogram.percentiles(*levels.values()), strict=True)}


def _calls(result: StageResult) -> dict[str, Any]:
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


def _errors(result: StageResult) -> dict[ErrorKey, Failures]:
    """Errors count whenever they happen."""
    errors = dict(result.measured.errors)
    for key, failures in result.around.errors.items():
        known = errors.get(key, Failures())
        errors[key] = Failures(known.count + failures.count, known.example or failures.example)
    return errors


def _count_errors(errors: Mapping[ErrorKey, Failures], calls: int) -> dict[str, Any]:
    classes: dict[str, Any] = {}
    for (_, call, kind), failures in sorted(errors.items(), key=lambda item: CLASSES.index(item[0][2])):
        entry = classes.setdefault(kind, {"count": 0, "calls": {}, "example": failures.example})
        entry["count"] += failures.count
        entry["calls"][call] = entry["calls"].get(call, 0) + failures.count
    total = sum(entry["count"] for entry in classes.values())
    return {"total": total, "share": total / (calls + total) if total else 0.0, "classes": classes}


def _server_time(result: StageResult) -> dict[str, Any] | None:
    """Means over the calls of the measured time: in the server, in its environments, and on the way."""
    times = ServerTime()
    for summary in result.summaries:
        times.add(summary.server)
    if not times.calls:
        return None
    latencies = result.measured.latencies
    seen = Histogram.sum(
        histogram for (call, sent), histogram in latencies.items() if sent is ((call, True) in latencies)
    )
    environment, total = times.environment / times.calls, times.total / times.calls
    return {
        "calls": times.calls,
        "environment_ms": _ms(environment),
        "queue_ms": _ms(times.queue / times.calls) if times.queue else None,
        "total_ms": _ms(total),
        "latency_ms": _ms(seen.mean),
        "overhead_ms": _ms(seen.mean - environment),
    }


def _replica(
    number: int, address: str, errors: Mapping[ErrorKey, Failures], whole: Totals, seconds: float
) -> dict[str, Any]:
    done = whole.steps.get(number, 0)
    p50, p99 = whole.replicas.get(number, Histogram()).percentiles(50, 99)
    return {
        "address": address,
        "steps": done,
        "steps_per_second": done / seconds if seconds else 0.0,
        "p50_ms": _ms(p50),
        "p99_ms": _ms(p99),
        "errors": sum(failures.count for (server, _, _), failures in errors.items() if server == number),
    }


def _generator(summary: Summary) -> dict[str, Any]:
    seconds = summary.seconds or 1.0
    return {
        "sessions": summary.sessions,
        "loop_cpu_share": summary.thread / seconds,
        "process_cpu_share": summary.process / seconds,
    }


def _point(at: float, point: Point) -> dict[str, Any]:
    calls = {}
    for call in CALLS:
        if call in point.latencies:
            histogram = point.of(call)
            kept = {name: value for name, value in _percentiles(histogram).items() if name in IN_CURVES}
            calls[call] = {"count": len(histogram), **kept, "hdr": point.latencies[call]}
    return {"at_seconds": at, "steps": point.steps, "errors": point.errors, "calls": calls}


def _warnings(report: Mapping[str, Any], plan: Plan) -> list[str]:
    warnings = []
    if report["ended"]:
        warnings.append(f"ended early: {report['ended']}")
    if report["interrupted"]:
        warnings.append("interrupted: the figures are of the time until then")
    if report["sessions"] < report["sessions_asked"] and not report["ended"]:
        warnings.append(f"only {report['sessions']} of {report['sessions_asked']} sessions could be opened")
    busiest = max((generator["loop_cpu_share"] for generator in report["generators"]), default=0.0)
    if busiest > BUSY:
        warnings.append(
            f"a generator's event loop was {100 * busiest:.0f} % busy: the generator, not the server, is the limit;"
            f" use more than --processes {plan.processes}, or more machines"
        )
    elif (report["late_p99_ms"] or 0.0) > LATE_MS:
        warnings.append(
            f"timers fired up to {report['late_p99_ms']:.3g} ms late (p99): the generator had to wait for a core, and"
            " its latencies are too long by about as much; give it a machine of its own"
        )
    if report["unserved"]:
        warnings.append(
            f"{report['unserved']} steps were due and never sent: all sessions were busy; the rate is more than the"
            " server holds, or more --sessions are needed"
        )
    if report["unanswered"]:
        warnings.append(f"{report['unanswered']} calls had no reply by the end and are in no latency")
    return warnings


def _ms(seconds: float) -> float | None:
    return round(1e3 * seconds, 6) if math.isfinite(seconds) else None
