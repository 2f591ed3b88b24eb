"""Colours as the original's reward sees them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from starpod.environments.webshop.colours import COLOURS, normalise, normalise_pair
from tests.golden import golden


def test_as_recorded(capsys: pytest.CaptureFixture[str]) -> None:
    records = golden("colors", "webshop_golden")
    assert [normalise(record["input"]) for record in records] == [record["output"] for record in records]
    with capsys.disabled():
        print(f"\ncolours: compared {len(records)} values")


@pytest.mark.parametrize(
    ("value", "normalised"),
    [
        ("", ""),
        ("black forest", "black"),
        ("violet lavender", "lavender"),  # the first of the list, not of the text
        ("steelivy fuchsia", "fuchsia"),
        ("123alabaster", "alabaster"),
        ("webshop", "webshop"),
        ("12 pack tank top", "tan"),
        ("dark blue", "blue"),
        ("dark grey", "dark"),
        ("Black", "Black"),
    ],
)
def test_the_first_colour_of_the_list_that_is_a_part(value: str, normalised: str) -> None:
    assert normalise(value) == normalised


@given(st.lists(st.sampled_from([*COLOURS, " ", "st", "ed", "x"]), max_size=5).map("".join))
def test_a_value_with_a_colour_becomes_one(value: str) -> None:
    found = [colour for colour in COLOURS if colour in value]
    assert normalise(value) == (min(found) if found else value)  # the list is alphabetical


def test_a_pair_is_a_colour_only_as_a_whole() -> None:
    assert normalise_pair("color", "navy") == "navy"
    assert normalise_pair("color", "navy blue") == "('color', 'navy blue')"
    assert normalise_pair("rose", "tan") == "rose"
    assert normalise_pair("size", 'w |  "stand"') == "('size', 'w |  \"stand\"')"
