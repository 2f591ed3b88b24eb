"""Policies without a model, on observations made by hand."""

import random

import pytest

from starpod.client import Observation
from starpod.trainer.agents.scripted import choose_by_rule, choose_randomly

RNG = random.Random(0)


def seen(*valid: str) -> Observation:
    return Observation(("a page",), valid_actions=valid)


@pytest.mark.parametrize(
    ("valid", "chosen"),
    [
        (["search[a red shirt]"], "search[a red shirt]"),
        (["click[back to search]", "click[next >]", "click[a7]", "click[b2]"], "click[a7]"),
        (["click[back to search]", "click[< prev]", "click[next >]"], "click[back to search]"),
        (
            ["click[back to search]", "click[< prev]", "click[features]", "click[buy now]", "click[red]"],
            "click[buy now]",
        ),
    ],
)
def test_the_rule_searches_and_buys_the_first_product_as_it_is(valid: list[str], chosen: str) -> None:
    assert choose_by_rule(seen(*valid), (), RNG) == chosen


def test_the_rule_is_for_shops() -> None:
    for valid in ([], ["Left", "Right"], ["click[a]", "Left"]):
        with pytest.raises(ValueError, match="plays webshop"):
            choose_by_rule(seen(*valid), (), RNG)


def test_random_moves_are_those_that_are_valid_now_before_those_that_have_names() -> None:
    assert {choose_randomly(seen("click[a]", "click[b]"), ("Left",), RNG) for _ in range(40)} == {
        "click[a]",
        "click[b]",
    }
    assert choose_randomly(seen(), ("Left",), RNG) == "Left"
    assert choose_randomly(seen(), (), RNG) is None
