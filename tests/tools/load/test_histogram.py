"""Histograms are HdrHistogram's, and merging loses nothing."""

import math

import numpy as np
import pytest
from hdrh.histogram import HdrHistogram
from hypothesis import example, given
from hypothesis import strategies as st

from starpod.load.measurements import DIGITS, MAX_NANOSECONDS, Histogram, bucket_ceilings

LATENCIES = st.lists(st.floats(0, 3600), max_size=60)


def theirs(seconds: list[float]) -> HdrHistogram:
    histogram = HdrHistogram(1, MAX_NANOSECONDS, DIGITS)
    for value in seconds:
        histogram.record_value(1000 * round(value * 1e6))
    return histogram


def counted(histogram: Histogram) -> list[int]:
    """Return the number of latencies in each bucket."""
    return list(histogram.counts)


@given(st.lists(LATENCIES, max_size=6))
def test_merging_is_counting_all_at_once(parts: list[list[float]]) -> None:
    whole = counted(Histogram([value for part in parts for value in part]))
    assert counted(Histogram.sum(map(Histogram, parts))) == whole
    assert counted(Histogram.sum([Histogram.sum(map(Histogram, parts[:2])), *map(Histogram, parts[2:])])) == whole


@given(LATENCIES)
def test_what_is_encoded_is_decoded(seconds: list[float]) -> None:
    histogram = Histogram(seconds)
    assert counted(Histogram.decode(histogram.encode())) == counted(histogram)


@example([0.0004], 50.0)  # less than a millisecond, as most steps take
@given(LATENCIES.filter(bool), st.sampled_from([0.0, 10.0, 50.0, 90.0, 99.0, 99.9, 100.0]))
def test_percentiles_are_those_of_hdrhistogram(seconds: list[float], percent: float) -> None:
    expected = theirs(seconds).get_percentile_to_value_dict([percent])[percent] / 1e9
    assert Histogram(seconds).percentiles(percent) == pytest.approx([expected], rel=1e-12)


@given(st.integers(0, MAX_NANOSECONDS))
def test_bucket_ceilings_are_those_of_hdrhistogram(nanoseconds: int) -> None:
    histogram = HdrHistogram(1, MAX_NANOSECONDS, DIGITS)
    ceilings = bucket_ceilings()
    place = int(np.searchsorted(ceilings, nanoseconds))
    assert ceilings[place] == histogram.get_highest_equivalent_value(nanoseconds)


def test_nothing_has_no_figures() -> None:
    empty = Histogram()
    assert len(empty) == 0
    assert all(map(math.isnan, (empty.mean, *empty.percentiles(50, 100))))


def test_what_is_no_histogram_is_refused() -> None:
    with pytest.raises(ValueError, match="histogram"):
        Histogram.decode("no histogram")
