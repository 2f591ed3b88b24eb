"""Whether a series of measurements grows, told apart from noise and from what settles after a while."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import median

import numpy as np

WARM_UP = 0.25
"""The first share of a series, which says nothing: caches fill, pools and heaps find their size."""
PARTS = 4


@dataclass(frozen=True, slots=True)
class Tolerance:
    """What a series may rise by between the beginning and the end: the larger of so much, and a share of its mean."""

    absolute: float
    relative: float


@dataclass(frozen=True, slots=True)
class Trend:
    """A series after its warm-up.

    mean: of the values. slope: per hour, of the line through them by least squares. rise: of that line, end to end.
    settled_rise: between the medians of the first and last quarter. tolerance: the rise that counts as none.
    grows: both rises exceed it, and no quarter's median falls back behind the one before by more than it.
    """

    mean: float
    slope: float
    rise: float
    settled_rise: float
    tolerance: float
    grows: bool


def trend(seconds: Sequence[float], values: Sequence[float], tolerance: Tolerance) -> Trend:
    """Fits a line to what follows the warm-up. Raises ValueError if that is too little to say anything."""
    if len(seconds) != len(values):
        raise ValueError(f"{len(seconds)} times and {len(values)} values")
    span = seconds[-1] - seconds[0] if seconds else 0.0
    since = seconds[0] + WARM_UP * span if seconds else 0.0
    kept = [(second, value) for second, value in zip(seconds, values, strict=True) if second >= since]
    if len(kept) < 2 * PARTS:
        raise ValueError(f"{len(kept)} samples after the warm-up are too few: sample more often, or for longer")
    x, y = np.array(kept).T
    slope = float(np.polyfit(x - x[0], y, 1)[0])
    rise = slope * float(x[-1] - x[0])
    mean = float(y.mean())
    allowed = max(tolerance.absolute, tolerance.relative * abs(mean))
    steps = [median(part.tolist()) for part in np.array_split(y, PARTS)]
    steady = all(later - earlier > -allowed for earlier, later in pairwise(steps))
    settled = steps[-1] - steps[0]
    return Trend(mean, 3600 * slope, rise, settled, allowed, steady and min(rise, settled) > allowed)
