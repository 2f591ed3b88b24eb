"""Charts as SVG text, readable at any size and in light and dark, with values shown under the pointer.

Colours are CSS variables, which a page sets once. `standalone` makes a file with its own colours.
"""

from __future__ import annotations

import json
import math
import re
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from html import escape
from importlib.resources import files
from itertools import pairwise
from typing import TypeVar

from starpod.report.figures import Kind, show

Point = tuple[float, float]
Placed = TypeVar("Placed", bound=tuple[float, ...])

COLOURS = 8
"""Series colours: --c0 to --c7."""

Entry = tuple[str, int]
"""Label and colour of an entry in a legend."""
LEGEND_ROW = 18

COUNTED = ("step", "iterations")
"""Labels of axes that count in whole numbers."""

STYLE = (files(__package__) / "assets" / "chart.css").read_text(encoding="utf-8")


@dataclass(frozen=True, slots=True)
class Series:
    """One line of a chart."""

    label: str
    points: Sequence[Point]
    colour: int = 0
    band: Sequence[tuple[float, float, float]] = ()
    """Points (x, low, high) of a shaded band around the line."""
    faint: Sequence[Sequence[Point]] = ()
    """Thin lines behind the main line, such as raw values or single seeds."""
    dots: bool = False
    """Whether each point is marked."""


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


@dataclass(frozen=True, slots=True)
class Frame:
    """The drawing area, and the values at its edges."""

    width: int
    height: int
    x: tuple[float, float]
    y: tuple[float, float]
    left: int = 46
    right: int = 14
    top: int = 30
    logarithmic: bool = False
    """Whether the y axis is logarithmic. Its edges are then above 0."""
    log_x: bool = False
    """Whether the x axis is logarithmic. Its edges are then above 0."""

    @property
    def bottom(self) -> int:
        """Pixels below the drawing area. Only tall charts have room for the name of the x axis."""
        return 34 if self.named else 22

    @property
    def named(self) -> bool:
        return self.height >= 240

    def px(self, x: float) -> float:
        low, high = self.x
        if self.log_x:
            low, high, x = math.log10(low), math.log10(high), math.log10(x)
        return round(self.left + (x - low) / (high - low or 1) * (self.width - self.left - self.right), 1)

    def py(self, y: float) -> float:
        low, high = self.y
        if self.logarithmic:
            low, high, y = math.log10(low), math.log10(high), math.log10(max(y, low))
        return round(
            self.height - self.bottom - (y - low) / (high - low or 1) * (self.height - self.top - self.bottom), 1
        )

    def path(self, points: Sequence[Point]) -> str:
        return "M" + " L".join(f"{self.px(x)} {self.py(y)}" for x, y in points)


def line_chart(
    title: str,
    series: Sequence[Series],
    *,
    rules: Sequence[Rule] = (),
    marks: Sequence[Mark] = (),
    kind: Kind = "number",
    x_label: str = "step",
    x_ticks: Sequence[tuple[float, str]] = (),
    zero: bool = True,
    logarithmic: bool = False,
    log_x: bool = False,
    between: tuple[float, float] = (-math.inf, math.inf),
    width: int = 344,
    height: int = 190,
) -> str:
    """Return a line chart as an <svg> element, or an empty text if there are no points.

    Args:
        series: the lines.
        rules: horizontal lines for comparison.
        marks: vertical lines at events.
        kind: how values are written. The y axis of "share" ends at 1 unless all values are far below 1.
        x_label: name of the x axis.
        x_ticks: places and labels of ticks on the x axis, instead of numbers. Labels without room are left out.
        zero: whether the y axis begins at 0 if no value is below 0.
        logarithmic: whether the y axis is logarithmic. Values that are not above 0 are left out.
        log_x: whether the x axis is logarithmic. Points whose x is not above 0 are left out.
        between: the range of x that is shown.
        width: pixels.
        height: pixels, without the legend.
    """
    low, high = between
    left_of_all, below_all = 0.0 if log_x else -math.inf, 0.0 if logarithmic else -math.inf

    def shown_of(line: Sequence[Point]) -> list[Point]:
        return cut([(x, y) for x, y in finite(line) if x > left_of_all and y > below_all], low, high)

    series = [
        replace(
            s,
            points=shown_of(s.points),
            faint=[shown_of(line) for line in s.faint],
            band=cut([edge for edge in s.band if edge[0] > left_of_all], low, high),
        )
        for s in series
    ]
    series = [s for s in series if s.points]
    marks = [mark for mark in marks if low <= mark.x <= high and mark.x > left_of_all]
    if not series:
        return ""
    xs = [x for s in series for x, _ in s.points] + [mark.x for mark in marks]
    xs = [max(min(xs), low), min(max(xs), high)]
    values = [y for s in series for _, y in s.points] + [rule.y for rule in rules]
    values += [y for s in series for _, low, high in s.band for y in (low, high)]
    values += trimmed([y for s in series for line in s.faint for _, y in line])
    ticks = decades(values) if logarithmic else axis(values, kind=kind, zero=zero, count=5 if height > 240 else 4)
    right = 14 + (max((6.2 * len(rule.label) for rule in rules), default=0))
    left = 14 + max(round(6.4 * len(show(tick, kind))) for tick in ticks)
    entries = [(s.label, s.colour) for s in series] if len(series) > 1 else []
    rows = _legend_rows(title, entries, width)
    frame = Frame(
        width,
        height + LEGEND_ROW * len(rows),
        (xs[0], xs[1]),
        (ticks[0], ticks[-1]),
        left=left,
        right=round(right),
        top=30 + LEGEND_ROW * len(rows),
        logarithmic=logarithmic,
        log_x=log_x,
    )
    drawing: list[str] = []
    _draw_axes(drawing, frame, ticks, kind, x_label, x_ticks)
    _draw_rules(drawing, frame, rules)
    clip = f"clip{zlib.crc32(repr((title, frame, xs)).encode())}"  # unique in a page and equal in every run
    drawing.append(
        f'<clipPath id="{clip}"><rect x="{frame.left - 4}" y="{frame.top - 4}" '
        f'width="{width - frame.left - frame.right + 8}" height="{frame.height - frame.top - frame.bottom + 8}"/>'
        "</clipPath>"
        f'<g clip-path="url(#{clip})">'
    )
    for s in series:
        if s.band:
            outline = [(x, high) for x, _, high in s.band] + [(x, low) for x, low, _ in reversed(s.band)]
            drawing.append(f'<path class="band f{s.colour}" d="{frame.path(outline)}Z"/>')
        for line in s.faint:
            if line:
                drawing.append(f'<path class="faint s{s.colour}" d="{frame.path(thin(line))}"/>')
    for s in series:
        drawing.append(f'<path class="line s{s.colour}" d="{frame.path(thin(s.points))}"/>')
        if s.dots:
            drawing += [
                f'<circle class="f{s.colour}" cx="{frame.px(x)}" cy="{frame.py(y)}" r="3"/>' for x, y in s.points
            ]
    drawing.append("</g>")
    _draw_marks(drawing, frame, marks)
    _draw_legend(drawing, frame, entries, rows)
    summary = "; ".join(f"{s.label}: {show(s.points[0][1], kind)} to {show(s.points[-1][1], kind)}" for s in series)
    return _wrap_svg(frame, title, summary, drawing, _hover_json(frame, series, kind, x_label, named=x_ticks))


def spark(values: Sequence[float], label: str, *, width: int = 120, height: int = 26) -> str:
    """Return a line without axes as an <svg> element. label: description for screen readers."""
    finite_values = [value for value in values if math.isfinite(value)]
    if len(finite_values) < 2:
        return ""
    low, high = min(finite_values), max(finite_values)
    x_step, y_scale = (width - 4) / (len(finite_values) - 1), (height - 6) / (high - low or 1)
    places = [(2 + x_step * x, height - 3 - y_scale * (y - low)) for x, y in enumerate(finite_values)]
    path = "M" + " L".join(f"{x:.1f} {y:.1f}" for x, y in places)
    x, y = places[-1]
    return (
        f'<svg class="chart spark" viewBox="0 0 {width} {height}" width="{width}" height="{height}" role="img" '
        f'aria-label="{escape(label, quote=True)}"><path class="line s0" d="{path}"/>'
        f'<circle class="f0" cx="{x:.1f}" cy="{y:.1f}" r="2.5"/></svg>'
    )


def share_chart(
    title: str,
    layers: Sequence[tuple[str, Sequence[Point]]],
    *,
    x_label: str = "step",
    width: int = 720,
    height: int = 220,
) -> str:
    """Return a chart of stacked shares of a whole as an <svg> element. All layers must have the same x values."""
    layers = [(label, thin(points)) for label, points in layers]
    xs = [x for x, _ in layers[0][1]] if layers else []
    if not xs:
        return ""
    entries = [(label, colour % COLOURS) for colour, (label, _) in enumerate(layers)]
    rows = _legend_rows(title, entries, width)
    legend_height = LEGEND_ROW * len(rows)
    frame = Frame(width, height + legend_height, (min(xs), max(xs)), (0.0, 1.0), top=30 + legend_height)
    drawing: list[str] = []
    _draw_axes(drawing, frame, [0, 0.25, 0.5, 0.75, 1], "share", x_label)
    floor = [0.0] * len(xs)
    series = []
    for colour, (label, points) in enumerate(layers):
        ceiling = [low + y for low, (_, y) in zip(floor, points, strict=True)]
        outline = [*zip(xs, ceiling, strict=True), *reversed(list(zip(xs, floor, strict=True)))]
        drawing.append(f'<path class="layer f{colour % COLOURS}" d="{frame.path(outline)}Z"/>')
        series.append(Series(label, points, colour % COLOURS))
        floor = ceiling
    _draw_legend(drawing, frame, entries, rows)
    means = "; ".join(f"{label}: {show(sum(y for _, y in points) / len(points), 'share')}" for label, points in layers)
    return _wrap_svg(
        frame, title, f"mean shares: {means}", drawing, _hover_json(frame, series, "share", x_label, dots=False)
    )


def standalone(*charts: str, columns: int = 2, margin: int = 16) -> str:
    """Return one SVG file that shows several charts, with a background and with colours for light and dark.

    Charts are placed in rows of `columns`. Each row is as high as its highest chart.
    """
    parts: list[str] = []
    labels: list[str] = []
    top = right = 0
    for start in range(0, len(charts), columns):
        left = height = 0
        for chart in charts[start : start + columns]:
            head, _, drawing = chart.partition(">")
            wide, high = (int(side) for side in re.findall(r'(?:width|height)="(\d+)"', head)[:2])
            labels += re.findall(r' aria-label="([^"]*)"', head)
            parts.append(f'<svg x="{left}" y="{top}" width="{wide}" height="{high}" overflow="visible">{drawing}')
            left, height = left + wide + margin, max(height, high)
        top, right = top + height + margin, max(right, left)
    width, height = right + margin, top + margin
    label = f' aria-label="{" ".join(labels)}"' if labels else ""
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" class="chart" role="img"{label} '
        f'viewBox="{-margin} {-margin} {width} {height}" width="{width}" height="{height}"><style>{STYLE}</style>'
        f'<rect x="{-margin}" y="{-margin}" width="{width}" height="{height}" rx="8" fill="var(--surface)"/>'
        f"{''.join(parts)}</svg>\n"
    )


# --- numbers -------------------------------------------------------------------------------------------------------


def axis(
    values: Sequence[float], *, kind: Kind = "number", zero: bool = True, count: int = 4, whole: bool = False
) -> list[float]:
    """Return at least two round tick values that enclose all finite values. whole: only whole numbers."""
    finite_values = [value if abs(value) > 1e-30 else 0.0 for value in values if math.isfinite(value)] or [0.0]
    low, high = min(finite_values), max(finite_values)
    if zero:
        low, high = min(low, 0.0), max(high, 0.0)
    if kind == "share" and zero and low >= 0 and 0.4 < high <= 1:
        high = 1.0
    if high - low <= 1e-9 * max(abs(low), abs(high)):
        high = low + (abs(low) or 1.0)
    step = _round_step((high - low) / count)
    step = math.ceil(step) if whole else step
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [float(f"{index * step:.12g}") for index in range(first, max(last, first + 1) + 1)]


def decades(values: Sequence[float]) -> list[float]:
    """Return powers of ten that enclose all finite values above 0, with 2 and 5 in between if there are few powers."""
    finite_values = [value for value in values if math.isfinite(value) and value > 0] or [1.0]
    first, last = math.floor(math.log10(min(finite_values)) + 1e-9), math.ceil(math.log10(max(finite_values)) - 1e-9)
    last = max(last, first + 1)
    factors = (1, 2, 5) if last - first <= 2 else (1,)
    ticks = [float(f"{factor}e{power}") for power in range(first, last) for factor in factors]
    ticks.append(float(f"1e{last}"))
    low = max((tick for tick in ticks if tick <= min(finite_values) * 1.000001), default=ticks[0])
    high = min((tick for tick in ticks if tick >= max(finite_values) * 0.999999), default=ticks[-1])
    return [tick for tick in ticks if low <= tick <= high] if low < high else ticks


def _round_step(rough: float) -> float:
    power = 10.0 ** math.floor(math.log10(rough))
    return next(factor * power for factor in (1, 2, 2.5, 5, 10) if factor * power >= rough * 0.999)


def finite(points: Sequence[Point]) -> list[Point]:
    return [(x, y) for x, y in points if math.isfinite(x) and math.isfinite(y)]


def cut(points: Sequence[Placed], low: float, high: float) -> list[Placed]:
    """Return the points whose x (their first value) is in a range, and the next point on each side.

    With these two points, lines reach the edges of the chart.
    """
    first = next((index for index, point in enumerate(points) if point[0] >= low), len(points))
    last = next((index for index, point in enumerate(points) if point[0] > high), len(points))
    return list(points[max(first - 1, 0) : last + 1]) if first < len(points) and last > 0 else []


def thin(points: Sequence[Point], limit: int = 400) -> list[Point]:
    """Return at most `limit` points, each the mean of neighbouring points, to keep pages of long runs small."""
    if len(points) <= limit:
        return list(points)
    cuts = [round(index * len(points) / limit) for index in range(limit + 1)]
    parts = [points[low:high] for low, high in pairwise(cuts)]
    return [(sum(x for x, _ in part) / len(part), sum(y for _, y in part) / len(part)) for part in parts]


def trimmed(values: Sequence[float]) -> list[float]:
    """Return the lowest and highest value without the extreme 1 % on each side, so that no spike flattens a curve."""
    sorted_values = sorted(values)
    cut = len(sorted_values) // 100
    return [sorted_values[cut], sorted_values[-1 - cut]] if sorted_values else []


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


# --- pieces --------------------------------------------------------------------------------------------------------


def _wrap_svg(frame: Frame, title: str, summary: str, drawing: list[str], hover: str) -> str:
    name = escape(f"{title}. {summary}", quote=True)
    return (
        f'<svg class="chart" viewBox="0 0 {frame.width} {frame.height}" width="{frame.width}" height="{frame.height}" '
        f'role="img" tabindex="0" aria-label="{name}" data-hover="{escape(hover, quote=True)}">'
        f'<text class="title" x="0" y="13">{escape(title)}</text>{"".join(drawing)}</svg>'
    )


def _draw_axes(
    drawing: list[str],
    frame: Frame,
    ticks: Sequence[float],
    kind: Kind,
    x_label: str,
    x_ticks: Sequence[tuple[float, str]] = (),
) -> None:
    edge = frame.width - frame.right
    for tick in ticks:
        y = frame.py(tick)
        drawing.append(f'<line class="grid" x1="{frame.left}" x2="{edge}" y1="{y}" y2="{y}"/>')
        drawing.append(f'<text x="{frame.left - 6}" y="{y + 4}" text-anchor="end">{show(tick, kind)}</text>')
    low, high = frame.x
    room = edge - frame.left
    places = decades([low, high]) if frame.log_x else []
    if sum(low <= position <= high for position in places) < 3:
        places = axis([low, high], zero=False, count=max(room // 90, 2), whole=x_label in COUNTED)
    labels = [(tick, f"{tick:,.10g}") for tick in places]
    free_x = -math.inf
    for tick, name in x_ticks or labels:
        half_width = 3.2 * len(name)
        if low <= tick <= high and frame.px(tick) - half_width >= free_x:
            free_x = frame.px(tick) + half_width + 6
            drawing.append(
                f'<text x="{frame.px(tick)}" y="{frame.height - frame.bottom + 15}" text-anchor="middle">'
                f"{escape(name)}</text>"
            )
    if frame.named:
        drawing.append(f'<text x="{edge}" y="{frame.height - 4}" text-anchor="end">{escape(x_label)}</text>')


def _draw_rules(drawing: list[str], frame: Frame, rules: Sequence[Rule]) -> None:
    """Draw horizontal lines with labels on the right, which are moved apart if they would overlap."""
    edge = frame.width - frame.right
    floor = float("inf")
    for rule in sorted(rules, key=lambda rule: rule.y):
        y = frame.py(rule.y)
        drawing.append(f'<line class="rule" x1="{frame.left}" x2="{edge}" y1="{y}" y2="{y}"/>')
        floor = min(y + 4, floor - 12)
        drawing.append(f'<text x="{edge + 6}" y="{floor}">{escape(rule.label)}</text>')


def _draw_marks(drawing: list[str], frame: Frame, marks: Sequence[Mark]) -> None:
    for mark in marks:
        x, top = frame.px(mark.x), frame.top
        drawing.append(
            f'<g><title>{escape(mark.label)}</title><line class="mark" x1="{x}" x2="{x}" y1="{top}" '
            f'y2="{frame.height - frame.bottom}"/><path class="markhead" d="M{x - 5} {top - 8} h10 l-5 8 Z"/></g>'
        )


def _legend_width(label: str) -> float:
    return 6.3 * len(label) + 28


def _legend_rows(title: str, entries: Sequence[Entry], width: int) -> list[list[Entry]]:
    """Return the entries in each legend row below the title, or no rows if the legend fits beside the title."""
    if not entries or 7.5 * len(title) + sum(_legend_width(label) for label, _ in entries) <= width:
        return []
    rows: list[list[Entry]] = [[]]
    for entry in entries:
        if rows[-1] and sum(_legend_width(label) for label, _ in [*rows[-1], entry]) > width:
            rows.append([])
        rows[-1].append(entry)
    return rows


def _draw_legend(drawing: list[str], frame: Frame, entries: Sequence[Entry], rows: Sequence[Sequence[Entry]]) -> None:
    start_x = frame.width - sum(_legend_width(label) for label, _ in entries)
    for number, row in enumerate(rows or [entries]):
        x, y = (0.0, 13 + LEGEND_ROW * (number + 1)) if rows else (start_x, 13)
        for label, colour in row:
            drawing.append(f'<rect class="f{colour}" x="{x + 6:.0f}" y="{y - 9}" width="10" height="10" rx="2"/>')
            drawing.append(f'<text x="{x + 20:.0f}" y="{y}">{escape(label)}</text>')
            x += _legend_width(label)


def _hover_json(
    frame: Frame,
    series: Sequence[Series],
    kind: Kind,
    x_label: str,
    *,
    dots: bool = True,
    named: Sequence[tuple[float, str]] = (),
) -> str:
    """Return JSON for the page's script: per series its colour, label and points [pixel x, pixel y, x, text].

    The JSON also has the pixels and values of the left and right edge (`across`), and whether x is logarithmic.
    """
    lines = []
    names = dict(named)
    for s in series:
        bands = {x: (low, high) for x, low, high in s.band}
        points = []
        for x, y in thin(s.points):
            if not frame.x[0] <= x <= frame.x[1]:
                continue
            text = show(y, kind)
            if x in bands:
                text += f" ({show(bands[x][0], kind)} to {show(bands[x][1], kind)})"
            points.append([frame.px(x), frame.py(y) if dots else 0, names.get(x, round(x, 2)), text])
        if points:
            lines.append({"label": s.label, "colour": s.colour, "points": points})
    edges = [frame.top, frame.height - frame.bottom]
    x_axis = [frame.left, frame.width - frame.right, *frame.x, frame.log_x]
    values = {"x": x_label, "edges": edges, "across": x_axis, "dots": dots, "lines": lines}
    return json.dumps(values, separators=(",", ":"))
