"""The table of an evaluation: figures of each model in each environment, and comparisons of pairs of models."""

from __future__ import annotations

import csv
import io
import itertools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from starpod.trainer.evaluation.compare import compare_evaluations
from starpod.trainer.evaluation.figures import facts_of, summarise
from starpod.trainer.evaluation.folder import EvaluationFolder
from starpod.trainer.evaluation.plan import EvaluationPlan

_FIGURES = """
episodes failed success success_low success_high return_mean return_low return_high turns_mean tokens_mean seconds_mean
format_rate
""".split()
"""Figures of a row as CSV, beside pass@k and pass^k."""


def evaluation_report(folder: EvaluationFolder, plan: EvaluationPlan) -> dict[str, Any]:
    """Return all figures of an evaluation as JSON values. Raises BadEpisodes.

    seeds: first seed, and the one after the last. attempts: number of episodes per start state.
    models: by name the facts of the plan, and `environments`: by name the figures of `summarise` and `facts_of`, and
        `error`, the reason why the first failed episode failed.
    comparisons: `first`, `second`, and the figures of `compare_evaluations` for each pair of models.
    """
    report: dict[str, Any] = {"seeds": [plan.seeds.start, plan.seeds.stop], "attempts": plan.attempts}
    models = report["models"] = {}
    for model, facts in plan.models.items():
        episodes = list(folder.read(plan, model).values())
        environments = {}
        for name, environment in plan.environments.items():
            results = sorted(
                (each for each in episodes if each.kind == name), key=lambda each: (each.seed, each.member)
            )
            error = next((each.error for each in results if each.failed), "")
            environments[name] = {**facts_of(environment.task, results), **summarise(results), "error": error}
        models[model] = {**facts, "environments": environments}
    report["comparisons"] = []
    for first, second in itertools.combinations(models, 2):
        # Pairs need the same version, which is unknown before the first episode.
        common = [name for name in plan.environments if _version(report, first, name) == _version(report, second, name)]
        figures = compare_evaluations(*(of_model(report, model, common) for model in (first, second)))
        report["comparisons"].append({"first": first, "second": second, "environments": figures})
    return report


def _version(report: Mapping[str, Any], model: str, environment: str) -> str:
    return str(report["models"][model]["environments"][environment]["version"])


def of_model(report: Mapping[str, Any], model: str, environments: Iterable[str] | None = None) -> dict[str, Any]:
    """Return a model's figures as an argument of `compare_evaluations`. environments: only these; None: all."""
    figures = report["models"][model]["environments"]
    chosen = {name: figures[name] for name in (figures if environments is None else environments)}
    return {"seeds": report["seeds"], "samples": report["attempts"], "environments": chosen}


def figure_rows(report: Mapping[str, Any]) -> tuple[list[str], list[list[str]]]:
    """Return the headings and the rows of the table, one row per model and environment.

    Without episodes that say it, a cell is "-".
    """
    tries = max((int(k) for _, _, figures in _cells(report) for k in figures["pass_at_k"]), default=1)
    heads = [
        "Model",
        "Environment",
        "Episodes",
        "Success (95 %)",
        "Return (95 %)",
        "Turns",
        "Tokens",
        "Seconds",
        "Format",
    ]
    heads += [f"pass@{tries}", f"pass^{tries}"] if tries > 1 else []
    rows = []
    for model, environment, figures in _cells(report):
        failed = f" ({figures['failed']} failed)" if figures["failed"] else ""
        row = [model, environment, f"{figures['episodes']}{failed}"]
        row += [
            format_interval(figures, "success", "success", ".1%"),
            format_interval(figures, "return_mean", "return", ".3f"),
        ]
        forms = (("turns_mean", ".1f"), ("tokens_mean", ".1f"), ("seconds_mean", ".2f"), ("format_rate", ".1%"))
        row += [format_figure(figures[name], form) for name, form in forms]
        if tries > 1:
            row += [format_figure(figures[name].get(str(tries)), ".1%") for name in ("pass_at_k", "pass_hat_k")]
        rows.append(row)
    return heads, rows


def comparison_rows(report: Mapping[str, Any]) -> tuple[list[str], list[list[str]]]:
    """Return the headings and the rows of the comparisons, one row per pair of models and environment."""
    heads = [
        "A",
        "B",
        "Environment",
        "Pairs",
        "Success A",
        "Success B",
        "B - A (95 %)",
        "p (McNemar)",
        "Return B - A (95 %)",
    ]
    rows = []
    for each in report["comparisons"]:
        for environment, figures in each["environments"].items():
            success = [format_figure(value, ".1%") for value in figures["success"]]
            row = [each["first"], each["second"], environment, str(figures["pairs"]), *success]
            row += [_difference(figures["success_difference"], "+.1%"), format_figure(figures["p_value"], ".2g")]
            rows.append([*row, _difference(figures["return_difference"], "+.3f")])
    return heads, rows


def to_csv(report: Mapping[str, Any]) -> str:
    """Return the table as CSV with exact numbers. A figure without data is empty."""
    attempts = list(dict.fromkeys(k for _, _, figures in _cells(report) for k in figures["pass_at_k"]))
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    passes = [(name, sign, k) for k in attempts for name, sign in (("pass_at_k", "@"), ("pass_hat_k", "^"))]
    writer.writerow(["model", "environment", *_FIGURES, *(f"pass{sign}{k}" for _, sign, k in passes)])
    for model, environment, figures in _cells(report):
        row = [figures[name] for name in _FIGURES] + [figures[name].get(k) for name, _, k in passes]
        writer.writerow([model, environment, *row])
    return text.getvalue()


def to_markdown(report: Mapping[str, Any]) -> str:
    """Return the table, and the comparisons if there are any, as Markdown."""
    tables = []
    for heads, rows in (figure_rows(report), comparison_rows(report)):
        if rows:
            lines = [heads, ["---"] * len(heads), *rows]
            cells = [[cell.replace("|", "\\|") for cell in line] for line in lines]
            tables.append("".join(f"| {' | '.join(line)} |\n" for line in cells))
    return "\n".join(tables)


def _cells(report: Mapping[str, Any]) -> list[tuple[str, str, Mapping[str, Any]]]:
    """Return model, environment and figures of each row."""
    return [
        (model, environment, figures)
        for model, facts in report["models"].items()
        for environment, figures in facts["environments"].items()
    ]


def format_figure(value: float | None, form: str) -> str:
    """Return a figure as text, "-" without one. form: format specification, such as `.1%`."""
    return "-" if value is None else format(value, form)


def format_interval(figures: Mapping[str, Any], name: str, prefix: str, form: str) -> str:
    """Return a figure with its interval, such as `0.62 (0.58 to 0.65)`. prefix: beginning of the bounds' names."""
    value, low, high = (figures[key] for key in (name, f"{prefix}_low", f"{prefix}_high"))
    return format_figure(value, form) + (f" ({low:{form}} to {high:{form}})" if low is not None else "")


def _difference(values: Sequence[float] | None, form: str) -> str:
    """Return a difference with its interval, such as `+4.1 % (-0.3 % to +8.5 %)`."""
    if values is None:
        return "-"
    difference, low, high = (format(value, form) for value in values)
    return f"{difference} ({low} to {high})"
