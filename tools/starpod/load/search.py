"""The highest rate that keeps a target: bisection over real runs, and a longer run to confirm what it found."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from starpod.load.plan import Stage
from starpod.load.thresholds import Requirement
from starpod.report.figures import show

PRECISION = 0.05
"""The search ends when what holds and what does not are so close."""
SHORTFALL = 0.03
"""A server that answers so much less than it is asked does not hold the rate."""
MOST_PROBES = 16
CONFIRMATIONS = 3
STEP_DOWN = 0.9
"""After a failed confirmation."""
FIRST_SHARE = 0.5
"""The first rate, of what a closed loop of the same sessions reaches."""

Play = Callable[[Stage], Mapping[str, Any] | None]
"""Runs a stage and reports it; None: the run is over."""


@dataclass(frozen=True, slots=True)
class Probe:
    """One rate that was tried. held: it kept the target; why: where it did not. measured: the target's figures."""

    rate: float
    held: bool
    why: str
    measured: dict[str, str]
    confirming: bool

    def as_json(self) -> dict[str, Any]:
        return {
            "rate": self.rate,
            "held": self.held,
            "why": self.why,
            "measured": self.measured,
            "confirming": self.confirming,
        }


@dataclass(slots=True)
class Found:
    """rate: the highest that held and was confirmed; None where none did. probes: in the order in which they ran."""

    rate: float | None
    probes: list[Probe]
    stages: list[Mapping[str, Any]]


def find_rate(stage: Stage, targets: Sequence[Requirement], play: Play) -> Found:
    """Searches for the highest rate at which all targets hold, nothing fails and the server keeps up.

    stage: its rate is where the search begins; without one a closed loop tells where that is.
    """
    found = Found(None, [], [])

    def try_rate(rate: float, confirming: bool) -> bool | None:
        seconds = 2 * stage.seconds if confirming else stage.seconds
        kind = "confirmation" if confirming else "probe"
        name = f"{kind} {len(found.probes) + 1}: {show(rate, 'rate')} steps/s"
        report = play(replace(stage, name=name, rate=rate, seconds=seconds))
        if report is None:
            return None
        found.stages.append(report)
        why = _why_not(report, rate, targets)
        measured = {target.name: target.show(target.measured(report)) for target in targets}
        found.probes.append(Probe(rate, not why, why, measured, confirming))
        return not why

    rate = stage.rate
    if rate is None:
        report = play(replace(stage, name="closed loop", rate=None))
        if report is None or not report["steps_per_second"]:
            return found
        found.stages.append(report)
        rate = FIRST_SHARE * report["steps_per_second"]
    low, high = 0.0, float("inf")
    while len(found.probes) < MOST_PROBES and (low == 0 or high / low > 1 + PRECISION):
        held = try_rate(rate, False)
        if held is None:
            return found
        low, high = (max(low, rate), high) if held else (low, min(high, rate))
        rate = _next_rate(low, high)
    for _ in range(CONFIRMATIONS):
        if not low:
            return found
        held = try_rate(low, True)
        if held is None:
            return found
        if held:
            found.rate = low
            return found
        low *= STEP_DOWN
    return found


def _next_rate(low: float, high: float) -> float:
    if high == float("inf"):
        return 1.5 * low
    return high / 2 if low == 0 else (low * high) ** 0.5


def _why_not(report: Mapping[str, Any], rate: float, targets: Sequence[Requirement]) -> str:
    """Why the stage does not count as held; empty if it does."""
    for target in targets:
        value = target.measured(report)
        if not target.met(value):
            return f"{target.name} is {target.show(value)}"
    if report["errors"]["total"]:
        return f"{report['errors']['total']} errors ({', '.join(report['errors']['classes'])})"
    if report["unserved"]:
        return f"{report['unserved']} steps were never sent"
    due = rate * report["seconds"]
    # Poisson arrivals come in varying numbers: three deviations are no shortfall.
    if report["steps"] < min((1 - SHORTFALL) * due, due - 3 * due**0.5):
        return f"only {show(report['steps_per_second'], 'rate')} steps/s were answered"
    if report["ended"]:
        return str(report["ended"])
    return ""
