"""Two reports beside each other: what changed, and what may be noise."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from starpod.load.bootstrap import LEVEL, draws_of

NOTABLE = 0.02
"""Smaller changes are not worth a word, however sure they are."""

_SETTINGS = ("environment", "environment_version", "options", "transport", "policy", "mix", "think", "processes")


@dataclass(frozen=True, slots=True)
class Change:
    """One figure of one stage. change: relative, of the second to the first. low, high: its interval; None: unknown.

    verdict: better, worse, same or unsure.
    """

    stage: str
    name: str
    before: float
    after: float
    low: float | None
    high: float | None
    verdict: str

    @property
    def change(self) -> float:
        return self.after / self.before - 1 if self.before else float("inf" if self.after else 0)


@dataclass(frozen=True, slots=True)
class Comparison:
    """changes: figure by figure. remarks: what makes the two reports differ besides the server."""

    changes: list[Change]
    remarks: list[str]

    def as_json(self) -> dict[str, Any]:
        changes = [{**asdict(change), "change": change.change} for change in self.changes]
        return {"format": "starpod-load-comparison", "changes": changes, "remarks": self.remarks}


def compare(before: Mapping[str, Any], after: Mapping[str, Any]) -> Comparison:
    """Compares the stages of the same name. Raises ValueError if there are none."""
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
        for report, which in ((first, "first"), (second, "second")):
            remarks += [f"{first['name']}, {which}: {warning}" for warning in report["warnings"]]
        changes += _changes(first, second)
    return Comparison(changes, remarks)


def _changes(first: Mapping[str, Any], second: Mapping[str, Any]) -> list[Change]:
    # Other draws for each, or the noise of the one would seem to follow the other's.
    draws = draws_of(first, 1), draws_of(second, 2)
    changes = []
    for name, before, after in _figures(first, second):
        low = high = None
        verdict = "unsure"
        if name in draws[0] and name in draws[1]:
            with np.errstate(divide="ignore", invalid="ignore"):
                ratios = draws[1][name] / draws[0][name] - 1
            ratios = ratios[np.isfinite(ratios)]
            if len(ratios):
                tail = 50 * (1 - LEVEL)
                low, high = (float(edge) for edge in np.percentile(ratios, [tail, 100 - tail]))
                verdict = _verdict(name, after / before - 1 if before else 0.0, low, high)
        changes.append(Change(first["name"], name, before, after, low, high, verdict))
    return changes


def _verdict(name: str, change: float, low: float, high: float) -> str:
    if low <= 0 <= high or abs(change) < NOTABLE:
        return "same"
    return "better" if (change > 0) == (name == "steps_per_second") else "worse"


def _figures(first: Mapping[str, Any], second: Mapping[str, Any]) -> list[tuple[str, float, float]]:
    """(name, before, after) of what both have."""
    found = [
        (name, float(first[name]), float(second[name])) for name in ("steps_per_second",) if first[name] is not None
    ]
    for call, figures in first["calls"].items():
        others = second["calls"].get(call, {})
        for name in ("p50_ms", "p90_ms", "p99_ms", "p99.9_ms"):
            if figures.get(name) is not None and others.get(name) is not None:
                found.append((f"{call}.{name}", figures[name], others[name]))
    return found
