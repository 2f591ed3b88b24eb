"""Numbers in readable form, for screens and reports."""

from __future__ import annotations

import math
from typing import Literal

Kind = Literal["share", "number", "count", "seconds", "milliseconds", "rate"]


def show(value: float | None, kind: Kind = "number") -> str:
    """Format a number in at most seven characters."""
    if value is None or not math.isfinite(value):
        return "-"
    match kind:
        case "share":
            return f"{100 * value:.0f} %" if value in (0, 1) or abs(value) >= 0.1 else f"{100 * value:.1f} %"
        case "count":
            return f"{value:,.0f}" if value == int(value) or abs(value) >= 100 else f"{value:.1f}"
        case "rate":
            return f"{value:,.0f}" if abs(value) >= 10 else f"{value:.2g}"
        case "milliseconds":
            return show(value / 1000, "seconds")
        case "seconds":
            if value < 1:
                return f"{1000 * value:.3g} ms"
            return f"{value:.1f} s" if value < 90 else duration(value)
    if value == 0:
        return "0"
    if abs(value) < 1e-3 or abs(value) >= 1e5:
        return f"{value:.1e}".replace("e-0", "e-").replace("e+0", "e")
    return f"{value:.3g}" if abs(value) < 1000 else f"{value:,.0f}"


def milliseconds(value: float | None) -> str:
    """Format a time in milliseconds with a readable unit."""
    return show(value, "milliseconds")


def signed(value: float) -> str:
    """Format a number with its sign, as in +0.5, -0.1 and 0."""
    return f"{value:+.3g}" if value else "0"


def duration(seconds: float) -> str:
    """Format a duration, as in 0:07, 4:05 and 1:02:09."""
    total = int(seconds)
    hours, rest = divmod(total, 3600)
    minutes, remainder = divmod(rest, 60)
    return f"{hours}:{minutes:02}:{remainder:02}" if hours else f"{minutes}:{remainder:02}"
