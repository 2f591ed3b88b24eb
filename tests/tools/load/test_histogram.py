"""Histograms are HdrHistogram's, and merging loses nothing."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hdrh.histogram import HdrHistogram
from hypothesis import given
from hypothesis import strategies as st

from starpod.load.histogram import DIGITS, HIGHEST, Histogram, bucket_ceiling, bucket_floor

LATENCIES = st.lists(st.floats(0, 3600), max_size=60)
NANOSECONDS = st.one_of(st.integers(0, 5000), st.integers(0, HIGHEST))


def theirs(seconds: list[float]) -> HdrHistogram:
    histogram = HdrHistogram(1, HIGHEST, DIGITS)
    for value in seconds:
        histogram.record_value(min(max(round(value * 1e9), 0), HIGHEST))
    return histogram


@given(st.lists(LATENCIES, max_size=6))
def test_merging_is_counting_all_at_once(parts: list[list[float]]) -> None:
    whole = Histogram.of([value for part in parts for value in part])
    assert Histogram.sum(map(Histogram.of, parts)) == whole
    assert Histogram.sum([Histogram.sum(map(Histogram.of, parts[:2])), *map(Histogram.of, parts[2:])]) == whole


@given(LATENCIES)
def test_what_is_encoded_is_decoded(seconds: list[float]) -> None:
    histogram = Histogram.of(seconds)
    assert Histogram.decode(histogram.encode()) == histogram


@given(LATENCIES.filter(bool), st.sampled_from([0.0, 10.0, 50.0, 90.0, 99.0, 99.9, 100.0]))
def test_percentiles_are_those_of_hdrhistogram(seconds: list[float], percent: float) -> None:
    expected = theirs(seconds).get_value_at_percentile(percent) / 1e9
    assert Histogram.of(seconds).percentile(percent) == pytest.approx(expected, rel=1e-12)


@given(LATENCIES.filter(bool))
def test_a_percentile_is_within_three_digits(seconds: list[float]) -> None:
    ordered = sorted(seconds)
    for percent in (1, 50, 99):
        rank = max(int(percent / 100 * len(ordered) + 0.5), 1)
        assert Histogram.of(seconds).percentile(percent) == pytest.approx(ordered[rank - 1], rel=1e-3, abs=2e-9)
    assert Histogram.of(seconds).max == pytest.approx(ordered[-1], rel=1e-3, abs=2e-9)


@given(NANOSECONDS)
def test_buckets_are_those_of_hdrhistogram(nanoseconds: int) -> None:
    histogram, array = HdrHistogram(1, HIGHEST, DIGITS), np.array([nanoseconds])
    assert bucket_floor(array)[0] == histogram.get_lowest_equivalent_value(nanoseconds)
    assert bucket_ceiling(array)[0] == histogram.get_highest_equivalent_value(nanoseconds)


@given(LATENCIES, st.floats(0, 3600))
def test_above_counts(seconds: list[float], limit: float) -> None:
    sure = sum(value > limit * 1.002 + 1e-8 for value in seconds)
    perhaps = sum(value >= limit * 0.998 - 1e-8 for value in seconds)
    assert sure <= Histogram.of(seconds).above(limit) <= perhaps


def test_nothing_has_no_figures() -> None:
    empty = Histogram.sum(())
    assert len(empty) == 0
    assert all(map(math.isnan, (empty.mean, empty.max, empty.percentile(50))))


def test_what_is_no_histogram_is_refused() -> None:
    with pytest.raises(ValueError, match="histogram"):
        Histogram.decode("no histogram")
