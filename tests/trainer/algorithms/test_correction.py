"""Weights of tokens that another policy sampled."""

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from starpod.trainer.algorithms.losses import correction_weights, proximal_logprobs
from starpod.trainer.algorithms.sections import CorrectionConfig
from tests.trainer.algorithms.builders import a_rollout, doubles, random_doubles, random_layout

MODES: list[dict[str, Any]] = [
    {},
    {"mode": "off"},
    {"mode": "bypass"},
    {"mode": "masked"},
    {"level": "sequence"},
    {"mode": "masked", "level": "sequence", "cap": 3.0},
]
MASK = torch.tensor([[True, False, True, True]])


def weights(ratios: list[float], **options: Any) -> list[float]:
    old = doubles(ratios).log()
    items: list[float] = correction_weights(CorrectionConfig(**options), old, torch.zeros_like(old), MASK)[0].tolist()
    return items


def test_weights_are_the_ratio_of_proximal_to_sampler_up_to_a_cap() -> None:
    assert weights([0.1, 7.0, 1.5, 9.0]) == pytest.approx([0.1, 1, 1.5, 2])
    assert weights([0.1, 7.0, 1.5, 9.0], cap=4.0) == pytest.approx([0.1, 1, 1.5, 4])
    assert weights([0.1, 7.0, 1.5, 9.0], mode="masked") == pytest.approx([0, 1, 1.5, 0])
    assert weights([0.1, 7.0, 1.5, 9.0], mode="off") == [1, 1, 1, 1]


def test_an_episode_can_have_the_product_of_its_tokens() -> None:
    assert weights([0.5, 7.0, 1.5, 1.0], level="sequence") == pytest.approx([0.75, 1, 0.75, 0.75])
    assert weights([2.0, 7.0, 1.5, 1.0], level="sequence") == pytest.approx([2, 1, 2, 2])
    assert weights([2.0, 7.0, 1.5, 1.0], level="sequence", mode="masked") == pytest.approx([0, 1, 0, 0])


@pytest.mark.parametrize("options", MODES)
@given(seed=st.integers(0, 1000))
@settings(max_examples=10)
def test_fresh_tokens_weigh_exactly_one(options: dict[str, Any], seed: int) -> None:
    mask, _ = random_layout(seed, 3, 5)
    old = random_doubles(seed, 3, 5).float()
    assert correction_weights(CorrectionConfig(**options), old, old.clone(), mask).eq(1).all()


@pytest.mark.parametrize("options", MODES)
def test_weights_stay_finite_and_within_the_cap(options: dict[str, Any]) -> None:
    config = CorrectionConfig(**options)
    items = correction_weights(config, doubles([800.0, 0, -800.0, 3.0]), doubles([-800.0, 0, 800.0, 3.0]), MASK)
    assert items.isfinite().all() and items.ge(0).all()
    assert items.max() <= (config.cap or 1.0) * (1 + 1e-9)


def test_three_policies_are_told_apart() -> None:
    rollout = a_rollout([[0.0, 1.0]], groups=[0], old=[[math.log(0.5), math.log(0.2)]])
    rollout = replace(rollout, sampler_logprobs_BT=doubles([math.log(0.4), math.log(0.4)]))
    truncated, bypass = CorrectionConfig(), CorrectionConfig(mode="bypass")
    logprobs = rollout.old_logprobs_BT, rollout.sampler_logprobs_BT
    assert correction_weights(truncated, *logprobs, rollout.mask_BT).tolist() == [pytest.approx([1.25, 0.5])]
    assert torch.equal(proximal_logprobs(truncated, rollout), rollout.old_logprobs_BT)
    assert correction_weights(bypass, *logprobs, rollout.mask_BT).tolist() == [[1, 1]]
    assert torch.equal(proximal_logprobs(bypass, rollout), rollout.sampler_logprobs_BT)
