"""What a run found, as JSON values; see docs/load.md for each of them."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from typing import Any

from starpod.load.bootstrap import intervals_of
from starpod.load.conductor import StageResult
from starpod.load.histogram import Histogram
from starpod.load.log import Interval, ServerTime
from starpod.load.plan import Plan
from starpod.load.thresholds import CALLS, CLASSES, Requirement

FORMAT = "starpod-load"
FORMAT_VERSION = 1
PERCENTILES = ((50, "p50"), (90, "p90"), (95, "p95"), (99, "p99"), (99.9, "p99.9"), (99.99, "p99.99"))

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
            "columns": plan.columns,
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
    whole = Interval.empty(0)
    for interval in result.intervals:
        whole.add(interval)
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
    around = Interval.empty(-1)
    around.add(whole)
    around.add(result.around)
    report["calls"] = _calls(around)
    report["errors"] = _errors(around, whole)
    report["server_time"] = _server_time(result, whole)
    report["replicas"] = [
        _replica(number, place.address, around, whole, seconds) for number, place in enumerate(plan.places)
    ]
    report["generators"] = [_generator(summary) for summary in result.summaries]
    report["late_p99_ms"] = _ms(whole.late.percentile(99))
    report["intervals"] = [_interval(interval, stage.interval) for interval in result.intervals]
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
        **{f"{name}_ms": _ms(histogram.percentile(percent)) for percent, name in PERCENTILES},
        "max_ms": _ms(histogram.max),
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


def _calls(interval: Interval) -> dict[str, Any]:
    calls: dict[str, Any] = {}
    for call in CALLS:
        response = _gather(interval, call, False)
        if not len(response):
            continue
        calls[call] = figures(response)
        if len(service := _gather(interval, call, True)):
            calls[call]["service"] = figures(service)
    return calls


def _gather(interval: Interval, call: str, service: bool, link: int | None = None) -> Histogram:
    return Histogram.sum(
        histogram
        for (number, name, sent), histogram in interval.latencies.items()
        if name == call and sent is service and link in (None, number)
    )


def _errors(around: Interval, whole: Interval) -> dict[str, Any]:
    classes: dict[str, Any] = {}
    for (_, call, kind), failures in sorted(around.errors.items(), key=lambda item: CLASSES.index(item[0][2])):
        entry = classes.setdefault(kind, {"count": 0, "calls": {}, "example": failures.example})
        entry["count"] += failures.count
        entry["calls"][call] = entry["calls"].get(call, 0) + failures.count
    total = sum(entry["count"] for entry in classes.values())
    tried = whole.calls + total
    return {"total": total, "share": total / tried if tried else 0.0, "classes": classes}


def _server_time(result: StageResult, whole: Interval) -> dict[str, Any] | None:
    """Means over the calls of the measured time: in the server, in its environments, and on the way."""
    told = ServerTime()
    for summary in result.summaries:
        told.add(summary.server)
    if not told.calls:
        return None
    seen = Histogram.sum(
        histogram
        for (_, call, sent), histogram in whole.latencies.items()
        if sent is any(other[1] == call and other[2] for other in whole.latencies)
    )
    environment, total = told.environment / told.calls, told.total / told.calls
    return {
        "calls": told.calls,
        "environment_ms": _ms(environment),
        "queue_ms": _ms(told.queue / told.calls) if told.queue else None,
        "total_ms": _ms(total),
        "latency_ms": _ms(seen.mean),
        "overhead_ms": _ms(seen.mean - environment),
    }


def _replica(number: int, address: str, around: Interval, whole: Interval, seconds: float) -> dict[str, Any]:
    steps = _gather(whole, "step", False, number)
    done = whole.steps.get(number, 0)
    return {
        "address": address,
        "steps": done,
        "steps_per_second": done / seconds if seconds else 0.0,
        "p50_ms": _ms(steps.percentile(50)),
        "p99_ms": _ms(steps.percentile(99)),
        "errors": sum(failures.count for (link, _, _), failures in around.errors.items() if link == number),
    }


def _generator(summary: Any) -> dict[str, Any]:
    seconds = summary.seconds or 1.0
    return {
        "sessions": summary.sessions,
        "loop_cpu_share": summary.thread / seconds,
        "process_cpu_share": summary.process / seconds,
    }


def _interval(interval: Interval, seconds: float) -> dict[str, Any]:
    calls = {}
    for call in CALLS:
        histogram = _gather(interval, call, False)
        if len(histogram):
            kept = figures(histogram)
            calls[call] = {key: kept[key] for key in ("count", "p50_ms", "p95_ms", "p99_ms", "max_ms", "hdr")}
    return {
        "at_seconds": interval.place * seconds,
        "steps": sum(interval.steps.values()),
        "errors": sum(failures.count for failures in interval.errors.values()),
        "calls": calls,
    }


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
