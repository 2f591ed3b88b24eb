"""Intervals against published numbers and against their own definitions."""

import math
import random
from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from starpod.trainer.evaluation.statistics import (
    clustered_interval,
    mean_interval,
    pass_at_k,
    t_quantile,
    wilson_interval,
)


@pytest.mark.parametrize(
    ("successes", "count", "low", "high"),
    [
        # Newcombe, Statistics in Medicine 17 (1998), table I, method 3.
        (81, 263, 0.2553, 0.3662),
        (15, 148, 0.0624, 0.1605),
        (0, 20, 0.0, 0.1611),
        (1, 29, 0.0061, 0.1718),
    ],
)
def test_wilson_gives_the_published_intervals(successes: int, count: int, low: float, high: float) -> None:
    assert wilson_interval(successes, count) == pytest.approx((low, high), abs=5e-5)


@given(st.integers(1, 500).flatmap(lambda count: st.tuples(st.integers(0, count), st.just(count))))
def test_wilson_holds_the_share_and_mirrors(case: tuple[int, int]) -> None:
    successes, count = case
    low, high = wilson_interval(successes, count)
    assert 0 <= low <= successes / count <= high <= 1
    mirrored = wilson_interval(count - successes, count)
    assert (1 - high, 1 - low) == pytest.approx(mirrored)


@pytest.mark.parametrize(
    ("probability", "degrees", "value"),
    [
        (0.975, 1, 12.706),
        (0.975, 2, 4.303),
        (0.975, 9, 2.262),
        (0.975, 30, 2.042),
        (0.95, 5, 2.015),
        (0.995, 120, 2.617),
        (0.975, 20_000, 1.960),
    ],
)
def test_students_t_has_the_tabled_quantiles(probability: float, degrees: int, value: float) -> None:
    assert t_quantile(probability, degrees) == pytest.approx(value, abs=5e-4)


def test_the_interval_of_a_mean_by_hand() -> None:
    # Mean 3, deviation sqrt(2.5), t with 4 degrees 2.776.
    assert mean_interval([1, 2, 3, 4, 5]) == pytest.approx((1.0368, 4.9632), abs=1e-4)
    assert mean_interval([2, 2, 2]) == (2, 2)
    assert mean_interval([2]) == (-math.inf, math.inf)


def test_the_interval_of_a_mean_holds_it_as_often_as_it_says() -> None:
    rng = random.Random(1)
    held = 0
    for _ in range(2000):
        low, high = mean_interval([rng.gauss(7, 2) for _ in range(5)])
        held += low < 7 < high
    assert 0.935 < held / 2000 < 0.965


def test_equal_tries_count_once_and_independent_ones_all() -> None:
    starts = [[True] * 4, [False] * 4] * 20
    assert clustered_interval(starts) == pytest.approx(wilson_interval(20, 40), abs=5e-3)
    rng = random.Random(2)
    free = [[rng.random() < 0.5 for _ in range(4)] for _ in range(400)]
    wins = sum(map(sum, free))
    assert clustered_interval(free) == pytest.approx(wilson_interval(wins, 1600), abs=5e-3)


@given(st.lists(st.lists(st.booleans(), max_size=5), max_size=12))
def test_clusters_never_count_for_more_than_their_tries(outcomes: list[list[bool]]) -> None:
    low, high = clustered_interval(outcomes)
    clusters = [cluster for cluster in outcomes if cluster]
    assert 0 <= low <= high <= 1
    if clusters and all(len(cluster) == 1 for cluster in clusters):
        wins = sum(map(sum, clusters))
        assert (low, high) == pytest.approx(wilson_interval(wins, len(clusters)))


@given(st.integers(1, 8).flatmap(lambda n: st.tuples(st.just(n), st.integers(0, n), st.integers(1, n))))
def test_pass_at_k_is_the_share_of_draws_that_hold_a_success(case: tuple[int, int, int]) -> None:
    count, successes, k = case
    tries = [True] * successes + [False] * (count - successes)
    draws = [any(draw) for draw in combinations(tries, k)]
    assert pass_at_k(count, successes, k) == pytest.approx(sum(draws) / len(draws))


def test_what_nothing_can_be_said_of() -> None:
    assert wilson_interval(0, 0) == (0.0, 1.0)
    with pytest.raises(ValueError, match="3 successes of 2"):
        wilson_interval(3, 2)
    with pytest.raises(ValueError, match="pass@3"):
        pass_at_k(2, 1, 3)
