"""Uncertainty of figures, and what changed from one report to another.

The intervals of a run are drawn again and again, as if it had been run as often (bootstrap).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from starpod.load.measurements import Histogram, bucket_ceilings

NOTABLE = 0.02
"""Smaller changes are not worth a word, however sure they are."""
DRAWS = 1000
FEWEST = 8
"""With fewer intervals nothing can be said."""
LEVEL = 0.99
"""Of the interval that is told. Many figures stand in a report: at 95 % one in twenty would seem to have changed."""
PERCENTS = ((50.0, "p50_ms"), (90.0, "p90_ms"), (99.0, "p99_ms"), (99.9, "p99.9_ms"))
ENOUGH = {"p50_ms": 20, "p90_ms": 50, "p99_ms": 500, "p99.9_ms": 5000}
"""Latencies below which a percentile hangs on single calls."""

Array = np.ndarray[Any, np.dtype[np.float64]]


def draws_of(stage: Mapping[str, Any], seed: int = 0) -> dict[str, Array]:
    """For each figure by name (`steps_per_second`, `step.p99_ms`) what it might as well have been, in DRAWS draws.

    Empty where the stage has too few intervals.
    """
    intervals = stage["intervals"]
    count = len(intervals)
    if count < FEWEST:
        return {}
    weights = np.random.default_rng(seed).multinomial(count, np.full(count, 1 / count), DRAWS).astype(np.float64)
    lengths = np.full(count, stage["interval_seconds"])
    lengths[-1] = max(stage["seconds"] - lengths[:-1].sum(), 1e-3)
    steps = np.array([interval["steps"] for interval in intervals], np.float64)
    drawn: dict[str, Array] = {"steps_per_second": (weights @ steps) / (weights @ lengths)}
    for call in {call for interval in intervals for call in interval["calls"]}:
        histograms = [
            Histogram.decode(interval["calls"][call]["hdr"]) if call in interval["calls"] else Histogram()
            for interval in intervals
        ]
        total = sum(len(histogram) for histogram in histograms)
        percents = [(percent, name) for percent, name in PERCENTS if total >= ENOUGH[name]]
        if percents:
            found = _percentiles(histograms, weights, [percent for percent, _ in percents])
            drawn.update({f"{call}.{name}": column for (_, name), column in zip(percents, found, strict=True)})
    return drawn


def intervals_of(stage: Mapping[str, Any]) -> dict[str, list[float]]:
    """[low, high] of each figure by name."""
    tail = 50 * (1 - LEVEL)
    return {
        name: [float(edge) for edge in np.percentile(values[np.isfinite(values)], [tail, 100 - tail])]
        for name, values in sorted(draws_of(stage).items())
        if np.isfinite(values).any()
    }


def _percentiles(histograms: Sequence[Histogram], weights: Array, percents: Sequence[float]) -> list[Array]:
    """Per percent the milliseconds in each draw; not a number in a draw without a latency."""
    counts = np.array([histogram.counts for histogram in histograms], np.float64)
    filled = counts.any(axis=0)
    counts, ceilings = counts[:, filled], bucket_ceilings()[filled] / 1e6
    sums = np.cumsum(weights @ counts, axis=1)
    totals = sums[:, -1]
    found = []
    for percent in percents:
        ranks = np.maximum(np.floor(percent / 100 * totals + 0.5), 1)
        places = np.minimum((sums < ranks[:, None]).sum(axis=1), len(ceilings) - 1)
        found.append(np.where(totals > 0, ceilings[places], np.nan))
    return found


# --- two reports ------------------------------------------------------------------------------------------------------

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
