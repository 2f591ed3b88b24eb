"""Charts of runs as pictures for the docs, drawn with matplotlib (extra `bench`)."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.results import picture
from starpod.report.curves import Chart

LABEL_SIZE = 8


def draw_charts(path: Path, charts: Sequence[Chart]) -> None:
    """Draw charts of runs, two in a row."""
    columns = min(2, len(charts))
    rows = -(-len(charts) // columns)
    size = (5.6 * columns, 3.2 * rows)
    with picture(path, rows, columns, squeeze=False, figsize=size) as (_, grid):
        for axes, chart in zip(grid.flat, charts, strict=False):
            scale = 100 if chart.kind == "share" else 1
            for line in chart.lines:
                colour = f"C{line.colour}"
                xs, ys = zip(*line.points, strict=True)
                axes.plot(xs, [y * scale for y in ys], color=colour, marker="o" if line.dots else "", label=line.label)
                for points in line.faint:
                    axes.plot(*zip(*((x, y * scale) for x, y in points), strict=True), color=colour, alpha=0.3, lw=0.8)
                if line.band:
                    places, lows, highs = zip(*line.band, strict=True)
                    edges = [[y * scale for y in edge] for edge in (lows, highs)]
                    axes.fill_between(places, *edges, color=colour, alpha=0.15, lw=0)
            for rule in chart.rules:
                axes.axhline(rule.y * scale, color="grey", linestyle=":")
            axes.set(title=chart.title, xlabel=chart.x_label, ylabel="%" if scale == 100 else "")
            axes.set_ylim(bottom=min(0, axes.get_ylim()[0]))
            _label_rules(axes, [(rule.y * scale, rule.label) for rule in chart.rules])
            axes.grid(alpha=0.3)
            if len(chart.lines) > 1:
                axes.legend(frameon=False)
        for axes in grid.flat[len(charts) :]:
            axes.remove()


def _label_rules(axes: Any, rules: Sequence[tuple[float, str]]) -> None:
    """Write the label of each horizontal line above its right end. Labels of close lines are moved apart."""
    low, high = axes.get_ylim()
    line_height = LABEL_SIZE * 1.25 * (high - low) / (72 * axes.get_window_extent().height / axes.figure.dpi)
    floor = low
    for y, text in sorted(rules):
        floor = max(y, floor)
        axes.annotate(
            text, (1, floor), xycoords=("axes fraction", "data"), ha="right", va="bottom", fontsize=LABEL_SIZE
        )
        floor += line_height
