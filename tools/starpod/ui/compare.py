"""Two to eight runs beside each other: curves, the keys that differ, and the paired test on the same held-out seeds."""

from __future__ import annotations

import json
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from itertools import combinations
from pathlib import Path
from typing import Any

from fastapi import Request, Response
from markupsafe import Markup
from starlette.exceptions import HTTPException

from starpod.report.charts import Mark, Point, Series, line_chart, smooth
from starpod.report.figures import Kind, show
from starpod.trainer.evaluation.compare import NotComparable, compare, read_evaluation
from starpod.trainer.output.sections import curve as curve_of
from starpod.trainer.output.sections import for_each_width, warning_marks
from starpod.trainer.output.words import SHOWN, metric
from starpod.ui.index import Curve, spread
from starpod.ui.page import Site, query, render
from starpod.ui.reading import DAMAGED, mapping, objects

MOST = 8
AXES = {"step": "iterations", "seconds": "training time", "env_steps": "environment steps", "tokens": "sampled tokens"}
"""Quantities that curves can be drawn over."""
METRICS = ("collect/success", "policy/entropy", "collect/own_std_in_group", "collect/response_diversity")
"""Curves that are drawn beside that of the evaluations, unless others are chosen."""
SEEDS = 200
"""Links to episodes that one alone solved."""
MARKS, WARNINGS = 200, 20
"""Warnings that are marked on a chart, and that are told below the charts."""


def compare_page(site: Site, request: Request) -> Response:
    """The runs of the query, in its order: the link can be sent."""
    paths = list(dict.fromkeys(request.query_params.getlist("run")))
    if not 2 <= len(paths) <= MOST:
        raise HTTPException(400, f"Mark two to {MOST} runs to compare them; marked: {len(paths) or 'none'}.")
    axis = request.query_params.get("over", "step")
    if axis not in AXES:
        raise HTTPException(400, f"over={axis} is none of {', '.join(AXES)}.")
    runs = [
        {**site.run(path), "letter": letter, "folder": site.folder(path)}
        for path, letter in zip(paths, "ABCDEFGH", strict=False)
    ]
    curves = [site.index.curve(run["run"]) for run in runs]
    logged = {name for curve in curves for line in curve.lines for name in line["metrics"]}
    chosen = [name for name in request.query_params.getlist("metric") if name in logged]
    names = chosen or [name for name in METRICS if name in logged]
    marks = _warnings(runs, curves, axis)
    charts = [_evaluations(runs, curves, axis, marks), *(_metric(runs, curves, name, axis, marks) for name in names)]
    return render(
        "compare.html", site=site, runs=runs, axes=AXES, axis=axis, charts=[Markup(chart) for chart in charts if chart],
        metrics=[(name, metric(name).label) for name in sorted(logged, key=lambda name: (name not in SHOWN, name))],
        chosen=chosen, warned=marks[:WARNINGS], more=len(marks[WARNINGS:]),
        differing=_differing(runs), pairs=_pairs(runs), link=query("/compare", run=paths, over=axis, metric=chosen),
    )  # fmt: skip


def _over(curve: Curve, axis: str, points: Sequence[Point]) -> list[Point]:
    """The points, placed by what had been spent at their step."""
    if axis == "step":
        return list(points)
    spent: Mapping[int, float] = {"seconds": curve.seconds, "env_steps": curve.env_steps, "tokens": curve.tokens}[axis]
    steps = sorted(spent)
    found = []
    for step, value in points:
        place = bisect_right(steps, step)
        found.append((spent[steps[place - 1]] if place else 0.0, value))
    return found


def _warnings(runs: Sequence[Mapping[str, Any]], curves: Sequence[Curve], axis: str) -> list[Mark]:
    """The warnings of all runs, each with the letter of its run, placed on the axis."""
    found = []
    for run, curve in zip(runs, curves, strict=True):
        warned = warning_marks(curve.lines)
        places = _over(curve, axis, [(mark.x, 0.0) for mark in warned])
        found += [
            Mark(x, f"{run['letter']}, step {mark.x:,.0f}: {mark.label}")
            for (x, _), mark in zip(places, warned, strict=True)
        ]
    return found


def _metric(
    runs: Sequence[Mapping[str, Any]], curves: Sequence[Curve], name: str, axis: str, marks: Sequence[Mark]
) -> str:
    known = metric(name)
    series = []
    for place, (run, curve) in enumerate(zip(runs, curves, strict=True)):
        points = _over(curve, axis, curve_of(curve.lines, name))
        series.append(Series(run["letter"], smooth(points), place, faint=[points]))
    return _chart(known.label, series, known.kind, axis, marks)


def _evaluations(runs: Sequence[Mapping[str, Any]], curves: Sequence[Curve], axis: str, marks: Sequence[Mark]) -> str:
    series = []
    for place, (run, curve) in enumerate(zip(runs, curves, strict=True)):
        lines = [line for line in objects(run["folder"] / "evaluations.jsonl", []) if line.get("success") is not None]
        shown = spread(lines, 200)
        points = _over(curve, axis, [(line["step"], line["success"]) for line in shown])
        band = [
            (x, line["success_low"], line["success_high"])
            for (x, _), line in zip(points, shown, strict=True)
            if line.get("success_low") is not None and line.get("success_high") is not None
        ]
        series.append(Series(run["letter"], points, place, band=band, dots=True))
    return _chart("Success on selection seeds", series, "share", axis, marks)


def _chart(title: str, series: Sequence[Series], kind: Kind, axis: str, marks: Sequence[Mark]) -> str:
    xs = [x for each in series for x, _ in each.points]
    inside = spread([mark for mark in marks if xs and min(xs) <= mark.x <= max(xs)], MARKS)
    return for_each_width(
        lambda width: line_chart(
            title,
            series,
            marks=inside,
            kind=kind,
            x_label=AXES[axis],
            width=width,
            height=300 if width > 400 else 220,
        )
    )


def _differing(runs: Sequence[Mapping[str, Any]]) -> list[tuple[str, list[str]]]:
    """Dotted keys of the configurations that are not the same in all runs, with the value of each."""
    flat = [_flat(mapping(run["folder"] / "config.yaml", [])) for run in runs]
    keys = dict.fromkeys(key for values in flat for key in values)
    rows = [(key, [values.get(key, "-") for values in flat]) for key in keys]
    return [(key, values) for key, values in rows if len(set(values)) > 1]


def _flat(values: Mapping[str, Any], prefix: str = "") -> dict[str, str]:
    found: dict[str, str] = {}
    for name, value in values.items():
        if isinstance(value, dict) and value:
            found |= _flat(value, f"{prefix}{name}.")
        else:
            found[f"{prefix}{name}"] = value if isinstance(value, str) else json.dumps(value)
    return found


def _pairs(runs: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Paired comparisons of the final evaluations of every two runs."""
    reports: dict[str, dict[str, Any] | str] = {}
    for run in runs:
        try:
            reports[run["letter"]] = read_evaluation(Path(run["folder"]))
        except (NotComparable, OSError, *DAMAGED) as error:
            reports[run["letter"]] = str(error)
    return [
        _pair(first, second, [reports[run["letter"]] for run in (first, second)])
        for first, second in combinations(runs, 2)
    ]


def _pair(
    first: Mapping[str, Any], second: Mapping[str, Any], reports: Sequence[dict[str, Any] | str]
) -> dict[str, Any]:
    """Paired comparison of two runs; `problem` where they do not pair. reports: of both, or why there is none."""
    pair: dict[str, Any] = {"first": first, "second": second, "problem": "", "environments": []}
    one, other = reports
    if isinstance(one, str) or isinstance(other, str):
        pair["problem"] = one if isinstance(one, str) else other
        return pair
    try:
        compared = compare(one, other)
    except (NotComparable, *DAMAGED) as error:
        pair["problem"] = str(error)
        return pair
    for environment, figures in compared.items():
        results = [_by_seed(report["environments"][environment]["results"]) for report in (one, other)]
        apart: dict[str, list[tuple[int, str, str]]] = {"first": [], "second": []}
        for seed in sorted(results[0].keys() & results[1].keys()):
            solved = results[0][seed]
            if solved != results[1][seed]:
                here, there = (query("/episodes", run=run["path"], kind="final", seed=seed) for run in (first, second))
                apart["first" if solved else "second"].append((seed, here, there))
        difference = figures["success_difference"]
        pair["environments"].append(
            {
                "name": environment,
                "figures": figures,
                "difference": _signed_share(difference[0]) if difference else "-",
                "interval": f"{_signed_share(difference[1])} to {_signed_share(difference[2])}" if difference else "",
                "p_value": show(figures["p_value"]) if figures["p_value"] is not None else "-",
                "verdict": _verdict(difference, first, second),
                "apart": {name: seeds[:SEEDS] for name, seeds in apart.items()},
            }
        )
    return pair


def _by_seed(results: Mapping[str, Any]) -> dict[int, bool]:
    return {seed: success is True for seed, success in zip(results["seed"], results["success"], strict=True)}


def _signed_share(value: float) -> str:
    return f"{100 * value:+.1f}".replace("-", "\N{MINUS SIGN}") + " points"


def _verdict(difference: Sequence[float] | None, first: Mapping[str, Any], second: Mapping[str, Any]) -> str:
    if difference is None:
        return ""
    if difference[1] > 0:
        return f"{second['letter']} solves more."
    if difference[2] < 0:
        return f"{first['letter']} solves more."
    return "The interval holds 0: the difference may be chance."
