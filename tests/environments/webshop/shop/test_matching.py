"""Colours as the original's reward sees them; token-set ratios and decisions as thefuzz 0.19 has them."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from starpod.environments.webshop.shop.matching import (
    THRESHOLD,
    Ratio,
    matches,
    normalise,
    normalise_pair,
    token_set_ratio,
)
from tests.golden import golden

RATIOS: tuple[Ratio, ...] = ("difflib", "levenshtein")

words = st.sampled_from(
    "large x-large xx-large 3x-large blue navy dark size pack of 12 (pack 10.5 wide \u00bd \u00e9 16\u00d724inch "
    "\u2605 a_b \u0130stanbul \u5317\u4eac 240 ounce".split()
)
texts = st.one_of(st.lists(words, max_size=5).map(" ".join), st.text(max_size=20))


def test_ratios_as_recorded() -> None:
    records = golden("fuzzy", "webshop_golden")
    flipped = 0
    for record in records:
        goal = str(tuple(record["goal"])) if record["goal_is_tuple"] else record["goal"]
        decision = record["score"] > THRESHOLD
        assert token_set_ratio(record["purchased"], goal) == record["score"], record
        assert matches(record["purchased"], goal) == decision, record
        flipped += matches(record["purchased"], goal, "levenshtein") != decision
    assert flipped == 0  # the recording's own finding


@pytest.mark.parametrize(
    ("purchased", "goal", "difflib", "levenshtein"),
    [
        ("10 ounce (pack of 12)", "240 ounce (pack of 1)", 84, 89),
        ("large", "x-large", 100, 100),
        ("large", "('size', 'x-large')", 100, 100),
        ("x-large", "('size', 'large')", 83, 83),
        ("3x-large", "2x-large", 88, 88),
        ("tea tree", "tree tea", 100, 100),
        ("b", "b | c", 100, 100),
        ("16\u00d724inch", "1624inch", 100, 100),
        ("\u5317\u4eac", "\u5317\u4eac", 100, 100),
        ("\u2605", "\u2605", 0, 0),
        ("", "", 0, 0),
        ("\u00bd", "\u00bd", 0, 0),
    ],
)
def test_known_pairs(purchased: str, goal: str, difflib: int, levenshtein: int) -> None:
    assert [token_set_ratio(purchased, goal, ratio) for ratio in RATIOS] == [difflib, levenshtein]


@given(texts, texts, st.sampled_from(RATIOS))
def test_a_decision_is_what_the_score_says(purchased: str, goal: str, ratio: Ratio) -> None:
    score = token_set_ratio(purchased, goal, ratio)
    assert 0 <= score <= 100
    assert matches(purchased, goal, ratio) == (score > THRESHOLD)


@given(st.lists(st.sampled_from("navy dark pack 12 wide".split()), min_size=1), texts, st.sampled_from(RATIOS))
def test_all_the_words_of_one_side_are_enough(common: list[str], more: str, ratio: Ratio) -> None:
    assert token_set_ratio(" ".join(common), " ".join([*common, more]), ratio) == 100
    assert token_set_ratio(" ".join([more, *common]), " ".join(common), ratio) == 100


@settings(max_examples=15)
@given(st.lists(words, min_size=30, max_size=60), st.lists(words, min_size=30, max_size=60), st.sampled_from(RATIOS))
def test_long_texts_are_decided_by_their_scores_too(purchased: list[str], goal: list[str], ratio: Ratio) -> None:
    ours, theirs = (" ".join(f"{word}{place}" for place, word in enumerate(side)) for side in (purchased, goal))
    assert matches(ours, theirs, ratio) == (token_set_ratio(ours, theirs, ratio) > THRESHOLD)


def test_colours_as_recorded() -> None:
    records = golden("colors", "webshop_golden")
    assert [normalise(record["input"]) for record in records] == [record["output"] for record in records]


def test_the_first_colour_of_the_list_that_is_a_part() -> None:
    values = ["", "black forest", "violet lavender", "steelivy fuchsia", "123alabaster", "webshop", "12 pack tank top"]
    found = ["", "black", "lavender", "fuchsia", "alabaster", "webshop", "tan"]
    assert [*map(normalise, values)] == found  # the first of the list, not of the text
    assert [*map(normalise, ("dark blue", "dark grey", "Black"))] == ["blue", "dark", "Black"]


def test_a_pair_is_a_colour_only_as_a_whole() -> None:
    assert normalise_pair("color", "navy") == "navy"
    assert normalise_pair("color", "navy blue") == "('color', 'navy blue')"
    assert normalise_pair("rose", "tan") == "rose"
    assert normalise_pair("size", 'w |  "stand"') == "('size', 'w |  \"stand\"')"
