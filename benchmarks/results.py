"""Results of a benchmark: its file in docs/benchmarks, its table on the terminal and in Markdown, and its picture."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.machine import origin

RESULTS = Path(__file__).resolve().parents[1] / "docs" / "benchmarks"

Columns = Mapping[str, Callable[[Mapping[str, Any]], str]]
"""Columns of a table: for each heading, the function from a result in a file to its cell."""


def write_result(path: Path, content: Mapping[str, Any]) -> None:
    """Write a result with its origin: the command, the commit and the machine."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({**origin(), **content}, indent=2) + "\n")


def cells_of(results: Iterable[Mapping[str, Any]], columns: Columns) -> list[list[str]]:
    """Return a row of cells for each result."""
    return [[cell(result) for cell in columns.values()] for result in results]


def print_table(head: Sequence[str], rows: Iterable[Sequence[str]], title: str = "") -> None:
    """Print a table. The first column has words, the others numbers.

    Args:
        head: heading of each column.
        rows: cells of each row, one per column.
        title: line above the table; empty: none.
    """
    table = Table(title=title or None, title_justify="left")
    for index, heading in enumerate(head):
        table.add_column(heading, justify="right" if index else "left")
    for row in rows:
        table.add_row(*row)
    Console(width=None if sys.stdout.isatty() else 170).print(table)


def markdown_table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a table in Markdown. The first column has words, the others numbers."""
    lines = ["| " + " | ".join(cells) + " |" for cells in (head, *rows)]
    return "\n".join([lines[0], "|---" + "|---:" * (len(head) - 1) + "|", *lines[1:]])


def duration(seconds: float) -> str:
    unit, scale = ("µs", 1e6) if seconds < 1e-3 else ("ms", 1e3) if seconds < 1 else ("s", 1)
    return f"{seconds * scale:,.{0 if seconds * scale >= 99.5 else 1}f} {unit}"


def percent(share: float) -> str:
    return f"{share:.1%}".replace("%", " %")


@contextmanager
def picture(path: Path, rows: int = 1, columns: int = 1, **settings: Any) -> Iterator[tuple[Any, Any]]:
    """Yield a figure and its axes, as `pyplot.subplots` returns them, and save it as SVG. Equal figures, equal files.

    It needs matplotlib (extra `bench`).

    Args:
        path: file to write.
        rows: number of rows of axes.
        columns: number of columns of axes.
        settings: further arguments of `pyplot.subplots`, such as `figsize` in inches.
    """
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams["svg.hashsalt"] = "starpod"
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(rows, columns, layout="constrained", **settings)
    yield figure, axes
    figure.savefig(path, metadata={"Date": None})
    plt.close(figure)
