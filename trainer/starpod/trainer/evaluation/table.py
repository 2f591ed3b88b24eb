"""The table of an evaluation: figures of each model in each environment, and comparisons of pairs of models."""

from __future__ import annotations

import csv
import io
import itertools
from collections.abc import Mapping, Sequence
from typing import Any

from starpod.trainer.evaluation.compare import compare_outcomes
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
    comparisons: `first`, `second`, and the figures of `compare_outcomes` by environment, for each pair of models.
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
        # A version is unknown before the first episode.
        pairs = {name: [models[each]["environments"][name] for each in (first, second)] for name in plan.environments}
        figures = {
            name: _compare(one, other, plan.attempts)
            for name, (one, other) in pairs.items()
            if one["version"] == other["version"]
        }
        report["comparisons"].append({"first": first, "second": second, "environments": figures})
    return report


def _compare(first: Mapping[str, Any], second: Mapping[str, Any], attempts: int) -> dict[str, Any]:
    """Return the figures of `compare_outcomes`, without those of an outcome that one of the models does not have."""
    figures = compare_outcomes(first["results"], second["results"], attempts)
    for name, *derived in (("success", "success_difference", "p_value"), ("return_mean", "return_difference")):
        if None in (first[name], second[name]):
            figures |= {name: [None, None], **dict.fromkeys(derived)}
    return figures


def figure_rows(report: Mapping[str, Any]) -> tuple[list[str], list[list[str]]]:
    """Return the headings and the rows of the table, one row per model and environment.

    Without episodes that say it, a cell is "-".
    """
    tries = max((int(k) for _, _, figures in _cells(report) for k in figures["pass_at_k"]), default=1)
    heads = ["Model", "Environment", "Episodes", "Success (95 %)", "Return (95 %)"]
    forms = {"Turns": ".1f", "Tokens": ".1f", "Seconds": ".2f"}
    passes = {"pass_at_k": f"pass@{tries}", "pass_hat_k": f"pass^{tries}"} if tries > 1 else {}
    rows = []
    for model, environment, figures in _cells(report):
        failed = f" ({figures['failed']} failed)" if figures["failed"] else ""
        rows.append([model, environment, f"{figures['episodes']}{failed}"])
        rows[-1] += [format_interval(figures, "success", "success", ".1%")]
        rows[-1] += [format_interval(figures, "return_mean", "return", ".3f")]
        rows[-1] += [format_figure(figures[f"{head.lower()}_mean"], form) for head, form in forms.items()]
        rows[-1] += [format_figure(figures["format_rate"], ".1%")]
        rows[-1] += [format_figure(figures[name].get(str(tries)), ".1%") for name in passes]
    return [*heads, *forms, "Format", *passes.values()], rows


def comparison_rows(report: Mapping[str, Any]) -> tuple[list[str], list[list[str]]]:
    """Return the headings and the rows of the comparisons, one row per pair of models and environment."""
    heads = ["A", "B", "Environment", "Pairs", "Success A", "Success B", "B - A (95 %)", "p (McNemar)"]
    rows = []
    for each in report["comparisons"]:
        for environment, figures in each["environments"].items():
            success = [format_figure(value, ".1%") for value in figures["success"]]
            row = [each["first"], each["second"], environment, str(figures["pairs"]), *success]
            row += [_difference(figures["success_difference"], "+.1%"), format_figure(figures["p_value"], ".2g")]
            rows.append([*row, _difference(figures["return_difference"], "+.3f")])
    return [*heads, "Return B - A (95 %)"], rows


def to_csv(report: Mapping[str, Any]) -> str:
    """Return the table as CSV with exact numbers. A figure without data is empty."""
    rows = []
    for model, environment, figures in _cells(report):
        row = {"model": model, "environment": environment, **{name: figures[name] for name in _FIGURES}}
        for name, sign in (("pass_at_k", "@"), ("pass_hat_k", "^")):
            row |= {f"pass{sign}{k}": value for k, value in figures[name].items()}
        rows.append(row)
    text = io.StringIO()
    writer = csv.DictWriter(text, dict.fromkeys(name for row in rows for name in row), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
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
