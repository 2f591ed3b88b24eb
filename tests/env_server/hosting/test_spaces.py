"""Spaces in text and JSON, for any space that can be carried."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
from gymnasium import Space, spaces
from hypothesis import given
from hypothesis import strategies as st

from starpod.env_server.hosting.spaces import UnsupportedSpace, plain_colours, plain_info, reader, words, writer
from starpod.v1.values import Image

small = st.integers(1, 4)
actions = st.recursive(
    st.builds(spaces.Discrete, small, start=st.integers(-3, 3))
    | st.builds(spaces.MultiDiscrete, st.lists(small, min_size=1, max_size=3))
    | st.builds(spaces.MultiDiscrete, st.lists(st.tuples(small, small), min_size=1, max_size=2))
    | st.builds(spaces.MultiBinary, small | st.tuples(small, small))
    | st.builds(spaces.Text, small, charset=st.just("abé")),
    lambda inner: (
        st.lists(inner, min_size=1, max_size=3).map(spaces.Tuple)
        | st.dictionaries(st.text("xyz", min_size=1, max_size=2), inner, min_size=1, max_size=3).map(spaces.Dict)
    ),
    max_leaves=5,
)
boxes = st.builds(
    lambda shape, dtype: spaces.Box(-100, 100, shape, dtype),
    st.lists(small, max_size=3).map(tuple),
    st.sampled_from([np.float32, np.float64, np.int16]),
)


def equal(one: Any, other: Any) -> bool:
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(equal(one[key], other[key]) for key in one)
    if isinstance(one, tuple):
        return len(one) == len(other) and all(map(equal, one, other))
    return type(one) is type(other) and bool(np.array_equal(one, other))


@given(actions, st.integers(0, 1000))
def test_what_is_written_is_read_again(space: Space[Any], seed: int) -> None:
    space.seed(seed)
    element = space.sample()
    text = json.dumps(writer(space)(element, []))
    read = reader(space)(json.loads(text))
    assert equal(read, element)
    assert space.contains(read)
    assert words(space)


@given(boxes, st.integers(0, 1000))
def test_numbers_keep_every_bit(space: spaces.Box, seed: int) -> None:
    space.seed(seed)
    element = space.sample()
    value = json.loads(json.dumps(writer(space)(element, [])))
    assert np.array_equal(np.array(value, dtype=space.dtype), element)
    assert words(space)


junk = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text("xyz", max_size=2), inner, max_size=3),
    max_leaves=6,
)


@given(actions, junk)
def test_any_value_is_read_or_refused(space: Space[Any], value: Any) -> None:
    try:
        element = reader(space)(value)
    except ValueError:
        return
    assert space.contains(element)
    assert json.dumps(writer(space)(element, [])) == json.dumps(value)


def test_a_picture_takes_its_number_in_the_text() -> None:
    space = spaces.Tuple([spaces.Box(0, 255, (16, 16, 3), np.uint8), spaces.Box(0, 255, (3, 3, 3), np.uint8)])
    drawn: list[Image] = []
    picture, board = writer(space)(space.sample(), drawn)
    assert picture == len(drawn) == 1
    assert np.shape(board) == (3, 3, 3)


@pytest.mark.parametrize(
    ("make", "space", "problem"),
    [
        (reader, spaces.Tuple([spaces.Discrete(2), spaces.Box(0, 1)]), r"the action space\[1\] is Box"),
        (writer, spaces.Tuple([spaces.Box(0, 1, (300,))]), r"the observation space\[0\] is a Box of shape \(300,\)"),
        (reader, spaces.Dict(a=spaces.Sequence(spaces.Discrete(2))), r"the action space\['a'\] is Sequence"),
        (writer, spaces.Graph(spaces.Discrete(2), None), "the observation space is Graph"),
    ],
)
def test_what_cannot_be_carried_is_named(make: Any, space: Space[Any], problem: str) -> None:
    with pytest.raises(UnsupportedSpace, match=problem):
        make(space)


def test_colours_become_tags() -> None:
    assert (
        plain_colours("\x1b[34;1mB\x1b[0m:\x1b[42m_\x1b[41mX\x1b[0m\n") == "<blue>B</blue>:<green>_</green><red>X</red>"
    )


def test_info_keeps_what_can_travel() -> None:
    info = {"a": np.int8(1), "b": np.array([1.5]), "c": object(), "d": {"e": (1, float("nan"))}, 5: "x", "f": {1}}
    assert plain_info(info) == {"a": 1, "b": [1.5], "d": {"e": [1, "nan"]}, "5": "x"}
