"""Reference policies that know an environment, on observations made by hand."""

import random

import pytest

from starpod.boards.policies import rule
from starpod.client import Observation

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
    assert rule(seen(*valid), (), RNG) == chosen


def test_the_rule_is_for_shops() -> None:
    for valid in ([], ["Left", "Right"], ["click[a]", "Left"]):
        with pytest.raises(ValueError, match="plays webshop"):
            rule(seen(*valid), (), RNG)
