"""Filters of groups, and the sampling of replacements."""

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import TypeAdapter

from starpod.trainer.algorithms.config import AlgorithmConfig
from starpod.trainer.algorithms.filters import filter_groups, loss_scale, needs_reask, select, verdicts
from starpod.trainer.algorithms.sections import DynamicSamplingConfig, Filter
from starpod.trainer.data.episode import Episode
from starpod.trainer.data.group import Group
from starpod.trainer.diagnostics.metrics import episode_metrics
from tests.trainer.algorithms.builders import a_group
from tests.trainer.turns import a_turn

a_filter = TypeAdapter[Filter](Filter).validate_python


def kept(scores: list[float], **options: Any) -> list[int]:
    return select(a_filter(options), scores)


FIVE, FOUR, ZEROS = [0.5, 0.3, 0.1, 0.1, 0.0], [0.1, 0.4, 0.2, 0.3], [0.0, 0.4, 0.0, 0.0]


@pytest.mark.parametrize(
    ("strategy", "scores", "value", "expected"),
    [
        # The best that hold a share of the sum.
        ("top_p", FIVE, 0.9, [0, 1, 2]),
        ("top_p", [0.0, 0.1, 0.5, 0.1, 0.3], 0.9, [1, 2, 4]),
        ("top_p", FIVE, 1.0, [0, 1, 2, 3]),
        ("top_p", FIVE, 0.5, [0]),
        ("top_p", [0.6, 0.29, 0.11], 0.9, [0, 1]),  # 0.6 + 0.29 is within the slack of 0.9
        ("top_p", [0.6, 0.28, 0.12], 0.9, [0, 1, 2]),
        *(("top_p", scores, 0.9, []) for scores in ([0.0, 0.0], [])),
        # A share of all groups, rounded up, but not for an error of rounding: 0.07 * 100 > 7.
        ("top_fraction", FOUR, 0.25, [1]),
        ("top_fraction", FOUR, 0.26, [1, 3]),
        ("top_fraction", ZEROS, 0.5, [1]),
        ("top_fraction", [0.0, 0.0], 1.0, []),
        ("top_fraction", [1.0] * 100, 0.07, [*range(7)]),
        ("none", ZEROS, None, [0, 1, 2, 3]),
    ],
)
def test_what_a_strategy_keeps(strategy: str, scores: list[float], value: float | None, expected: list[int]) -> None:
    assert kept(scores, strategy=strategy, **({} if value is None else {"value": value})) == expected


def test_oversampled_groups_are_ranked_by_deviation_and_zeros_are_dropped() -> None:
    """PyVision-RL's golden numbers."""
    returns = [(1.0, 0.0, 1.0, 0.0), (1.2, 1.0, 1.0, 1.1), (0.0, 0.0, 0.0, 1.3), (0.0,) * 4]
    groups = [a_group(own, id=number) for number, own in enumerate(returns)]
    assert [group.reward_std for group in groups] == pytest.approx([0.577350, 0.095743, 0.65, 0], abs=1e-6)
    config = AlgorithmConfig.model_validate("pyvision").filter
    chosen = filter_groups(config, groups)
    assert [group.id for group in chosen] == [0, 2]
    why = verdicts(config, groups, chosen)[1].why
    told = "number 3 of 4; top_fraction 0.5 keeps 2, and always drops the 1 with deviation 0."
    assert why == f"Its reward_std of 0.0957 is {told}"


@given(st.lists(st.floats(0, 10), max_size=30), st.sampled_from(["top_fraction", "top_p"]), st.integers(1, 4))
def test_what_is_kept_is_in_order_and_at_least_as_good_as_what_is_not(
    scores: list[float], strategy: Any, quarters: int
) -> None:
    indices = kept(scores, strategy=strategy, value=quarters / 4)
    assert indices == sorted(set(indices))
    assert all(scores[index] > 1e-10 for index in indices)
    rest = [score for index, score in enumerate(scores) if index not in indices]
    if indices and rest:
        assert min(scores[index] for index in indices) >= max(rest)
    if any(score > 1e-10 for score in scores):
        assert indices
    assert set(indices) <= set(kept(scores, strategy=strategy, value=min(1, quarters / 4 + 0.05))), "a larger share"


# --- groups -----------------------------------------------------------------------------------------------------------


def test_starpo_s_keeps_the_most_uncertain_quarter() -> None:
    groups = [a_group(returns, id=index) for index, returns in enumerate([[1, 1], [1, 0], [0.1, 0], [0, 0]])]
    config = AlgorithmConfig().filter
    assert filter_groups(config, groups) == [groups[1]]
    scores = [group.reward_std for group in groups]
    assert scores == pytest.approx([0, math.sqrt(0.5), 0.1 * math.sqrt(0.5), 0])
    assert filter_groups(config, groups[::3]) == filter_groups(config, []) == []


def test_the_loss_can_shrink_with_what_was_kept() -> None:
    def scale(how: str) -> float:
        return loss_scale(AlgorithmConfig(filter_loss_scaling=how), 0.25)

    assert (scale("none"), scale("linear"), scale("sqrt")) == (1.0, 0.25, 0.5)


def test_uniform_groups_are_asked_for_again() -> None:
    groups = [a_group(returns) for returns in ([1.0, 1.0], [1.0, 0.0], [0.0, 0.0], [1.0], [0.0, 0.0])]
    groups[4].branches = a_group([0.0, 1.0]).episodes
    assert needs_reask(DynamicSamplingConfig(enabled=True), groups) == [True, False, True, True, False]
    assert needs_reask(DynamicSamplingConfig(), groups) == [False] * 5


# --- luck -------------------------------------------------------------------------------------------------------------


def replies(number: int, returns: list[float], *texts: list[list[int]]) -> Group:
    """A group whose members gave these replies, and earned these returns; the first half of each by shaping."""
    members = []
    for member, (value, own) in enumerate(zip(returns, texts, strict=True)):
        turns = [a_turn(reply, parts={"environment": value / 2, "bonus": value / 2}) for reply in own]
        members.append(Episode(number, member, "bandit-v1", turns=turns))
    return Group(number, members)


LUCK = replies(0, [1.0, 0.0, 1.0], [[5, 6]], [[5, 6]], [[5, 6]])
CHOICE = replies(1, [1.0, 0.0, 0.5], [[5, 6]], [[5, 7]], [[5, 6]])
LATER = replies(2, [1.0, 0.8], [[5], [6]], [[5], [7]])
EQUAL = replies(3, [1.0, 1.0], [[5]], [[5]])


def test_groups_of_one_reply_are_distinguished_from_groups_of_several() -> None:
    assert [group.identical for group in (LUCK, CHOICE, LATER, EQUAL)] == [True, False, False, True]
    assert not Group(4, LUCK.episodes[:1]).identical and not Group(5, []).identical
    # Three groups have different rewards, one of them by chance.
    metrics = episode_metrics([LUCK, CHOICE, LATER, EQUAL])
    assert metrics["collect/identical_fraction"] == pytest.approx(1 / 3)
    assert metrics["collect/own_std_in_group"] == pytest.approx(metrics["collect/reward_std_in_group"] / 2)
    assert "collect/identical_fraction" not in episode_metrics([EQUAL])


@pytest.mark.parametrize(
    "strategy", [{"strategy": "none"}, {"strategy": "top_fraction", "value": 1.0}, {"strategy": "top_p", "value": 1.0}]
)
def test_random_differences_can_be_left_out(strategy: dict[str, Any]) -> None:
    groups = [LUCK, CHOICE, LATER]
    assert filter_groups(a_filter(strategy), groups) == groups
    assert filter_groups(a_filter({**strategy, "drop_identical": True}), groups) == [CHOICE, LATER]
