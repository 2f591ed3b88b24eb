"""Requirements on a run (`step.p99<20ms`, `errors=0`), and the search for the highest rate that meets them."""

from __future__ import annotations

import math
import operator
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from starpod.load.plan import Stage
from starpod.report.figures import show
from starpod.serving.options import SECONDS, parse_duration
from starpod.v1.spelling import nearest

CALLS = ("step", "open", "reset", "render", "fork", "snapshot", "renew", "close")
LATENCIES = ("mean", "p50", "p90", "p95", "p99", "p99.9", "p99.99", "max")
CLASSES = (
    "bad_argument",
    "environment_bug",
    "overload",
    "lost_session",
    "deadline",
    "transport",
    "server_bug",
    "refused",
)
"""Classes of errors, explained in docs/load.md."""

_COMPARE = {
    "<=": operator.le,
    ">=": operator.ge,
    "==": operator.eq,
    "=": operator.eq,
    "<": operator.lt,
    ">": operator.gt,
}
_FORM = re.compile(r"\s*([a-z_][a-z0-9_.]*?)\s*(<=|>=|==|=|<|>)\s*(\S.*?)\s*", re.IGNORECASE)

_PLAIN = {
    "steps_per_second": "steps_per_second",
    "calls_per_second": "calls_per_second",
    "errors": "errors.total",
    **{f"errors.{name}": f"errors.classes.{name}.count" for name in CLASSES},
    "error_share": "errors.share",
    "unserved": "unserved",
}
_TIMES = {
    "server.environment": "server_time.environment_ms",
    "server.total": "server_time.total_ms",
    "server.queue": "server_time.queue_ms",
    "overhead": "server_time.overhead_ms",
}
_LATENCIES = {
    f"{call}.{'service.' * service}{figure}": (call, service, figure)
    for call in CALLS
    for service in (False, True)
    for figure in LATENCIES
}
KNOWN = (*_PLAIN, *_TIMES, *_LATENCIES)
"""Names that a requirement may begin with."""


@dataclass(frozen=True, slots=True)
class Threshold:
    """A condition on a metric of a stage, such as `step.p99<20ms`."""

    text: str
    """The requirement as the user wrote it."""
    name: str
    """One of KNOWN."""
    sign: str
    limit: float
    """Value to compare with, in seconds if it is a time."""

    @property
    def is_time(self) -> bool:
        return self.name not in _PLAIN

    def measured(self, stage: Mapping[str, Any]) -> float | None:
        """Return the metric's value in a stage's report, in the unit of `limit`, or None if the stage has none."""
        value: Any
        if self.name in _LATENCIES:
            call, service, figure = _LATENCIES[self.name]
            figures = stage["calls"].get(call, {})
            if service:  # a closed loop sends calls when they are due, so it has only one latency
                figures = figures.get("service", figures)
            value = figures.get(f"{figure}_ms")
        else:
            value = stage
            for key in (_TIMES.get(self.name) or _PLAIN[self.name]).split("."):
                value = value.get(key) if isinstance(value, Mapping) else None
            if value is None and self.name.startswith("errors."):
                value = 0
        if value is None:
            return None
        return value / 1e3 if self.is_time else float(value)

    def met(self, value: float | None) -> bool:
        """Return whether the measured value meets the requirement. A missing value does not."""
        return value is not None and not math.isnan(value) and bool(_COMPARE[self.sign](value, self.limit))

    def show(self, value: float | None) -> str:
        """Return the value as text with a readable unit."""
        if value is None or math.isnan(value):
            return "not measured"
        return f"{1e3 * value:.4g} ms" if self.is_time else f"{value:,.6g}"


def parse_requirement(text: str) -> Threshold:
    """Parse `NAME SIGN VALUE`. Raise ValueError that says what is wrong and how to fix it."""
    match = _FORM.fullmatch(text)
    if match is None:
        raise ValueError(f"{text!r} is not NAME SIGN VALUE, as in step.p99<20ms, errors=0 or steps_per_second>1000")
    name, sign, value = match[1].lower(), match[2], match[3]
    if name not in KNOWN:
        raise ValueError(f"nothing is called {name!r}{nearest(name, KNOWN)[:300]}")
    if name in _PLAIN:
        return Threshold(text, name, sign, _number(value))
    if value.replace(".", "", 1).isdigit() and float(value):
        raise ValueError(f"{text!r} lacks a unit: write {name}{sign}{value}ms (units: {', '.join(SECONDS)})")
    return Threshold(text, name, sign, parse_duration(value))


def _number(text: str) -> float:
    share = text.endswith("%")
    try:
        value = float(text.removesuffix("%").replace(",", "").replace("_", ""))
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise ValueError(f"{text!r} is not a number")
    return value / 100 if share else value


# --- the highest rate -------------------------------------------------------------------------------------------------

PRECISION = 0.05
"""The search ends when the lowest failed rate is at most 5 % above the highest rate that was held."""
SHORTFALL = 0.03
"""A server does not hold a rate if it answers 3 % fewer steps than are due."""
MOST_PROBES = 16
CONFIRMATIONS = 3
STEP_DOWN = 0.9
"""Factor by which the rate is multiplied after a failed confirmation."""
FIRST_SHARE = 0.5
"""First rate to try, as a share of the throughput of a closed loop with the same sessions."""

Play = Callable[[Stage], Mapping[str, Any] | None]
"""Runs a stage and returns its report, or None if the run has ended."""


@dataclass(frozen=True, slots=True)
class RateProbe:
    """One rate that was tried."""

    rate: float
    held: bool
    """Whether the server met all targets at this rate."""
    why: str
    """Why the rate was not held; empty if it was."""
    measured: dict[str, str]
    """Measured value of each target, as text."""
    confirming: bool


@dataclass(slots=True)
class SearchResult:
    """Outcome of a search for the highest rate."""

    rate: float | None
    """Highest rate that was held and confirmed; None if there is none."""
    probes: list[RateProbe]
    """All rates that were tried, in order."""
    stages: list[Mapping[str, Any]]


def find_rate(stage: Stage, targets: Sequence[Threshold], play: Play) -> SearchResult:
    """Search for the highest rate at which all targets hold, no call fails and the server keeps up.

    Args:
        stage: the load. The search begins at its rate; without one, at FIRST_SHARE of a closed loop's throughput.
    """
    result = SearchResult(None, [], [])

    def try_rate(rate: float, confirming: bool) -> bool | None:
        seconds = 2 * stage.seconds if confirming else stage.seconds
        kind = "confirmation" if confirming else "probe"
        name = f"{kind} {len(result.probes) + 1}: {show(rate, 'rate')} steps/s"
        report = play(replace(stage, name=name, rate=rate, seconds=seconds))
        if report is None:
            return None
        result.stages.append(report)
        failure = _explain_failure(report, rate, targets)
        values = {target.name: target.show(target.measured(report)) for target in targets}
        result.probes.append(RateProbe(rate, not failure, failure, values, confirming))
        return not failure

    rate = stage.rate
    if rate is None:
        report = play(replace(stage, name="closed loop", rate=None))
        if report is None or not report["steps_per_second"]:
            return result
        result.stages.append(report)
        rate = FIRST_SHARE * report["steps_per_second"]
    low, high = 0.0, float("inf")
    while len(result.probes) < MOST_PROBES and (low == 0 or high / low > 1 + PRECISION):
        is_held = try_rate(rate, False)
        if is_held is None:
            return result
        low, high = (max(low, rate), high) if is_held else (low, min(high, rate))
        rate = _next_rate(low, high)
    for _ in range(CONFIRMATIONS):
        if not low:
            return result
        is_held = try_rate(low, True)
        if is_held is None:
            return result
        if is_held:
            result.rate = low
            return result
        low *= STEP_DOWN
    return result


def _next_rate(low: float, high: float) -> float:
    if high == float("inf"):
        return 1.5 * low
    return high / 2 if low == 0 else (low * high) ** 0.5


def _explain_failure(report: Mapping[str, Any], rate: float, targets: Sequence[Threshold]) -> str:
    """Return why the stage does not count as held, or an empty text if it does."""
    for target in targets:
        value = target.measured(report)
        if not target.met(value):
            return f"{target.name} is {target.show(value)}"
    if report["errors"]["total"]:
        return f"{report['errors']['total']} errors ({', '.join(report['errors']['classes'])})"
    if report["unserved"]:
        return f"{report['unserved']} steps were never sent"
    expected_steps = rate * report["seconds"]
    # The number of Poisson arrivals varies: up to three standard deviations fewer than expected is not a failure.
    if report["steps"] < min((1 - SHORTFALL) * expected_steps, expected_steps - 3 * expected_steps**0.5):
        return f"only {show(report['steps_per_second'], 'rate')} steps/s were answered"
    if report["ended"]:
        return str(report["ended"])
    return ""
