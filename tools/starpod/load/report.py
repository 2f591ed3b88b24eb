"""The report of a run as JSON values, confidence intervals of its metrics, and the comparison of two reports."""

from __future__ import annotations

import math
import time
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from starpod.load.measurements import (
    ErrorKey,
    Failures,
    Histogram,
    Point,
    ServerTime,
    StageResult,
    Summary,
    Totals,
    bucket_ceilings,
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
    """Return the report of a run, without the entries `requirements` and `search`."""
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
    """Return how a stage's steps travelled, such as "steps travelled in unary calls, 4.1 for each reset".

    The number of steps per reset matters because a reset never travels in columns.
    """
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
            f" use more than --processes {plan.processes}, or more machines"
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


# --- uncertainty: a bootstrap that resamples the intervals of a stage -------------------------------------------------

MIN_CHANGE = 0.02
"""Smaller relative changes are reported as `same`, even if they are statistically certain."""
DRAWS = 1000
FEWEST = 8
"""A stage with fewer intervals has no confidence intervals."""
CONFIDENCE = 0.99
"""Level of the confidence intervals. At 95 %, one of 20 unchanged metrics would seem to have changed."""
PERCENTS = ((50.0, "p50_ms"), (90.0, "p90_ms"), (99.0, "p99_ms"), (99.9, "p99.9_ms"))
MIN_LATENCIES = {"p50_ms": 20, "p90_ms": 50, "p99_ms": 500, "p99.9_ms": 5000}
"""Number of latencies below which a percentile depends on single calls and has no confidence interval."""

Array = np.ndarray[Any, np.dtype[np.float64]]


def draws_of(stage: Mapping[str, Any], seed: int = 0) -> dict[str, Array]:
    """Return DRAWS bootstrap values of each metric, by name (`steps_per_second`, `step.p99_ms`).

    The result is empty if the stage has fewer than FEWEST intervals.
    """
    intervals = stage["intervals"]
    count = len(intervals)
    if count < FEWEST:
        return {}
    weights = np.random.default_rng(seed).multinomial(count, np.full(count, 1 / count), DRAWS).astype(np.float64)
    lengths = np.full(count, stage["interval_seconds"])
    lengths[-1] = max(stage["seconds"] - lengths[:-1].sum(), 1e-3)
    steps = np.array([interval["steps"] for interval in intervals], np.float64)
    draws: dict[str, Array] = {"steps_per_second": (weights @ steps) / (weights @ lengths)}
    for call in {call for interval in intervals for call in interval["calls"]}:
        histograms = [
            Histogram.decode(interval["calls"][call]["hdr"]) if call in interval["calls"] else Histogram()
            for interval in intervals
        ]
        total = sum(len(histogram) for histogram in histograms)
        percents = [(percent, name) for percent, name in PERCENTS if total >= MIN_LATENCIES[name]]
        if percents:
            rows = _percentiles_of_draws(histograms, weights, [percent for percent, _ in percents])
            draws.update({f"{call}.{name}": column for (_, name), column in zip(percents, rows, strict=True)})
    return draws


def intervals_of(stage: Mapping[str, Any]) -> dict[str, list[float]]:
    """Return the confidence interval [low, high] of each metric, by name."""
    return {
        name: _confidence_interval(values[np.isfinite(values)])
        for name, values in sorted(draws_of(stage).items())
        if np.isfinite(values).any()
    }


def _percentiles_of_draws(histograms: Sequence[Histogram], weights: Array, percents: Sequence[float]) -> list[Array]:
    """Return one array per percentile with the milliseconds in each draw; NaN in a draw without latencies."""
    counts = np.array([histogram.counts for histogram in histograms], np.float64)
    mask = counts.any(axis=0)
    counts, ceilings = counts[:, mask], bucket_ceilings()[mask] / 1e6
    sums = np.cumsum(weights @ counts, axis=1)
    totals = sums[:, -1]
    columns = []
    for percent in percents:
        ranks = np.maximum(np.floor(percent / 100 * totals + 0.5), 1)
        places = np.minimum((sums < ranks[:, None]).sum(axis=1), len(ceilings) - 1)
        columns.append(np.where(totals > 0, ceilings[places], np.nan))
    return columns


# --- two reports ------------------------------------------------------------------------------------------------------

_SETTINGS = ("environment", "environment_version", "options", "transport", "policy", "mix", "think", "processes")


@dataclass(frozen=True, slots=True)
class Change:
    """The change of one metric of one stage from one report to another."""

    stage: str
    name: str
    before: float
    after: float
    low: float | None
    """Lower end of the confidence interval of `change`; None if unknown."""
    high: float | None
    verdict: str
    """better, worse, same or unsure"""

    @property
    def change(self) -> float:
        """Relative change, such as 0.1 for 10 % more."""
        return self.after / self.before - 1 if self.before else float("inf" if self.after else 0)


@dataclass(frozen=True, slots=True)
class Comparison:
    """The comparison of two reports."""

    changes: list[Change]
    remarks: list[str]
    """Differences between the two runs that are not the server's, such as different settings."""

    def as_json(self) -> dict[str, Any]:
        changes = [{**asdict(change), "change": change.change} for change in self.changes]
        return {"format": "starpod-load-comparison", "changes": changes, "remarks": self.remarks}


def compare_loads(before: Mapping[str, Any], after: Mapping[str, Any]) -> Comparison:
    """Compare the stages that have the same name in both reports. Raise ValueError if there are none."""
    stages = {stage["name"]: stage for stage in after["stages"]}
    pairs = [(stage, stages[stage["name"]]) for stage in before["stages"] if stage["name"] in stages]
    if not pairs:
        names = [", ".join(stage["name"] for stage in report["stages"]) for report in (before, after)]
        raise ValueError(f"the reports have no stage in common: {names[0]} and {names[1]}; run both with the same load")
    remarks = [
        f"{key.replace('_', ' ')}: {before['plan'].get(key)} and {after['plan'].get(key)}"
        for key in _SETTINGS
        if before["plan"].get(key) != after["plan"].get(key)
    ]
    changes = []
    for first, second in pairs:
        for report, label in ((first, "first"), (second, "second")):
            remarks += [f"{first['name']}, {label}: {warning}" for warning in report["warnings"]]
        changes += _compare_stages(first, second)
    return Comparison(changes, remarks)


def _compare_stages(first: Mapping[str, Any], second: Mapping[str, Any]) -> list[Change]:
    # Different seeds, or the noise of the two reports would be correlated.
    draws = draws_of(first, 1), draws_of(second, 2)
    changes = []
    for name, before, after in _pair_figures(first, second):
        low = high = None
        verdict = "unsure"
        if name in draws[0] and name in draws[1]:
            with np.errstate(divide="ignore", invalid="ignore"):
                ratios = draws[1][name] / draws[0][name] - 1
            ratios = ratios[np.isfinite(ratios)]
            if len(ratios):
                low, high = _confidence_interval(ratios)
                verdict = _judge_change(name, after / before - 1 if before else 0.0, low, high)
        changes.append(Change(first["name"], name, before, after, low, high, verdict))
    return changes


def _judge_change(name: str, change: float, low: float, high: float) -> str:
    if low <= 0 <= high or abs(change) < MIN_CHANGE:
        return "same"
    return "better" if (change > 0) == (name == "steps_per_second") else "worse"


def _confidence_interval(values: Array) -> list[float]:
    tail = 50 * (1 - CONFIDENCE)
    return [float(edge) for edge in np.percentile(values, [tail, 100 - tail])]


def _pair_figures(first: Mapping[str, Any], second: Mapping[str, Any]) -> list[tuple[str, float, float]]:
    """Return (name, before, after) of each metric that both stages have."""
    triples = [("steps_per_second", float(first["steps_per_second"]), float(second["steps_per_second"]))]
    for call, figures in first["calls"].items():
        second_figures = second["calls"].get(call, {})
        for _, name in PERCENTS:
            if figures.get(name) is not None and second_figures.get(name) is not None:
                triples.append((f"{call}.{name}", figures[name], second_figures[name]))
    return triples
