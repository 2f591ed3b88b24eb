"""Server-Timing as servers may write it."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from starpod.client.server_timing import find_server_timing, parse_server_timing

NAMES = st.text("abcdefghijklmnopqrstuvwxyz-_.", min_size=1, max_size=8)


@given(st.dictionaries(NAMES, st.floats(0, 1e9), min_size=1, max_size=5))
def test_what_is_written_is_read(durations: dict[str, float]) -> None:
    text = ", ".join(f"{name};dur={value!r}" for name, value in durations.items())
    assert parse_server_timing(text) == durations


def test_other_parts_of_the_header_are_ignored() -> None:
    text = 'cache;desc="Cache Read, or not";dur=23.2,miss, db ; DUR="53" ; desc=plain'
    assert parse_server_timing(text) == {"cache": 23.2, "db": 53.0}


@pytest.mark.parametrize(
    "text", ["", "a;dur=-1", "a;dur=nan", "a;dur=", "a;dur=1,,b", "a;dur=inf", "a b;dur=1", '";dur=1']
)
def test_what_is_not_of_the_form_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"form|milliseconds"):
        parse_server_timing(text)


def test_it_is_found_in_a_trailer() -> None:
    assert find_server_timing((("a", "b"), ("server-timing", "x;dur=1"))) == "x;dur=1"
    assert find_server_timing(None) == ""
