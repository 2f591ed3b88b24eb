"""Confidence intervals for shares and means, and pass@k. Plain numbers in, plain numbers out."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from statistics import NormalDist, fmean, stdev

CONFIDENCE = 0.95


def wilson_interval(successes: float, count: float, confidence: float = CONFIDENCE) -> tuple[float, float]:
    """The score interval of a share (Wilson 1927): stays within 0 and 1, and holds for few trials and for none.

    Counts may be fractions: `clustered_interval` gives effective ones. Raises ValueError unless
    0 <= successes <= count.
    """
    if not 0 <= successes <= count:
        raise ValueError(f"{successes} successes of {count} trials")
    if not count:
        return 0.0, 1.0
    z = NormalDist().inv_cdf((1 + confidence) / 2)
    share = successes / count
    middle = (share + z * z / (2 * count)) / (1 + z * z / count)
    half = z * math.sqrt(share * (1 - share) / count + z * z / (4 * count * count)) / (1 + z * z / count)
    return max(0.0, middle - half) if successes else 0.0, min(1.0, middle + half) if successes < count else 1.0


def clustered_interval(outcomes: Sequence[Sequence[bool]], confidence: float = CONFIDENCE) -> tuple[float, float]:
    """Wilson's interval for the mean over clusters of the share of successes in each: several tries from one start.

    Tries from one start resemble each other, so they count for less than as many from different starts. The count that
    goes into the interval is the one under which independent trials would spread as the clusters' shares do (Kish's
    effective sample size): not below the number of clusters, not above the number of tries. Empty clusters are left
    out.
    """
    shares = [sum(cluster) / len(cluster) for cluster in outcomes if cluster]
    tries = sum(map(len, outcomes))
    if not shares:
        return 0.0, 1.0
    if tries == len(shares):
        return wilson_interval(sum(shares), tries, confidence)
    share = fmean(shares)
    count = float(len(shares))
    if 0 < share < 1 and len(shares) > 1:
        spread = stdev(shares) ** 2 / len(shares)
        count = min(max(share * (1 - share) / spread, count), tries) if spread else float(tries)
    return wilson_interval(share * count, count, confidence)


def mean_interval(values: Sequence[float], confidence: float = CONFIDENCE) -> tuple[float, float]:
    """Student's interval for a mean. Infinite for fewer than two values, which say nothing of the spread."""
    if len(values) < 2:
        return -math.inf, math.inf
    half = t_quantile((1 + confidence) / 2, len(values) - 1) * stdev(values) / math.sqrt(len(values))
    middle = fmean(values)
    return middle - half, middle + half


def interval_of_mean(estimates: Sequence[tuple[float, float, float]]) -> tuple[float, float]:
    """Interval of the mean of independent estimates, each with its interval: (value, low, high).

    MOVER, the method of variance estimates recovery (Zou and Donner 2008, doi:10.1002/sim.3095).
    """
    middle, count = fmean(value for value, _, _ in estimates), len(estimates)
    below = math.sqrt(sum((value - low) ** 2 for value, low, _ in estimates)) / count
    above = math.sqrt(sum((high - value) ** 2 for value, _, high in estimates)) / count
    return middle - below, middle + above


def paired_share_interval(
    only_first: int, only_second: int, pairs: int, confidence: float = CONFIDENCE
) -> tuple[float, float]:
    """Interval of the second share minus the first, of trials in pairs: Wald's with two pairs more (Agresti, Min 2005).

    only_first, only_second: pairs in which one alone succeeded. It has a width where no pair differs, too.
    """
    count = pairs + 2
    z = NormalDist().inv_cdf((1 + confidence) / 2)
    middle = (only_second - only_first) / count
    half = z * math.sqrt(only_first + only_second + 1 - count * middle * middle) / count
    return max(-1.0, middle - half), min(1.0, middle + half)


def mcnemar(only_first: int, only_second: int) -> float:
    """P-value of McNemar's exact two-sided test: whether two shares of paired trials differ.

    Under the hypothesis that they do not, each pair in which one alone succeeded is a fair coin.
    """
    count, fewer = only_first + only_second, min(only_first, only_second)
    return min(1.0, 2 * sum(math.comb(count, k) for k in range(fewer + 1)) / (1 << count))


def pass_at_k(count: int, successes: int, k: int) -> float:
    """The chance that at least one of k tries succeeds, estimated without bias from `count` tries with `successes`.

    1 - C(count - successes, k) / C(count, k), Chen et al. 2021 (arXiv 2107.03374), equation 1.
    Raises ValueError for fewer than k tries.
    """
    if not 0 <= successes <= count or not 1 <= k <= count:
        raise ValueError(f"pass@{k} of {successes} successes in {count} tries")
    return 1 - math.comb(count - successes, k) / math.comb(count, k)


@functools.lru_cache(maxsize=256)
def t_quantile(probability: float, degrees: int) -> float:
    """The value that Student's t with `degrees` degrees of freedom stays below with `probability` (0.5 to below 1)."""
    if degrees > 10_000:  # the two differ by less than a ten-thousandth
        return NormalDist().inv_cdf(probability)
    low, high = 0.0, 1.0
    while _t_within(high, degrees) < 2 * probability - 1:
        high *= 2
    for _ in range(80):
        middle = (low + high) / 2
        low, high = (middle, high) if _t_within(middle, degrees) < 2 * probability - 1 else (low, middle)
    return high


def _t_within(value: float, degrees: int) -> float:
    """P(|t| < value): the finite sums for whole degrees of freedom (Abramowitz and Stegun 26.7.3 and 26.7.4)."""
    angle = math.atan(value / math.sqrt(degrees))
    sine, squared = math.sin(angle), math.cos(angle) ** 2
    odd = degrees % 2
    term = math.cos(angle) if odd else 1.0
    total = term if degrees > 1 else 0.0
    for step in range(2 + odd, degrees - 1, 2):
        term *= squared * (step - 1) / step
        total += term
    return 2 / math.pi * (angle + sine * total) if odd else sine * total
