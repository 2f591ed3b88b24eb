"""Charts as the page's script reads them, and sparklines."""

import json
import math
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from starpod.report.curves import MARKS, POINTS, Chart, ChartLine, Mark, Rule, smooth, spark, thin

numbers = st.floats(-1e6, 1e6, allow_nan=False)


@given(st.lists(st.tuples(st.floats(0, 1000), st.floats(allow_nan=True, allow_infinity=True)), max_size=30))
def test_any_values_make_a_chart_that_browsers_parse(points: list[tuple[float, float]]) -> None:
    band = [(x, y, y) for x, y in points]
    chart = Chart("a", [ChartLine("b", points, band=band)], rules=[Rule(math.nan, "half")], marks=[Mark(3, "here")])

    def refuse(name: str) -> None:
        raise AssertionError(name)

    values = json.loads(chart.json, parse_constant=refuse)
    assert bool(values["lines"]) == bool(chart) and values["rules"] == []


def test_a_long_run_makes_a_chart_of_bounded_size() -> None:
    points = [(float(x), float(x % 2)) for x in range(100_000)]
    marks = [Mark(x, "w" * 100) for x in range(0, 100_000, 100)]
    values = json.loads(Chart("a", [ChartLine("b", points)], marks=marks).json)
    assert len(values["lines"][0]["points"][0]) == POINTS and len(values["marks"]) == MARKS
    assert all(y == pytest.approx(0.5, abs=0.1) for _, y in thin(points))


def test_marks_beyond_the_lines_are_left_out() -> None:
    chart = Chart("a", [ChartLine("b", [(1, 0.5), (9, 0.6)])], marks=[Mark(0, "early"), Mark(5, "x", "B", 1)])
    assert json.loads(chart.json)["marks"] == [[5, "x", "B", 1]]


@given(st.lists(numbers, min_size=1, max_size=300))
def test_smoothing_keeps_length_and_range(values: list[float]) -> None:
    points = list(enumerate(values))
    smoothed = smooth(points)
    assert [x for x, _ in smoothed] == [x for x, _ in points]
    slack = 1e-6 * (1 + max(map(abs, values)))
    assert all(min(values) - slack <= y <= max(values) + slack for _, y in smoothed)


def test_smoothing_bends_no_straight_line() -> None:
    line = [(float(x), 2.0 * x) for x in range(100)]
    assert [y for _, y in smooth(line, 9)] == pytest.approx([y for _, y in line])


@pytest.mark.parametrize(("values", "share"), [([0.07, 0.05], 0.15), ([0.9, 0.1], 1.0), ([0.0, 0.3], 1.0)])
def test_a_small_change_looks_small_in_a_sparkline(values: list[float], share: float) -> None:
    """A sparkline's scale begins at 0, and that of shares ends at 20 % or more."""
    (path,) = re.findall(r'd="M([^"]+)"', spark(values, "success", "share"))
    first, last = (float(point.split()[1]) for point in path.split(" L"))
    assert 0 < abs(first - last) / 26 <= share and ((first < last) == (values[0] > values[1]))
