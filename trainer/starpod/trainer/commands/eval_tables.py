"""Tables of `starpod eval` on the screen: figures, and comparisons of evaluations."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import click
from rich import box
from rich.table import Table

from starpod.remote.catalog import write_report
from starpod.report.console import safe_console
from starpod.trainer.evaluation.compare import NotComparable, compare_evaluations, read_evaluation
from starpod.trainer.evaluation.table import comparison_rows, figure_rows


def print_table(title: str, heads: Sequence[str], rows: Sequence[Sequence[str]], *, quiet: bool) -> None:
    """Print a table. quiet: print it on standard error, because standard output is for a file."""
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
    for head in heads:
        numeric = head not in ("Model", "A", "B", "Environment")
        table.add_column(head, justify="right" if numeric else "left", no_wrap=head.startswith("Success"))
    for row in rows:
        table.add_row(*row)
    console = safe_console(stderr=quiet, highlight=False)
    if not console.is_terminal:
        console.width = max(console.width, 180)  # avoid wrapping in a log
    console.print(table)


def show_report(report: Mapping[str, Any], *, quiet: bool) -> None:
    """Print the figures of an evaluation, and the comparisons if it has several models."""
    heads, rows = figure_rows(report)
    title = f"seeds {report['seeds'][0]} to {report['seeds'][1] - 1}"
    if len(report["models"]) == 1:
        ((name, facts),) = report["models"].items()
        title = name + (f" ({facts['model']})" if facts.get("model", name) != name else "") + f" on {title}"
        heads, rows = heads[1:], [row[1:] for row in rows]
    print_table(title, heads, rows, quiet=quiet)
    heads, rows = comparison_rows(report)
    if rows:
        print_table("Pairs of models on the same start states", heads, rows, quiet=quiet)


def show_comparison(first: Path, second: Path, json_file: str) -> None:
    """Print a comparison of two evaluations, and write it as JSON.

    Args:
        first: Evaluation A: a report of `starpod eval --json`, or a run folder.
        second: Evaluation B, also a report or a run folder.
        json_file: File for the comparison; "-": standard output; "": none.

    Raises:
        UsageError: The evaluations cannot be compared.
    """
    try:
        figures = compare_evaluations(read_evaluation(first), read_evaluation(second))
    except NotComparable as error:
        raise click.UsageError(str(error)) from error
    comparison = {"first": str(first), "second": str(second), "environments": figures}
    heads, rows = comparison_rows({"comparisons": [comparison]})
    print_table(f"A: {first}, B: {second}", heads[2:], [row[2:] for row in rows], quiet=json_file == "-")
    write_report(json_file, json.dumps(comparison) + "\n")
