"""Arrivals do not drift, and think times are what their names say."""

import pickle
import random
from itertools import islice, pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from starpod.load.plan import Stage, Think, arrivals

RATES = st.floats(0.01, 1e5)
STARTS = st.floats(0, 1e7)


@given(RATES, STARTS, st.integers(1, 5))
def test_constant_arrivals_of_all_generators_are_one_clock(rate: float, start: float, places: int) -> None:
    each = [islice(arrivals("constant", rate, start, place, places, 0), 60) for place in range(places)]
    together = sorted(due for one in each for due in one)
    for number, due in enumerate(together):
        # Computed from the start each time: the error is that of one rounding, however many came before.
        assert due == pytest.approx(start + number / rate, abs=1e-9 * (1 + start))


@given(RATES, STARTS)
def test_a_late_reader_gets_the_same_arrivals(rate: float, start: float) -> None:
    """Due times depend only on the schedule, not on what happens in between."""
    first = list(islice(arrivals("poisson", rate, start, 0, 1, 7), 100))
    again = arrivals("poisson", rate, start, 0, 1, 7)
    assert [next(again) for _ in range(100)] == first
    assert all(before <= after for before, after in pairwise(first))


@pytest.mark.parametrize("places", [1, 3])
def test_poisson_arrivals_have_the_rate_and_the_spread(places: int) -> None:
    each = [list(islice(arrivals("poisson", 1000.0, 0.0, place, places, 3), 20_000)) for place in range(places)]
    last = min(one[-1] for one in each)
    together = sorted(due for one in each for due in one if due < last)
    gaps = [after - before for before, after in pairwise(together)]
    mean = sum(gaps) / len(gaps)
    spread = (sum((gap - mean) ** 2 for gap in gaps) / len(gaps)) ** 0.5
    assert mean == pytest.approx(1e-3, rel=0.05)
    assert spread == pytest.approx(mean, rel=0.05)  # an exponential distribution


@pytest.mark.parametrize(
    ("text", "mean"),
    [("10ms", 0.01), ("exponential:10ms", 0.01), ("uniform:5ms..15ms", 0.01), ("lognormal:10ms,0.5", 0.01133)],
)
def test_think_times(text: str, mean: float) -> None:
    think: Think = pickle.loads(pickle.dumps(Think(text)))
    rng = random.Random(1)
    draws = [think.draw(rng) for _ in range(20_000)]
    assert min(draws) >= 0
    assert sum(draws) / len(draws) == pytest.approx(mean, rel=0.05)
    assert think and not Think("0")


@pytest.mark.parametrize("text", ["gaussian:5ms", "uniform:5ms", "exponential:", "lognormal:5ms", "soon"])
def test_an_invalid_think_time_is_reported(text: str) -> None:
    with pytest.raises(ValueError, match="lognormal:MEDIAN,SIGMA"):
        Think(text)


@pytest.mark.parametrize(("seconds", "interval"), [(1.0, 0.05), (10.0, 0.25), (600.0, 1.0), (28_800.0, 48.0)])
def test_a_stage_has_at_most_600_intervals(seconds: float, interval: float) -> None:
    assert Stage("", 1, seconds, 0.0).interval == interval
