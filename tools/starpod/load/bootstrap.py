"""How sure a figure is: the intervals of a run are drawn again and again, as if it had been run as often."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from starpod.load.histogram import Histogram, bucket_ceiling

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
            Histogram.decode(interval["calls"][call]["hdr"]) if call in interval["calls"] else Histogram.sum(())
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
    values = np.unique(np.concatenate([histogram.values for histogram in histograms]))
    counts = np.zeros((len(histograms), len(values)))
    for row, histogram in enumerate(histograms):
        counts[row, np.searchsorted(values, histogram.values)] = histogram.counts
    sums = np.cumsum(weights @ counts, axis=1)
    totals = sums[:, -1]
    ceilings = bucket_ceiling(values) / 1e6
    found = []
    for percent in percents:
        ranks = np.maximum(np.floor(percent / 100 * totals + 0.5), 1)
        places = np.minimum((sums < ranks[:, None]).sum(axis=1), len(values) - 1)
        found.append(np.where(totals > 0, ceilings[places], np.nan))
    return found
