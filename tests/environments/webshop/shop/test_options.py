"""Presets, the options they set, and which goal an episode gets."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from starpod.env_server.authoring.environment import OptionsError
from starpod.environments.webshop.catalogue.goals import Goals
from starpod.environments.webshop.shop.options import PRESETS, WebShopOptions
from starpod.environments.webshop.shop.starts import choose_goal
from tests.environments.webshop.memory_store import synthetic_store


def goals() -> Goals:
    return synthetic_store("synthetic").goals("synthetic")


def test_presets_set_what_was_not_given() -> None:
    assert WebShopOptions().model_dump() == WebShopOptions(preset="original").model_dump()
    for preset, values in PRESETS.items():
        options = WebShopOptions.model_validate({"preset": preset})
        assert options.model_dump() == {**WebShopOptions().model_dump(), **values, "preset": preset}
        assert WebShopOptions.model_validate(options.model_dump(mode="json")) == options
    told = WebShopOptions.model_fields["preset"].description or ""
    assert "ragen: goals=synthetic, split=train, choose=seed, permute_goals=true" in told
    mixed = WebShopOptions(preset="verl_agent", reward="graded", split="test")
    assert (mixed.reward, mixed.reward_scale, mixed.split, mixed.choose) == ("graded", 10.0, "test", "uniform")


def test_options_that_make_no_sense_are_refused() -> None:
    refused: list[tuple[dict[str, object], str]] = [
        ({"preset": "paper"}, "preset"),
        ({"splits": "verl_agent", "split": "dev"}, "have no dev; choose one of test, train, all"),
        ({"split": "test", "choose": "weighted"}, "weighted draws are from all goals"),
        ({"permute_goals": True}, "choose uniform or seed"),
        ({"preset": "ragen", "observation": "html"}, "presentation ragen is of observation text"),
        ({"preset": "verl_agent", "num_prev_obs": 1}, "shows no earlier steps"),
        ({"reward_scale": 0}, "reward_scale"),
        ({"path": "/etc"}, "path"),
        ({"page_size": 51}, "page_size"),
    ]
    for options, why in refused:
        with pytest.raises(ValidationError, match=why):
            WebShopOptions.model_validate(options)


def chosen(seed: int, **options: object) -> int:
    """The index of the goal that a caller's seed leads to."""
    checked = WebShopOptions.model_validate({"goals": "synthetic", **options})
    return choose_goal(checked, goals(), random.Random(seed), seed)[1]


@given(st.integers(0, 2**64 - 1))
def test_splits_are_disjoint(seed: int) -> None:
    assert chosen(seed, goal=7) == 7
    assert 0 <= chosen(seed, split="test") < 500 <= chosen(seed, split="dev") < 1500 <= chosen(seed, split="train")
    assert (
        0 <= chosen(seed, split="test", splits="verl_agent") < 500 <= chosen(seed, preset="verl_agent") < len(goals())
    )
    assert chosen(seed, preset="agentgym") == seed % len(goals())
    assert chosen(seed, split="dev", choose="seed") == 500 + seed % 1000


def test_ragen_counts_goals_in_an_order_of_its_own() -> None:
    """Python's shuffle with seed 42, then test 0..499, val 500..1499, train the rest, by the caller's seed."""
    order = list(range(len(goals())))
    random.Random(42).shuffle(order)
    for seed in (0, 1, 499, 500, 12345, 2**63):
        assert chosen(seed, preset="ragen") == order[seed % (len(order) - 1500) + 1500]
        assert chosen(seed, preset="ragen", split="test") == order[seed % 500]
        assert chosen(seed, preset="ragen", split="dev") == order[seed % 1000 + 500]
    test, train = ({chosen(seed, preset="ragen", split=split) for seed in range(4000)} for split in ("test", "train"))
    assert len(test) == 500
    assert not test & train


def test_weighted_draws_take_what_the_original_takes() -> None:
    rng, twin = random.Random(3), random.Random(3)
    session, goal = choose_goal(WebShopOptions(goals="synthetic"), goals(), rng, 0)
    letters = "".join(twin.choices("abcdefghijklmnopqrstuvwxyz", k=10))
    assert (session, goal) == (letters, goals().draw(twin))
    assert rng.getstate() == twin.getstate()


def test_goals_that_are_not_there_are_said() -> None:
    with pytest.raises(OptionsError, match=f"beyond the last of {len(goals())} goals"):
        chosen(0, goal=len(goals()))
    few = goals().select(limit=40)
    with pytest.raises(OptionsError, match="starts at goal 500, and there are 40"):
        choose_goal(WebShopOptions(goals="synthetic", split="dev"), few, random.Random(0), 0)
    assert 0 <= choose_goal(WebShopOptions(split="test"), few, random.Random(0), 0)[1] < 40
