"""Measures of the similarity of replies."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from starpod.trainer.data.episode import Episode
from starpod.trainer.diagnostics.diversity import diversity, response_diversity
from tests.trainer.diagnostics.synthetic import turn


def member(group: int, *texts: str, thought: str | None = None) -> Episode:
    return Episode(group, 0, "bandit-v1", turns=[turn(text, thought=thought) for text in texts])


def test_pairs_of_one_group_are_compared_by_their_first_reply() -> None:
    batch = [member(1, "up", "x"), member(1, "up", "y"), member(1, "down"), member(2, "up"), member(2, "left")]
    # Group 1: one pair of three is equal; group 2: none of one.
    assert response_diversity(batch) == pytest.approx(3 / 4)


def test_layout_does_not_make_a_reply_different() -> None:
    assert response_diversity([member(1, "Go  Up\n"), member(1, "go up")]) == 0


@given(st.lists(st.sampled_from("abc"), min_size=2, max_size=8), st.integers(2, 4))
def test_more_groups_of_the_same_kind_leave_it_as_it_is(texts: list[str], times: int) -> None:
    batch = [member(group, text) for group in range(times) for text in texts]
    assert response_diversity(batch) == pytest.approx(response_diversity(batch[: len(texts)]))


def test_what_cannot_be_compared_is_left_out() -> None:
    assert diversity([]) == {}
    assert "collect/response_diversity" not in diversity([member(1, "up"), member(2, "up")])
    assert response_diversity([Episode(1, 0, "bandit-v1"), member(1, "up")]) is None


def test_a_template_and_a_reply_in_circles_show() -> None:
    thoughts = ["go right", "Go right", "go  right", "the hole is left"]
    metrics = diversity([member(1, "a b c d e", thought=thought) for thought in thoughts])
    assert metrics["diversity/distinct_reasoning"] == pytest.approx(2 / 4)
    assert metrics["diversity/most_common_reasoning"] == pytest.approx(3 / 4)
    assert metrics["diversity/distinct_trigrams"] == 1
    assert diversity([member(1, "go on " * 50)])["diversity/distinct_trigrams"] == pytest.approx(2 / 98)
