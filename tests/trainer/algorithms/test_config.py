"""Presets, what goes before them, and what is refused with a sentence."""

import re
from operator import attrgetter
from typing import Any

import pytest
from pydantic import ValidationError

from starpod.trainer.algorithms.config import PRESETS, AlgorithmConfig
from starpod.trainer.algorithms.sections import GiGPOConfig


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
        ({"preset": "starpo-s", "clip_high": 0.3}, {"objective.clip_high": 0.3, "objective.clip_low": 0.2}),
        ({"preset": "starpo-ppo", "kl": {"coefficient": 0.01}}, {"kl.where": "reward"}),
        ({"preset": "gigpo", "gigpo": GiGPOConfig(weight=0.5)}, {"estimator.gigpo.weight": 0.5}),
        # Another kind begins from its own defaults.
        ({"preset": "starpo-s", "filter": {"strategy": "top_p"}}, {"filter.value": 0.9}),
        ({"preset": "starpo-s", "filter": {"strategy": "none"}}, {"filter.value": None}),
        ({"preset": "starpo-ppo", "kl": {"where": "off"}}, {"kl.coefficient": 0}),
        ({"preset": "starpo-ppo", "kl": {"where": "loss"}}, {"kl.estimator": "k3", "kl.coefficient": 0.001}),
        ({"preset": "loop", "correction": {"mode": "tis"}}, {"correction.cap": 2.0}),
        # What follows from the estimator follows it.
        ({}, {"whiten": True, "estimator.gamma": 1.0, "estimator.lam": 1.0}),
        ({"advantage": "grpo"}, {"whiten": False}),
        ({"advantage": "bilevel_gae"}, {"estimator.turn_gamma": 0.95}),
        ({"advantage": "bilevel_gae", "turn_gamma": 1.0}, {"estimator.turn_gamma": 1.0}),
        ({"preset": "dapo", "advantage": "reinforce_plus_plus"}, {"whiten": True}),
        ({"loss": "gspo"}, {"objective.clip_high": 4e-4, "loss_average": "seq-mean-token-mean"}),
        ({"loss": "gspo", "clip_high": 1e-3}, {"objective.clip_low": 3e-4, "objective.clip_high": 1e-3}),
        ({"loss": "dppo"}, {"correction.mode": "bypass", "loss_average": "seq-mean-token-sum-norm"}),
        ({"loss": "dppo", "divergence": "kl", "correction": "tis"}, {"correction.cap": 2.0}),
        ({"preset": "seeupo"}, {"objective.clip_low": 0.2}),
        # What a preset needs.
        ({"preset": "starpo-s"}, {"needs_critic": True, "needs_reference": False, "needs_state_key": False}),
        ({"preset": "starpo-ppo"}, {"needs_critic": True, "needs_reference": True}),
        ({"preset": "gigpo"}, {"needs_critic": False, "needs_state_key": True}),
        ({"preset": "gigpo", "gigpo": {"weight": 0}}, {"needs_state_key": False}),
    ],
)
def test_what_is_not_given_is_filled_in(values: dict[str, Any], expected: dict[str, Any]) -> None:
    config = AlgorithmConfig.model_validate(values)
    assert {name: attrgetter(name)(config) for name in expected} == expected


@pytest.mark.parametrize(
    ("values", "sentence"),
    [
        ("starpos", "no algorithm preset 'starpos'; did you mean starpo-s"),
        ({"preset": "GRPO"}, "no algorithm preset 'GRPO'; did you mean starpo-grpo or dr-grpo?"),
        ({"preset": ""}, "no algorithm preset ''; there are starpo-ppo"),
        ({"preset": None}, "no algorithm preset None"),
        ({"preset": "dapo", "whiten": True}, "normalise twice"),
        ({"preset": "dapo", "advantage": "reinforce_plus_plus", "whiten": False}, "leave algorithm.whiten on"),
        ({"preset": "dapo", "baseline": "trajectory"}, "belongs to gae, and algorithm.advantage is grpo"),
        ({"advantage": "bilevel_gae", "baseline": "trajectory"}, "set algorithm.advantage to gae"),
        ({"baseline": "trajectory", "lam": 0.95}, "set algorithm.lam to 1"),
        ({"preset": "dapo", "value_clip": 0.2}, "belongs to gae, bilevel_gae, hae"),
        ({"preset": "dapo", "bootstrap_truncated": True}, "belongs to gae, bilevel_gae, hae"),
        ({"preset": "dapo", "gamma": 0.9}, "belongs to gae, bilevel_gae, reinforce_plus_plus"),
        ({"turn_gamma": 0.9}, "belongs to bilevel_gae, hae, and algorithm.advantage is gae"),
        ({"loss": "gspo", "turn_clip": {"kind": "decay"}}, "turn_clip belongs to ppo"),
        ({"preset": "dapo", "filter_loss_scaling": "sqrt"}, "name a filter"),
        ({"gigpo": {"weight": 2.0}}, "set algorithm.advantage to gigpo"),
        ({"kl": {"coefficient": 0.01}}, "kl.where is off"),
        ({"preset": "starpo-ppo", "kl": {"coefficient": 0}}, "coefficient of 0"),
        ({"kl": {"where": "loss", "estimator": "k1"}}, "use k2 or k3"),
        ({"filter": {"value": 1.5}}, "at most 1"),
        ({"filter": {"value": 0}}, "greater than 0"),
        ({"filter": {"strategy": "top_p", "value": None}}, "needs a value"),
        ({"filter": {"strategy": "none", "value": 0.25}}, "keeps every group"),
        ({"preset": "dapo", "filter": {"value": 0.25}}, "name a strategy"),
        ({"kl": {"estimator": "k3"}}, "nothing is estimated"),
        ({"dynamic_sampling": {"max_rounds": 9}}, "no group is replaced"),
        ({"turn_clip": {"kind": "decay", "low": [0.2], "high": [0.2]}, "clip_high": 0.3}, "replace clip_low"),
        ({"turn_clip": {"decay": 0.5}}, "turn_clip.decay has no effect if kind is off"),
        ({"turn_clip": {"kind": "decay", "low": [0.2]}}, "both low and high"),
        ({"turn_clip": {"kind": "decay", "decay": 0.5, "low": [0.2], "high": [0.2]}}, "either decay"),
        ({"correction": {"mode": "off", "cap": 2.0}}, "drop cap"),
        ({"correction": {"mode": "bypass", "level": "sequence"}}, "uses no weights"),
        ({"correction": {"cap": None}}, "needs a cap"),
        ({"loss": "dppo", "correction": {"cap": 3.0}}, "mode bypass uses no weights"),
        ({"correction": {"mode": "mis", "low": None}}, "needs a lower bound"),
        ({"correction": {"low": 0.5}}, "set mode to mis or icepop"),
        ({"correction": {"mode": "icepop", "level": "sequence"}}, "has a fixed level"),
        ({"correction": {"mode": "geometric", "level": "token"}}, "has a fixed level"),
        ({"loss": "cispo", "clip_low": 0.1}, "belongs to ppo, gspo"),
        ({"loss": "dppo", "clip_high": 0.1}, "belongs to ppo, gspo, cispo"),
        ({"divergence": "kl"}, "set algorithm.loss to dppo"),
        ({"clip_low": 1.0}, "less than 1"),
        ({"dual_clip": 1.0}, "greater than 1"),
        ({"clip_heigh": 0.28}, "Extra inputs"),
        ({"advantage": "ppo"}, "no estimator 'ppo'"),
    ],
)
def test_contradictions_are_refused_with_a_sentence(values: Any, sentence: str) -> None:
    with pytest.raises(ValidationError, match=re.escape(sentence)):
        AlgorithmConfig.model_validate(values)


def test_a_presets_keys_are_those_of_its_own_methods() -> None:
    assert "bootstrap_truncated" not in AlgorithmConfig(preset="hiper", advantage="grpo").to_dict()
    assert AlgorithmConfig(preset="starpo-s", loss="gspo").to_dict()["dual_clip"] is None


def test_a_presets_own_bounds_do_not_stand_in_the_way_of_bounds_by_turn() -> None:
    for preset in set(PRESETS) - {"seeupo"}:  # which sees one turn at a time
        config = AlgorithmConfig(preset=preset, turn_clip={"kind": "decay", "low": [0.2, 0.1], "high": [0.2, 0.1]})
        assert AlgorithmConfig.model_validate(config.to_dict()) == config
