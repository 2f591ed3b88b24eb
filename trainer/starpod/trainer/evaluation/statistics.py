"""Confidence intervals for shares and means, pass@k and pass^k. All functions take and return plain numbers."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from statistics import NormalDist, fmean, stdev

CONFIDENCE = 0.95
"""Probability with which an interval contains the true value."""


def wilson_interval(successes: float, count: float) -> tuple[float, float]:
    """Return the 95 % score interval of a share (Wilson 1927). It stays within 0 and 1, also for few trials or none.

    Args:
        successes, count: Numbers of successes and trials. Both may be fractions, such as the effective counts of
            `clustered_interval`.

    Raises:
        ValueError: `successes` is below 0 or above `count`.
    """
    if not 0 <= successes <= count:
        raise ValueError(f"{successes} successes of {count} trials")
    if not count:
        return 0.0, 1.0
    z = NormalDist().inv_cdf((1 + CONFIDENCE) / 2)
    share = successes / count
    middle = (share + z * z / (2 * count)) / (1 + z * z / count)
    half = z * math.sqrt(share * (1 - share) / count + z * z / (4 * count * count)) / (1 + z * z / count)
    return max(0.0, middle - half) if successes else 0.0, min(1.0, middle + half) if successes < count else 1.0


def clustered_interval(outcomes: Sequence[Sequence[bool]]) -> tuple[float, float]:
    """Return Wilson's interval for the mean share of successes over clusters, such as several episodes per start.

    Tries from one start are correlated, so they carry less information than tries from different starts. The interval
    uses Kish's effective sample size: the number of independent trials with the same variance as the clusters' shares.
    It is at least the number of clusters and at most the number of tries. Empty clusters are left out.
    """
    shares = [sum(cluster) / len(cluster) for cluster in outcomes if cluster]
    tries = sum(map(len, outcomes))
    if not shares:
        return 0.0, 1.0
    if tries == len(shares):
        return wilson_interval(sum(shares), tries)
    share = fmean(shares)
    count = float(len(shares))
    if 0 < share < 1 and len(shares) > 1:
        spread = stdev(shares) ** 2 / len(shares)
        count = min(max(share * (1 - share) / spread, count), tries) if spread else float(tries)
    return wilson_interval(share * count, count)


def mean_interval(values: Sequence[float]) -> tuple[float, float]:
    """Return Student's interval for a mean. It is infinite for fewer than two values."""
    if len(values) < 2:
        return -math.inf, math.inf
    half = t_quantile((1 + CONFIDENCE) / 2, len(values) - 1) * stdev(values) / math.sqrt(len(values))
    middle = fmean(values)
    return middle - half, middle + half


def interval_of_mean(estimates: Sequence[tuple[float, float, float]]) -> tuple[float, float]:
    """Return the interval of the mean of independent estimates (value, low, high).

    This is MOVER, the method of variance estimates recovery (Zou and Donner 2008, doi:10.1002/sim.3095).
    """
    middle, count = fmean(value for value, _, _ in estimates), len(estimates)
    lower_half = math.sqrt(sum((value - low) ** 2 for value, low, _ in estimates)) / count
    upper_half = math.sqrt(sum((high - value) ** 2 for value, _, high in estimates)) / count
    return middle - lower_half, middle + upper_half


def paired_interval(differences: Sequence[float]) -> tuple[float, float]:
    """Return the 95 % interval of the difference of two shares from paired trials. It stays within -1 and 1.

    This is Wald's interval with two pairs added (Agresti and Min 2005): one with equal outcomes, and half a pair for
    each sign. It has a width even if no pair differs.

    Args:
        differences: Second minus first outcome of each pair, from -1 to 1. With several pairs per start state, their
            mean.
    """
    count = len(differences) + 2
    z = NormalDist().inv_cdf((1 + CONFIDENCE) / 2)
    middle = sum(differences) / count
    half = z * math.sqrt(sum(each * each for each in differences) + 1 - count * middle * middle) / count
    return max(-1.0, middle - half), min(1.0, middle + half)


def mcnemar(only_first: int, only_second: int) -> float:
    """Return the p-value of McNemar's exact two-sided test of whether two shares of paired trials differ.

    Under the null hypothesis, each pair in which only one succeeded is a fair coin.
    """
    count, minimum = only_first + only_second, min(only_first, only_second)
    return min(1.0, 2 * sum(math.comb(count, k) for k in range(minimum + 1)) / (1 << count))


def pass_at_k(count: int, successes: int, k: int) -> float:
    """Return the unbiased estimate of the probability that at least one of k tries succeeds.

    It is 1 - C(count - successes, k) / C(count, k), equation 1 of Chen et al. 2021 (arXiv 2107.03374).

    Raises:
        ValueError: The numbers contradict each other, or there are fewer than k tries.
    """
    if not 0 <= successes <= count or not 1 <= k <= count:
        raise ValueError(f"pass@{k} of {successes} successes in {count} tries")
    return 1 - math.comb(count - successes, k) / math.comb(count, k)


def pass_hat_k(count: int, successes: int, k: int) -> float:
    """Return the unbiased estimate of the probability that all of k tries succeed: C(successes, k) / C(count, k).

    This is pass^k of Yao et al. 2024 (tau-bench, arXiv 2406.12045). The arguments are those of `pass_at_k`.

    Raises:
        ValueError: The numbers contradict each other, or there are fewer than k tries.
    """
    if not 0 <= successes <= count or not 1 <= k <= count:
        raise ValueError(f"pass^{k} of {successes} successes in {count} tries")
    return math.comb(successes, k) / math.comb(count, k)


@functools.lru_cache(maxsize=256)
def t_quantile(probability: float, degrees: int) -> float:
    """Return the quantile of Student's t distribution with `degrees` degrees of freedom, for a probability from 0.5."""
    if degrees > 10_000:  # the normal quantile differs by less than 1e-4
        return NormalDist().inv_cdf(probability)
    low, high = 0.0, 1.0
    while _t_within(high, degrees) < 2 * probability - 1:
        high *= 2
    for _ in range(80):
        middle = (low + high) / 2
        low, high = (middle, high) if _t_within(middle, degrees) < 2 * probability - 1 else (low, middle)
    return high


def _t_within(value: float, degrees: int) -> float:
    """Return P(|t| < value), by the finite sums of Abramowitz and Stegun 26.7.3 and 26.7.4."""
    angle = math.atan(value / math.sqrt(degrees))
    sine, cosine_squared = math.sin(angle), math.cos(angle) ** 2
    parity = degrees % 2
    term = math.cos(angle) if parity else 1.0
    total = term if degrees > 1 else 0.0
    for step in range(2 + parity, degrees - 1, 2):
        term *= cosine_squared * (step - 1) / step
        total += term
    return 2 / math.pi * (angle + sine * total) if parity else sine * total
