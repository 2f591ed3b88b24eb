"""Latencies in the buckets of HdrHistogram: three significant digits from a nanosecond to an hour, merged exactly."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from hdrh.histogram import HdrHistogram

HIGHEST = 3_600_000_000_000
DIGITS = 3
_SUB_BITS = 11
"""Bits that are kept of a value: three digits need 2,048 buckets for each doubling."""

Array = np.ndarray[Any, np.dtype[np.int64]]


class Histogram:
    """How often each latency came. Sparse: only the buckets that something fell into.

    values: the lowest nanosecond of each bucket, ascending. counts: how many fell into it.
    """

    __slots__ = ("counts", "values")

    def __init__(self, values: Array, counts: Array) -> None:
        self.values = values
        self.counts = counts

    @classmethod
    def of(cls, seconds: Sequence[float]) -> Histogram:
        """Latencies in seconds. What is longer than an hour counts as an hour."""
        nanoseconds = np.clip(np.rint(np.asarray(seconds, np.float64) * 1e9), 0, HIGHEST).astype(np.int64)
        return cls(*np.unique(bucket_floor(nanoseconds), return_counts=True))

    @classmethod
    def sum(cls, parts: Iterable[Histogram]) -> Histogram:
        """All of them as one: the counts of each bucket are added, nothing is rounded again."""
        parts = list(parts)
        if not parts:
            return cls(np.empty(0, np.int64), np.empty(0, np.int64))
        values, places = np.unique(np.concatenate([part.values for part in parts]), return_inverse=True)
        counts = np.zeros(len(values), np.int64)
        np.add.at(counts, places, np.concatenate([part.counts for part in parts]))
        return cls(values, counts)

    def __eq__(self, other: object) -> bool:
        return (
            isinstance(other, Histogram)
            and np.array_equal(self.values, other.values)
            and np.array_equal(self.counts, other.counts)
        )

    __hash__ = None  # type: ignore[assignment]

    def __len__(self) -> int:
        return int(self.counts.sum())

    @property
    def mean(self) -> float:
        """Seconds; not a number where nothing was counted."""
        middles = (self.values + bucket_ceiling(self.values)) / 2
        return float((middles * self.counts).sum() / len(self) / 1e9) if len(self) else float("nan")

    @property
    def max(self) -> float:
        """Seconds; not a number where nothing was counted."""
        return float(bucket_ceiling(self.values[-1:])[0] / 1e9) if len(self) else float("nan")

    def percentile(self, percent: float) -> float:
        """Seconds that `percent` of the latencies do not exceed; 0: the least. Not a number where there is none."""
        total = len(self)
        if not total:
            return float("nan")
        if not percent:
            return float(self.values[0] / 1e9)
        rank = max(int(percent / 100 * total + 0.5), 1)
        place = int(np.searchsorted(np.cumsum(self.counts), min(rank, total)))
        return float(bucket_ceiling(self.values[place : place + 1])[0] / 1e9)

    def above(self, seconds: float) -> int:
        """How many took at least so long."""
        return int(self.counts[self.values >= bucket_floor(np.array([round(seconds * 1e9)], np.int64))[0]].sum())

    def encode(self) -> str:
        """HdrHistogram's own compressed form (V2) in base64, in nanoseconds: other tools read it too."""
        histogram = HdrHistogram(1, HIGHEST, DIGITS)
        for value, count in zip(self.values.tolist(), self.counts.tolist(), strict=True):
            histogram.record_value(value, count)
        return str(histogram.encode().decode("ascii"))

    @classmethod
    def decode(cls, text: str) -> Histogram:
        """The histogram of such a text. Raises ValueError if it is none."""
        try:
            counts = np.frombuffer(HdrHistogram.decode(text.encode("ascii")).counts, np.int64)
        except Exception as error:
            raise ValueError(f"not an encoded histogram: {text[:20]!r}") from error
        (places,) = np.nonzero(counts)
        half = 1 << (_SUB_BITS - 1)
        bucket = np.maximum((places >> (_SUB_BITS - 1)) - 1, 0)
        values = np.where(places < half, places, (places & (half - 1)) + half) << bucket
        return cls(values.astype(np.int64), counts[places])


def bucket_floor(nanoseconds: Array) -> Array:
    """The lowest value that HdrHistogram cannot tell from each."""
    shift = _shift(nanoseconds)
    floor: Array = (nanoseconds >> shift) << shift
    return floor


def bucket_ceiling(nanoseconds: Array) -> Array:
    """The highest value that HdrHistogram cannot tell from each."""
    ceiling: Array = bucket_floor(nanoseconds) + (np.int64(1) << _shift(nanoseconds)) - 1
    return ceiling


def _shift(nanoseconds: Array) -> Array:
    _, bits = np.frexp(nanoseconds.astype(np.float64))  # exact: an hour has 42 bits
    shift: Array = np.maximum(bits - _SUB_BITS, 0).astype(np.int64)
    return shift
