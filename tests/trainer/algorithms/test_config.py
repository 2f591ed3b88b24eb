"""Presets, what goes before them, and what is refused with a sentence."""

import re
from operator import attrgetter
from typing import Any

import pytest
from pydantic import ValidationError

from starpod.trainer.algorithms.config import AlgorithmConfig
from starpod.trainer.algorithms.estimators import GiGPO
from starpod.trainer.configuration.section import packaged_configs

PRESETS = packaged_configs("algorithm")


@pytest.mark.parametrize("name", PRESETS)
def test_a_word_names_a_preset_and_a_written_configuration_reads_back_the_same(name: str) -> None:
    config = AlgorithmConfig.model_validate(name)
    assert config == AlgorithmConfig(preset=name)
    assert (config == AlgorithmConfig()) == (name == "starpo-s")
    assert AlgorithmConfig.model_validate(config.to_dict()) == config
    assert AlgorithmConfig.model_validate_json(config.model_dump_json()) == config


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        # What is given goes before the preset, key by key.
        ({"preset": "starpo-s", "filter": {"value": 0.5}}, {"filter.strategy": "top_fraction", "filter.value": 0.5}),
        ({"preset": "starpo-s", "loss": {"clip_high": 0.3}}, {"loss.clip_high": 0.3, "loss.dual_clip": 3.0}),
        ({"preset": "starpo-ppo", "kl": {"coefficient": 0.01}}, {"kl.where": "reward"}),
        ({"preset": "gigpo", "advantage": GiGPO(weight=0.5)}, {"advantage.weight": 0.5}),
        # Another kind begins from its own defaults.
        ({"preset": "starpo-s", "filter": {"strategy": "top_p"}}, {"filter.value": 0.9}),
        ({"preset": "starpo-s", "filter": {"strategy": "none"}}, {"filter.value": None}),
        ({"preset": "starpo-ppo", "kl": "off"}, {"kl.where": "off"}),
        ({"preset": "starpo-ppo", "kl": {"where": "loss"}}, {"kl.estimator": "k3", "kl.coefficient": 0.001}),
        ({"preset": "loop", "correction": {"mode": "tis"}}, {"correction.cap": 2.0}),
        # What follows from the estimator follows it.
        ({}, {"whiten": True, "advantage.gamma": 1.0, "advantage.lam": 1.0}),
        ({"advantage": "grpo"}, {"whiten": False}),
        ({"advantage": "bilevel_gae"}, {"advantage.turn_gamma": 0.95}),
        ({"advantage": {"kind": "bilevel_gae", "turn_gamma": 1.0}}, {"advantage.turn_gamma": 1.0}),
        ({"preset": "dapo", "advantage": "reinforce_plus_plus"}, {"whiten": True}),
        ({"loss": "gspo"}, {"loss.clip_high": 4e-4, "loss.average": "seq-mean-token-mean", "loss.dual_clip": None}),
        ({"loss": {"kind": "gspo", "clip_high": 1e-3}}, {"loss.clip_low": 3e-4, "loss.clip_high": 1e-3}),
        ({"loss": "dppo"}, {"correction.mode": "bypass", "loss.average": "seq-mean-token-sum-norm"}),
        (
            {"loss": {"kind": "dppo", "divergence": "kl"}, "correction": "tis"},
            {"loss.divergence_low": 0.05, "correction.cap": 2.0},
        ),
        ({"preset": "seeupo"}, {"loss.clip_low": 0.2}),
        # What a preset needs.
        ({"preset": "starpo-s"}, {"needs_critic": True, "needs_reference": False, "needs_state_key": False}),
        ({"preset": "starpo-ppo"}, {"needs_critic": True, "needs_reference": True}),
        ({"preset": "gigpo"}, {"needs_critic": False, "needs_state_key": True}),
        ({"preset": "gigpo", "advantage": {"weight": 0}}, {"needs_state_key": False}),
    ],
)
def test_what_is_not_given_is_filled_in(values: dict[str, Any], expected: dict[str, Any]) -> None:
    config = AlgorithmConfig.model_validate(values)
    assert {name: attrgetter(name)(config) for name in expected} == expected


@pytest.mark.parametrize(
    ("values", "sentence"),
    [
        ("starpos", "no algorithm preset 'starpos'; did you mean starpo-s"),
        ({"preset": "GRPO"}, "no algorithm preset 'GRPO'; did you mean dr-grpo or starpo-grpo?"),
        ({"preset": ""}, "no algorithm preset ''; there are dapo"),
        ({"preset": None}, "valid string"),
        ({"preset": "dapo", "whiten": True}, "normalise twice"),
        ({"preset": "dapo", "advantage": "reinforce_plus_plus", "whiten": False}, "leave algorithm.whiten on"),
        ({"advantage": {"baseline": "trajectory", "lam": 0.95}}, "set lam to 1"),
        ({"preset": "dapo", "filter_loss_scaling": "sqrt"}, "name a filter"),
        ({"filter": {"value": 1.5}}, "less than or equal to 1"),
        ({"filter": {"value": 0}}, "greater than 0"),
        ({"dynamic_sampling": {"max_rounds": 9}}, "no group is replaced"),
        ({"kl": {"where": "loss", "estimator": "k1"}}, "'k2' or 'k3'"),
        ({"loss": {"clip_decay": 0.9, "clip_high": [0.2]}}, "drop one of them"),
        ({"loss": {"clip_low": 1.0}}, "less than 1"),
        ({"loss": {"dual_clip": 1.0}}, "greater than 1"),
        ({"correction": {"mode": "icepop", "level": "sequence"}}, "Extra inputs"),
        ({"clip_heigh": 0.28}, "Extra inputs"),
    ],
)
def test_contradictions_are_refused_with_a_sentence(values: Any, sentence: str) -> None:
    with pytest.raises(ValidationError, match=re.escape(sentence)):
        AlgorithmConfig.model_validate(values)
