"""Estimators without a critic give the same advantages as their earlier, separate implementations."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from starpod.trainer.algorithms.advantages import compute_advantages
from starpod.trainer.algorithms.config import AlgorithmConfig
from starpod.trainer.data.batch import RolloutBatch
from tests.trainer.algorithms.builders import a_rollout, random_doubles, random_layout

RECORDED: dict[str, list[float]] = json.loads(Path(__file__).with_name("estimators.json").read_text())
"""Of every sampled token, in order."""

CASES: dict[str, dict[str, Any]] = {
    "grpo": {"preset": "dapo"},
    "dr_grpo": {"preset": "dr-grpo"},
    "dr_grpo, KL in the reward": {"preset": "dr-grpo", "kl": {"where": "reward", "coefficient": 0.1}},
    "maxrl": {"preset": "dapo", "advantage": "maxrl"},
    "rloo": {"preset": "dapo", "advantage": "rloo"},
    "loop": {"preset": "loop"},
    "reinforce_plus_plus": {"preset": "dapo", "advantage": {"kind": "reinforce_plus_plus", "gamma": 0.9}},
    "reinforce_plus_plus_baseline": {"preset": "dapo", "advantage": "reinforce_plus_plus_baseline"},
    "gigpo": {"preset": "gigpo", "kl": {"where": "off"}},
    "gigpo, half its steps": {"preset": "gigpo", "kl": {"where": "off"}, "advantage": {"weight": 0.5, "gamma": 0.8}},
    "gigpo, normalised": {"preset": "gigpo", "kl": {"where": "off"}, "advantage": {"normalise": True}},
    "gigpo without its steps": {"preset": "gigpo", "kl": {"where": "off"}, "advantage": {"weight": 0}},
}


def a_mixed_rollout(seed: int = 7) -> RolloutBatch:
    """Seven episodes of up to nine tokens in three groups, one with a single member. States recur within groups."""
    mask_BT, turns_BT = random_layout(seed, 7, 9)
    rewards_BT = torch.where(mask_BT, random_doubles(seed + 1, 7, 9).round(decimals=1), 0.0)
    most = int(turns_BT.max()) + 1
    return a_rollout(
        rewards_BT.tolist(),
        groups=[3, 11, 3, 5, 11, 3, 11],
        mask=mask_BT.int().tolist(),
        turns=turns_BT.tolist(),
        old=(-random_doubles(seed + 2, 7, 9).abs()).tolist(),
        reference=(-random_doubles(seed + 3, 7, 9).abs()).tolist(),
        state_key=[[b"ABC"[(row + turn) % 3 : (row + turn) % 3 + 1] for turn in range(most)] for row in range(7)],
    )


@pytest.mark.parametrize("name", CASES)
def test_an_estimator_equals_what_it_was(name: str) -> None:
    rollout = a_mixed_rollout()
    found_BT = compute_advantages(AlgorithmConfig.model_validate(CASES[name]), rollout).advantages_BT
    # Equal to the last bit on the machine that recorded them; another one may add up in another order.
    assert found_BT[rollout.mask_BT].tolist() == pytest.approx(RECORDED[name], rel=1e-14, abs=1e-14)
    assert not found_BT[~rollout.mask_BT].any()
