"""Presets, what goes before them, and what is refused with a sentence."""

from typing import Any

import pytest
from pydantic import ValidationError

from starpod.trainer.algorithms.config import PRESETS, AlgorithmConfig
from starpod.trainer.algorithms.sections import GiGPOConfig


def refusal(values: Any) -> str:
    with pytest.raises(ValidationError) as caught:
        AlgorithmConfig.model_validate(values)
    return str(caught.value)


def test_all_presets_are_there() -> None:
    assert set(PRESETS) == {
        "starpo-ppo",
        "starpo-grpo",
        "starpo-s",
        "score",
        "seeupo",
        "dapo",
        "dr-grpo",
        "loop",
        "gigpo",
        "hiper",
        "pyvision",
        "ragen2",
    }
    assert AlgorithmConfig() == AlgorithmConfig(preset="starpo-s")


@pytest.mark.parametrize("name", PRESETS)
def test_a_word_names_a_preset_and_a_written_configuration_reads_back_the_same(name: str) -> None:
    config = AlgorithmConfig.model_validate(name)
    assert config == AlgorithmConfig(preset=name)
    assert AlgorithmConfig.model_validate(config.to_dict()) == config
    assert AlgorithmConfig.model_validate_json(config.model_dump_json()) == config


def test_starpo_s_is_the_papers() -> None:
    config = AlgorithmConfig(preset="starpo-s")
    assert (config.clip_low, config.clip_high, config.kl.where) == (0.2, 0.28, "off")
    assert (config.gamma, config.lam, config.entropy_coefficient) == (1.0, 1.0, 0.001)
    assert (config.filter.strategy, config.filter.value) == ("top_fraction", 0.25)
    assert config.needs_critic and not config.needs_reference and not config.needs_state_key


def test_vanilla_starpo_has_a_kl_penalty_and_a_symmetric_clip() -> None:
    config = AlgorithmConfig(preset="starpo-ppo")
    assert (config.clip_low, config.clip_high) == (0.2, 0.2)
    assert (config.kl.where, config.kl.estimator, config.kl.coefficient) == ("reward", "k1", 0.001)
    assert config.needs_reference and config.filter.strategy == "none"


def test_gigpo_needs_state_keys_for_its_steps() -> None:
    assert AlgorithmConfig(preset="gigpo").needs_state_key
    assert not AlgorithmConfig(preset="gigpo", gigpo={"weight": 0}).needs_state_key
    assert not AlgorithmConfig(preset="gigpo").needs_critic


def test_what_is_given_goes_before_the_preset_key_by_key() -> None:
    config = AlgorithmConfig(preset="starpo-s", filter={"value": 0.5}, clip_high=0.3)
    assert (config.filter.strategy, config.filter.value, config.clip_high) == ("top_fraction", 0.5, 0.3)
    assert AlgorithmConfig(preset="starpo-ppo", kl={"coefficient": 0.01}).kl.where == "reward"


def test_another_kind_begins_from_its_own_defaults() -> None:
    ragen = AlgorithmConfig(preset="starpo-s", filter={"strategy": "top_p"})
    assert ragen.filter.value == 0.9
    assert AlgorithmConfig(preset="starpo-s", filter={"strategy": "none"}).filter.value is None
    assert AlgorithmConfig(preset="starpo-ppo", kl={"where": "off"}).kl.coefficient == 0
    loss = AlgorithmConfig(preset="starpo-ppo", kl={"where": "loss"})
    assert (loss.kl.estimator, loss.kl.coefficient) == ("k3", 0.001)
    assert AlgorithmConfig(preset="loop", correction={"mode": "truncated"}).correction.cap == 2.0


def test_what_follows_from_the_estimator_follows_it() -> None:
    assert AlgorithmConfig().whiten and not AlgorithmConfig(advantage="grpo").whiten
    assert AlgorithmConfig(advantage="bilevel_gae").turn_gamma == 0.95
    assert AlgorithmConfig(advantage="bilevel_gae", turn_gamma=1.0).turn_gamma == 1.0
    assert AlgorithmConfig(preset="dapo", advantage="reinforce_plus_plus").whiten


def test_yamls_bare_off_is_a_word() -> None:
    config = AlgorithmConfig.model_validate(
        {"kl": {"where": False}, "turn_clip": {"kind": False}, "correction": {"mode": False}}
    )
    assert (config.kl.where, config.turn_clip.kind, config.correction.mode) == ("off", "off", "off")


@pytest.mark.parametrize(
    ("values", "sentence"),
    [
        ("starpos", "no algorithm preset 'starpos'; did you mean starpo-s"),
        ({"preset": "GRPO"}, "no algorithm preset 'GRPO'; did you mean starpo-grpo or dr-grpo?"),
        ({"preset": ""}, "no algorithm preset ''; there are starpo-ppo"),
        ({"preset": None}, "no algorithm preset None"),
        ({"preset": "dapo", "whiten": True}, "normalise twice"),
        ({"preset": "dapo", "advantage": "reinforce_plus_plus", "whiten": False}, "leave algorithm.whiten on"),
        ({"preset": "dapo", "baseline": "trajectory"}, "grpo does not use it"),
        ({"advantage": "bilevel_gae", "baseline": "trajectory"}, "set advantage to gae"),
        ({"baseline": "trajectory", "lam": 0.95}, "set algorithm.lam to 1"),
        ({"preset": "dapo", "value_clip": 0.2}, "set value_clip to null"),
        ({"preset": "dapo", "bootstrap_truncated": True}, "asks a critic"),
        ({"preset": "dapo", "gamma": 0.9}, "set algorithm.gamma to 1"),
        ({"preset": "dapo", "lam": 0.9}, "set algorithm.lam to 1"),
        ({"turn_gamma": 0.95}, "belong to bilevel_gae"),
        ({"policy_loss": "gspo", "turn_clip": {"kind": "turn_ratio"}}, "one ratio per episode"),
        ({"preset": "dapo", "filter_loss_scaling": "sqrt"}, "name a filter"),
        ({"gigpo": {"weight": 2.0}}, "set advantage to gigpo"),
        ({"kl": {"coefficient": 0.01}}, "kl.where is off"),
        ({"preset": "starpo-ppo", "kl": {"coefficient": 0}}, "coefficient of 0"),
        ({"kl": {"where": "loss", "estimator": "k1"}}, "use k2 or k3"),
        ({"filter": {"value": 1.5}}, "at most 1"),
        ({"filter": {"value": 0}}, "greater than 0"),
        ({"filter": {"strategy": "top_k"}}, "needs a value"),
        ({"filter": {"strategy": "top_k", "value": 0.25}}, "number of groups"),
        ({"filter": {"strategy": "none", "value": 0.25}}, "keeps every group"),
        ({"preset": "dapo", "filter": {"value": 0.25}}, "name a strategy"),
        ({"filter": {"strategy": "top_p", "largest": False}}, "largest scores until"),
        ({"filter": {"strategy": "top_p", "include_zero": True}}, "adds nothing to strategy top_p"),
        ({"kl": {"estimator": "k3"}}, "nothing is estimated"),
        ({"preset": "starpo-grpo", "value_coefficient": 1.0}, "weighs a critic's loss"),
        ({"preset": "dapo", "filter": {"score": "entropy"}}, "how groups are chosen"),
        ({"preset": "dapo", "filter": {"largest": False}}, "how groups are chosen"),
        ({"preset": "dapo", "filter": {"include_zero": True}}, "how groups are chosen"),
        ({"dynamic_sampling": {"max_rounds": 9}}, "nothing is asked for again"),
        ({"turn_clip": {"kind": "decay", "low": [0.2], "high": [0.2]}, "clip_high": 0.3}, "take the place of clip_low"),
        ({"turn_clip": {"limit": 1.5}}, "turn_clip.limit has no meaning with kind off"),
        ({"turn_clip": {"kind": "prefix_guard", "decay": 0.5}}, "turn_clip.decay has no meaning"),
        ({"turn_clip": {"kind": "prefix_guard", "limit": None}}, "needs a limit"),
        ({"turn_clip": {"kind": "decay", "low": [0.2]}}, "both low and high"),
        ({"turn_clip": {"kind": "decay", "decay": 0.5, "low": [0.2], "high": [0.2]}}, "either decay"),
        ({"correction": {"mode": "off", "cap": 2.0}}, "drop cap"),
        ({"correction": {"mode": "bypass", "level": "sequence"}}, "uses no weights"),
        ({"correction": {"cap": None}}, "needs a cap"),
        ({"clip_low": 1.0}, "less than 1"),
        ({"dual_clip": 1.0}, "greater than 1"),
        ({"clip_heigh": 0.28}, "Extra inputs"),
        ({"advantage": "ppo"}, "'gae'"),
    ],
)
def test_contradictions_are_refused_with_a_sentence(values: Any, sentence: str) -> None:
    assert sentence in refusal(values)


def test_a_presets_own_bounds_do_not_stand_in_the_way_of_bounds_by_turn() -> None:
    for preset in set(PRESETS) - {"seeupo"}:  # which sees one turn at a time
        config = AlgorithmConfig(preset=preset, turn_clip={"kind": "decay", "low": [0.2, 0.1], "high": [0.2, 0.1]})
        assert AlgorithmConfig.model_validate(config.to_dict()) == config


def test_sections_can_be_given_as_objects() -> None:
    config = AlgorithmConfig(preset="gigpo", gigpo=GiGPOConfig(weight=0.5))
    assert config.gigpo.weight == 0.5
