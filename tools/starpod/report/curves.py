"""Data of charts, which the script of a page draws with Plotly, and sparklines as SVG."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape
from itertools import pairwise
from typing import Any, Literal, TypeVar

from markupsafe import Markup

from starpod.report.figures import Kind, show

Point = tuple[float, float]
T = TypeVar("T")

COLOURS = 8
"""Number of colours of lines: the CSS variables --c0 to --c7."""
POINTS = 1000
"""Maximum number of points of a line. A longer one is drawn as means of neighbouring points, to keep pages small."""
MARKS = 100
"""Maximum number of marks of a chart."""
SPARK_SHARE = 0.2
"""Lowest top of a sparkline of shares: a step from 7 to 5 % must not look like a collapse."""


@dataclass(frozen=True, slots=True)
class ChartLine:
    """One line of a chart. Values that are not finite are left out."""

    label: str
    points: Sequence[Point]
    colour: int = 0
    band: Sequence[tuple[float, float, float]] = ()
    """Points (x, low, high) of a shaded band around the line."""
    faint: Sequence[Sequence[Point]] = ()
    """Thin lines behind the line, such as single seeds."""
    dots: bool = False
    """Whether each point is marked, as measurements are. Such a line is not smoothed."""


@dataclass(frozen=True, slots=True)
class Rule:
    """A horizontal line for comparison."""

    y: float
    label: str


@dataclass(frozen=True, slots=True)
class Mark:
    """A vertical line at an event."""

    x: float
    label: str
    name: str = ""
    """Name of the run that the event belongs to, where a chart has several."""
    colour: int | None = None
    """Colour of that run's line."""


@dataclass(frozen=True, slots=True)
class Chart:
    """A chart of lines over a common x axis. It is false if no line has a point."""

    title: str
    lines: Sequence[ChartLine]
    kind: Kind = "number"
    """How values are written."""
    x_label: str = "step"
    """Name of the x axis. All charts of a page with the same one show the same range."""
    rules: Sequence[Rule] = ()
    marks: Sequence[Mark] = ()
    x_ticks: Sequence[tuple[float, str]] = ()
    """Places and labels of ticks on the x axis, instead of numbers."""
    logarithmic: bool = False
    """Whether the y axis is logarithmic at first."""
    stacked: bool = False
    """Whether lines are shares of a whole, drawn as layers."""
    size: Literal["", "wide"] = ""

    def __bool__(self) -> bool:
        return any(_finite(line.points) for line in self.lines)

    @property
    def json(self) -> str:
        """The chart as the page's script reads it."""
        lines = [_line(line) for line in self.lines if _finite(line.points)]
        xs = [x for line in lines for x in line["points"][0]]
        low, high = (min(xs), max(xs)) if xs else (0.0, 0.0)
        marks = spread([mark for mark in self.marks if low <= mark.x <= high], MARKS)
        values = {
            "title": self.title, "kind": self.kind, "x": self.x_label, "lines": lines,
            "rules": [[_short(rule.y), rule.label] for rule in self.rules if math.isfinite(rule.y)],
            "marks": [[mark.x, mark.label, mark.name, mark.colour] for mark in marks],
            "ticks": self.x_ticks, "log": self.logarithmic, "stacked": self.stacked,
        }  # fmt: skip
        return json.dumps(values, separators=(",", ":"))

    @property
    def summary(self) -> str:
        """The chart in words, for screen readers."""
        ends = [(line.label, points[0][1], points[-1][1]) for line in self.lines if (points := _finite(line.points))]
        texts = (f"{label}: {show(first, self.kind)} to {show(last, self.kind)}" for label, first, last in ends)
        return f"{self.title}. {'; '.join([*texts, *(rule.label for rule in self.rules)])}"


def _line(line: ChartLine) -> dict[str, Any]:
    columns = {
        "points": _columns(thin(_finite(line.points))),
        "band": _columns([edge for edge in line.band if all(map(math.isfinite, edge))], 3),
        "faint": [_columns(thin(_finite(points))) for points in line.faint if points],
    }
    return {"label": line.label, "colour": line.colour, "dots": line.dots, **columns}


def _columns(rows: Sequence[tuple[float, ...]], count: int = 2) -> list[list[float]]:
    return [[_short(value) for value in column] for column in zip(*rows, strict=True)] or [[] for _ in range(count)]


def _short(value: float) -> float:
    """Return the value with six digits, which no picture shows more of."""
    rounded = float(f"{value:.6g}")
    return int(rounded) if rounded.is_integer() and abs(rounded) < 2**53 else rounded


def _finite(points: Iterable[Point]) -> list[Point]:
    return [(x, y) for x, y in points if math.isfinite(x) and math.isfinite(y)]


def spread(values: Sequence[T], most: int) -> list[T]:
    """Return at most `most` values at equal distances, with the first and the last."""
    if len(values) <= most:
        return list(values)
    return [values[round(index * (len(values) - 1) / (most - 1))] for index in range(most)]


def thin(points: Sequence[Point]) -> list[Point]:
    """Return at most `POINTS` points, each the mean of neighbouring points."""
    if len(points) <= POINTS:
        return list(points)
    cuts = [round(index * len(points) / POINTS) for index in range(POINTS + 1)]
    parts = [points[low:high] for low, high in pairwise(cuts)]
    return [(sum(x for x, _ in part) / len(part), sum(y for _, y in part) / len(part)) for part in parts]


def smooth(points: Sequence[Point], window: int | None = None) -> list[Point]:
    """Return the moving average of the points. window: number of points, by default a thirtieth of all."""
    window = window or max(len(points) // 30, 1)
    reach = window // 2
    sums = [0.0]
    for _, y in points:
        sums.append(sums[-1] + y)
    result = []
    for index, (x, _) in enumerate(points):
        # The window shrinks on both sides at the ends of the line, which would bend a trend otherwise.
        radius = min(reach, index, len(points) - 1 - index)
        low, high = index - radius, index + radius + 1
        result.append((x, (sums[high] - sums[low]) / (high - low)))
    return result


def spark(values: Sequence[float], label: str, kind: Kind = "number", *, width: int = 120, height: int = 26) -> Markup:
    """Return a line without axes as an <svg> element; empty with fewer than two values.

    Its scale begins at 0, and shares end at 20 % or more, so that a small change looks small. The values are
    equidistant, width and height are in pixels, and the label is for screen readers.
    """
    known = [value for value in values if math.isfinite(value)]
    if len(known) < 2:
        return Markup("")
    low, high = min(*known, 0.0), max(*known, SPARK_SHARE if kind == "share" else 0.0)
    x_step, y_scale = (width - 6) / (len(known) - 1), (height - 6) / (high - low or 1)
    places = [(3 + x_step * x, height - 3 - y_scale * (y - low)) for x, y in enumerate(known)]
    path = "M" + " L".join(f"{x:.1f} {y:.1f}" for x, y in places)
    x, y = places[-1]
    return Markup(
        f'<svg class="spark" viewBox="0 0 {width} {height}" width="{width}" height="{height}" role="img" '
        f'aria-label="{escape(label, quote=True)}"><path d="{path}"/><circle cx="{x:.1f}" cy="{y:.1f}" r="2.5"/></svg>'
    )
