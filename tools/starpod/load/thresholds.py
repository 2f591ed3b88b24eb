"""What must hold for a run to pass: `step.p99<20ms`, `errors=0`, `steps_per_second>1000`."""

from __future__ import annotations

import math
import operator
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from starpod.client.spelling import nearest
from starpod.load.schedule import UNITS, parse_duration

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
"""Classes of errors; see docs/load.md."""

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
"""All names that a requirement may begin with."""


@dataclass(frozen=True, slots=True)
class Requirement:
    """text: as it was written. name: one of KNOWN. limit: in seconds where it is a time."""

    text: str
    name: str
    sign: str
    limit: float

    @property
    def is_time(self) -> bool:
        return self.name not in _PLAIN

    def measured(self, stage: Mapping[str, Any]) -> float | None:
        """The figure in a stage of a report, in the unit of `limit`; None where the stage has none."""
        value: Any
        if self.name in _LATENCIES:
            call, service, figure = _LATENCIES[self.name]
            figures = stage["calls"].get(call, {})
            if service:  # a closed loop sends when it means to: there is but one latency
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
        """Whether such a figure will do; one that is missing does not."""
        return value is not None and not math.isnan(value) and bool(_COMPARE[self.sign](value, self.limit))

    def show(self, value: float | None) -> str:
        """The figure in a readable unit."""
        if value is None or math.isnan(value):
            return "not measured"
        return f"{1e3 * value:.4g} ms" if self.is_time else f"{value:,.6g}"


def parse_requirement(text: str) -> Requirement:
    """Reads `NAME SIGN VALUE`. Raises ValueError that says what is wrong and how to mend it."""
    match = _FORM.fullmatch(text)
    if match is None:
        raise ValueError(f"{text!r} is not NAME SIGN VALUE, as in step.p99<20ms, errors=0 or steps_per_second>1000")
    name, sign, value = match[1].lower(), match[2], match[3]
    if name not in KNOWN:
        raise ValueError(f"nothing is called {name!r}{nearest(name, KNOWN)[:300]}")
    if name in _PLAIN:
        return Requirement(text, name, sign, _number(value))
    if value.replace(".", "", 1).isdigit() and float(value):
        raise ValueError(f"{text!r} lacks a unit: write {name}{sign}{value}ms (units: {', '.join(UNITS)})")
    return Requirement(text, name, sign, parse_duration(value))


def _number(text: str) -> float:
    share = text.endswith("%")
    try:
        value = float(text.removesuffix("%").replace(",", "").replace("_", ""))
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise ValueError(f"{text!r} is not a number")
    return value / 100 if share else value
