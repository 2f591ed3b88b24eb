"""Weights of tokens that another policy sampled."""

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import TypeAdapter

from starpod.trainer.algorithms.losses import correction_weights, proximal_logprobs
from starpod.trainer.algorithms.sections import Correction, NoWeights, TruncatedWeights
from tests.trainer.algorithms.builders import a_rollout, doubles, random_doubles, random_layout

MODES: list[dict[str, Any]] = [
    {},
    {"mode": "off"},
    {"mode": "bypass"},
    {"mode": "icepop"},
    {"level": "sequence"},
    {"mode": "mis"},
    {"mode": "mis", "level": "token", "low": 0.5},
    {"mode": "geometric"},
]
MASK = torch.tensor([[True, False, True, True]])


a_correction = TypeAdapter[Correction](Correction).validate_python


def weights(ratios: list[float], **options: Any) -> list[float]:
    old = doubles(ratios).log()
    items: list[float] = correction_weights(a_correction(options), old, torch.zeros_like(old), MASK)[0].tolist()
    return items


E = 2.0**0.1


@pytest.mark.parametrize(
    ("options", "ratios", "expected"),
    [
        # min(w, cap).
        ({}, [0.1, 7.0, 1.5, 9.0], [0.1, 1, 1.5, 2]),
        ({"cap": 4.0}, [0.1, 7.0, 1.5, 9.0], [0.1, 1, 1.5, 4]),
        # The product of the tokens is 0.75, and 3.
        ({"level": "sequence"}, [0.5, 7.0, 1.5, 1.0], [0.75, 1, 0.75, 0.75]),
        ({"level": "sequence"}, [2.0, 7.0, 1.5, 1.0], [2, 1, 2, 2]),
        # w up to 3, else 0; products of 0.075, 2.7 and 3.3.
        ({"mode": "mis"}, [0.05, 7.0, 1.5, 1.0], [0.075, 1, 0.075, 0.075]),
        ({"mode": "mis"}, [1.8, 7.0, 1.5, 1.0], [2.7, 1, 2.7, 2.7]),
        ({"mode": "mis"}, [2.2, 7.0, 1.5, 1.0], [0, 1, 0, 0]),
        ({"mode": "mis", "level": "token"}, [0.1, 7.0, 2.9, 3.1], [0.1, 1, 2.9, 0]),
        ({"mode": "mis", "low": 0.1}, [0.05, 7.0, 1.5, 1.0], [0, 1, 0, 0]),
        # w within [0.5, 5], else 0 (arXiv 2510.18855).
        ({"mode": "icepop"}, [0.49, 7.0, 0.51, 4.9], [0, 1, 0.51, 4.9]),
        ({"mode": "icepop", "low": 0.2, "cap": 4.5}, [0.49, 7.0, 0.1, 4.9], [0.49, 1, 0, 0]),
        # The geometric mean of 2, 1/2 and 2^0.3 is 2^0.1, or 1.072; without the last, 1.
        ({"mode": "geometric"}, [2.0, 7.0, 0.5, E**3], [0, 1, 0, 0]),
        ({"mode": "geometric", "cap": 1.08}, [2.0, 7.0, 0.5, E**3], [1, 1, 1, 1]),
        ({"mode": "geometric"}, [2.0, 7.0, 0.5, 1.0], [1, 1, 1, 1]),
        ({"mode": "geometric"}, [0.9, 7.0, 1.0, 1.0], [0, 1, 0, 0]),
        ({"mode": "off"}, [0.1, 7.0, 1.5, 9.0], [1, 1, 1, 1]),
    ],
)
def test_golden_weights(options: dict[str, Any], ratios: list[float], expected: list[float]) -> None:
    assert weights(ratios, **options) == pytest.approx(expected)


@pytest.mark.parametrize("options", MODES)
@given(seed=st.integers(0, 1000))
@settings(max_examples=10)
def test_fresh_tokens_weigh_exactly_one(options: dict[str, Any], seed: int) -> None:
    mask, _ = random_layout(seed, 3, 5)
    old = random_doubles(seed, 3, 5).float()
    assert correction_weights(a_correction(options), old, old.clone(), mask).eq(1).all()


@pytest.mark.parametrize("options", MODES)
def test_weights_stay_finite_and_within_the_cap(options: dict[str, Any]) -> None:
    config = a_correction(options)
    items = correction_weights(config, doubles([800.0, 0, -800.0, 3.0]), doubles([-800.0, 0, 800.0, 3.0]), MASK)
    assert items.isfinite().all() and items.ge(0).all()
    assert items.max() <= getattr(config, "cap", 1.0) * (1 + 1e-9)


def test_three_policies_are_distinguished() -> None:
    rollout = a_rollout([[0.0, 1.0]], groups=[0], old=[[math.log(0.5), math.log(0.2)]])
    rollout = replace(rollout, sampler_logprobs_BT=doubles([math.log(0.4), math.log(0.4)]))
    tis, bypass = TruncatedWeights(), NoWeights(mode="bypass")
    logprobs = rollout.old_logprobs_BT, rollout.sampler_logprobs_BT
    assert correction_weights(tis, *logprobs, rollout.mask_BT).tolist() == [pytest.approx([1.25, 0.5])]
    assert torch.equal(proximal_logprobs(tis, rollout), rollout.old_logprobs_BT)
    assert correction_weights(bypass, *logprobs, rollout.mask_BT).tolist() == [[1, 1]]
    assert torch.equal(proximal_logprobs(bypass, rollout), rollout.sampler_logprobs_BT)
