"""Policies without a model, on observations made by hand."""

import random

import pytest

from starpod.client import Observation
from starpod.trainer.agents.scripted import choose_randomly, find_reference
from starpod.trainer.configuration.section import ConfigError

RNG = random.Random(0)


def seen(*valid: str) -> Observation:
    return Observation(("a page",), valid_actions=valid)


def test_random_moves_are_those_that_are_valid_now_before_those_that_have_names() -> None:
    assert {choose_randomly(seen("click[a]", "click[b]"), ("Left",), RNG) for _ in range(40)} == {
        "click[a]",
        "click[b]",
    }
    assert choose_randomly(seen(), ("Left",), RNG) == "Left"
    assert choose_randomly(seen(), (), RNG) is None


def test_an_unknown_reference_policy_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ConfigError, match="'walks'; did you mean walk"):
        find_reference("walks")
