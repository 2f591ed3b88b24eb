"""Values of options have units, and a wrong one is refused with the form to write."""

import click
import pytest

from starpod.serving.options import BYTES, SECONDS, Number, duration, parse_duration, show_quantity, size


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("20ms", 0.02), ("1.5s", 1.5), ("50us", 5e-5), ("7ns", 7e-9), ("2m", 120), ("1h", 3600), ("0", 0), (" 3 S ", 3)],
)
def test_durations(text: str, seconds: float) -> None:
    assert parse_duration(text) == duration().convert(text, None, None) == pytest.approx(seconds)


@pytest.mark.parametrize("text", ["", "20", "ms", "20 lightyears", "-5ms", "nan s", "1e400s!", "1e400s"])
def test_what_is_no_duration_is_told(text: str) -> None:
    with pytest.raises(ValueError, match="duration"):
        parse_duration(text)


def test_options_take_a_number_in_their_own_unit() -> None:
    assert (duration().convert("30", None, None), duration(bare="m").convert("0.5", None, None)) == (30, 30)
    assert (size().convert("65536", None, None), size(bare="MiB").convert("2", None, None)) == (65536, 2**21)
    assert size().convert("16 mib", None, None) == 2**24
    for type, text, said in ((duration(0.1), "50ms", "at least 100ms"), (size(1024), "1000", "at least 1KiB")):
        with pytest.raises(click.BadParameter, match=said):
            type.convert(text, None, None)


def test_a_number_is_finite() -> None:
    assert Number(0).convert("1e3", None, None) == 1000
    for text, said in (("inf", "finite"), ("nan", "finite"), ("-1", "range")):
        with pytest.raises(click.BadParameter, match=said):
            Number(0).convert(text, None, None)


def test_quantities_are_shown_in_the_largest_whole_unit() -> None:
    assert [show_quantity(value, SECONDS) for value in (0, 0.1, 30.0, 600.0, 86400)] == [
        "0",
        "100ms",
        "30s",
        "10m",
        "1d",
    ]
    assert [show_quantity(value, BYTES) for value in (1, 65536, 20 * 2**20)] == ["1B", "64KiB", "20MiB"]
