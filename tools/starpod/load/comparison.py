"""Confidence intervals of a stage's metrics, and the comparison of two reports."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from starpod.load.measurements import Histogram, bucket_ceilings

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
