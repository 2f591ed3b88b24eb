"""Test whether a series of measurements grows, beyond noise and the growth of a warm-up."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import median

import numpy as np

WARM_UP = 0.25
"""Share of a series that is ignored at its beginning, while caches fill and pools and heaps reach their size."""
PARTS = 4


@dataclass(frozen=True, slots=True)
class Tolerance:
    """Tolerated rise of a series from beginning to end: `absolute`, or `relative` times its mean if that is larger."""

    absolute: float
    relative: float


@dataclass(frozen=True, slots=True)
class Trend:
    """Statistics of a series after its warm-up."""

    mean: float
    slope: float  # of a least-squares line, per hour
    rise: float  # of that line from beginning to end
    settled_rise: float  # from the median of the first quarter to the median of the last quarter
    tolerance: float
    grows: bool
    """Both rises exceed the tolerance, and no quarter's median is below the previous one's by more than it."""


def trend(seconds: Sequence[float], values: Sequence[float], tolerance: Tolerance) -> Trend:
    """Fit a line to the values after the warm-up.

    Args:
        seconds: time of each value, ascending.
        values: the series.
        tolerance: rise of the series that does not count as growth.

    Raises:
        ValueError: there are too few values after the warm-up, or not one for each time.
    """
    if len(seconds) != len(values):
        raise ValueError(f"{len(seconds)} times and {len(values)} values")
    span = seconds[-1] - seconds[0] if seconds else 0.0
    start = seconds[0] + WARM_UP * span if seconds else 0.0
    samples = [(second, value) for second, value in zip(seconds, values, strict=True) if second >= start]
    if len(samples) < 2 * PARTS:
        raise ValueError(f"{len(samples)} samples after the warm-up are too few: sample more often, or for longer")
    x, y = np.array(samples).T
    slope = float(np.polyfit(x - x[0], y, 1)[0])
    rise = slope * float(x[-1] - x[0])
    mean = float(y.mean())
    limit = max(tolerance.absolute, tolerance.relative * abs(mean))
    steps = [median(part.tolist()) for part in np.array_split(y, PARTS)]
    is_steady = all(later - earlier > -limit for earlier, later in pairwise(steps))
    change = steps[-1] - steps[0]
    return Trend(mean, 3600 * slope, rise, change, limit, is_steady and min(rise, change) > limit)
