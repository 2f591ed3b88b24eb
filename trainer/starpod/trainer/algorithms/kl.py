"""Estimates of a KL divergence from the log-probabilities of samples (http://joschu.net/blog/kl-approx.html)."""

from __future__ import annotations

from typing import Literal

from torch import Tensor

from starpod.trainer.algorithms.ratios import clamped_difference


def kl_divergence(estimator: Literal["k1", "k2", "k3"], logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
    """KL(policy || reference) in nats at each sample of the policy, of the shape given.

    With d = logprobs - ref_logprobs, held within 20: k1 = d, unbiased but noisy; k2 = d^2 / 2, biased, its gradient is
    right; k3 = exp(-d) + d - 1, unbiased and never negative.
    """
    difference = clamped_difference(logprobs, ref_logprobs)
    if estimator == "k1":
        return difference
    if estimator == "k2":
        return difference.square() / 2
    # exp(-d) - 1 loses its digits near d = 0, where the whole thing is about d^2 / 2.
    return (-difference).expm1() + difference
