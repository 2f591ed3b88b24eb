"""Tables of `starpod eval` and `starpod rescore` on the screen."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich import box
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from starpod.report.console import safe_console
from starpod.trainer.evaluation.table import comparison_rows, figure_rows


def progress_bars() -> Progress:
    """Return bars for a terminal, which are hidden elsewhere and disappear at the end."""
    console = safe_console(stderr=True)
    columns = TextColumn("{task.description}", markup=False), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()
    return Progress(*columns, console=console, transient=True, disable=not console.is_terminal)


def print_table(title: str, heads: Sequence[str], rows: Sequence[Sequence[str]], *, quiet: bool) -> None:
    """Print a table. quiet: print it on standard error, because standard output is for a file."""
    table = Table(title=Text(title, "table.title"), title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
    for head in heads:
        numeric = head not in ("Model", "A", "B", "Environment")
        table.add_column(head, justify="right" if numeric else "left", no_wrap=head.startswith("Success"))
    for row in rows:
        table.add_row(*map(Text, row))  # a name may look like markup
    console = safe_console(stderr=quiet, highlight=False)
    if not console.is_terminal:
        console.width = max(console.width, 180)  # avoid wrapping in a log
    console.print(table)


def show_report(report: Mapping[str, Any], *, quiet: bool) -> None:
    """Print the figures of an evaluation, and the comparisons if it has several models."""
    print_table(f"seeds {report['seeds'][0]} to {report['seeds'][1] - 1}", *figure_rows(report), quiet=quiet)
    if report["comparisons"]:
        print_table("Pairs of models on the same start states", *comparison_rows(report), quiet=quiet)
