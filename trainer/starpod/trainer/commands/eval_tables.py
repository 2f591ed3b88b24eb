"""Tables of `starpod eval`: the figures of each environment, and a comparison of two evaluations."""

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


def _print(table: Table, json_file: str) -> None:
    """Print a table, on standard error if standard output is for the JSON."""
    console = safe_console(stderr=json_file == "-", highlight=False)
    if not console.is_terminal:
        console.width = max(console.width, 120)  # avoid wrapping in a log
    console.print(table)


def show_report(report: Mapping[str, Any], json_file: str) -> None:
    """Print the figures of an evaluation, and write its report as JSON."""
    policy, environments = report["policy"], report["environments"]
    model = f" ({policy['model']})" if "model" in policy else ""
    title = f"{policy['name']}{model} on seeds {report['seeds'][0]} to {report['seeds'][1] - 1}"
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
    tries = sorted({k for figures in environments.values() for k in figures["pass_at_k"] if k != "1"}, key=int)
    table.add_column("Environment", no_wrap=True)
    for heading in ("Episodes", "Success (95 %)", "Return", "Turns", "Format", *(f"pass@{k}" for k in tries)):
        table.add_column(heading, justify="right", no_wrap=heading.startswith("Success"))
    for name, figures in environments.items():
        success = _share(figures["success"])
        if figures["success"] is not None:
            success += f" ({_share(figures['success_low'])} to {_share(figures['success_high'])})"
        table.add_row(
            name,
            str(figures["episodes"]) + (f" ({figures['failed']} failed)" if figures["failed"] else ""),
            success,
            "-" if figures["return_mean"] is None else f"{figures['return_mean']:.3f}",
            "-" if figures["turns_mean"] is None else f"{figures['turns_mean']:.1f}",
            _share(figures["format_rate"]),
            *(_share(figures["pass_at_k"].get(k)) for k in tries),
        )
    _print(table, json_file)
    write_report(json_file, json.dumps(report, ensure_ascii=False) + "\n")


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
    table = Table(title=f"A: {first}, B: {second}", title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("Environment", no_wrap=True)
    for heading in ("Pairs", "Success A", "B", "B - A (95 %)", "p (McNemar)", "Return B - A (95 %)"):
        table.add_column(heading, justify="right", no_wrap=True)
    for name, comparison in figures.items():
        table.add_row(
            name,
            str(comparison["pairs"]),
            *map(_share, comparison["success"]),
            _difference(comparison["success_difference"], "+.1%"),
            "-" if comparison["p_value"] is None else f"{comparison['p_value']:.2g}",
            _difference(comparison["return_difference"], "+.3f"),
        )
    _print(table, json_file)
    write_report(json_file, json.dumps({"first": str(first), "second": str(second), "environments": figures}) + "\n")


def _difference(values: Sequence[float] | None, form: str) -> str:
    """Return a difference with its interval, such as `+4.1 % (-0.3 % to +8.5 %)`."""
    if values is None:
        return "-"
    difference, low, high = (format(value, form) for value in values)
    return f"{difference} ({low} to {high})"


def _share(value: float | None) -> str:
    return "-" if value is None else f"{value:.1%}"
