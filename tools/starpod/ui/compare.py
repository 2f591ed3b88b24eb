"""Comparison of runs: their curves, the keys that differ, and the paired test on the same held-out seeds.

Runs whose configurations differ only in the seed can be drawn as one line: the mean over seeds with its interval.
"""

from __future__ import annotations

import json
import math
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from itertools import combinations
from pathlib import Path
from statistics import fmean
from typing import Any, TypeVar, cast

import numpy as np
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import HTMLResponse, Response

from starpod.report.curves import COLOURS, Chart, ChartLine, Mark, Point, spread
from starpod.report.figures import Kind, show
from starpod.trainer.data.metric_names import SHOWN, metric
from starpod.trainer.evaluation.compare import NotComparable, compare_evaluations, read_evaluation
from starpod.trainer.evaluation.statistics import CONFIDENCE, mean_interval, t_quantile
from starpod.trainer.output.run_page import curve as curve_of
from starpod.trainer.output.run_page import evaluated, warning_marks
from starpod.trainer.output.words import brief, figure_of
from starpod.ui.index import Curve
from starpod.ui.page import LiveSite, query, render, templates
from starpod.ui.reading import DAMAGED, evaluations_of, mapping

Placed = TypeVar("Placed", bound=tuple[float, ...])

MOST = 50
"""Maximum number of runs on a page, in at most COLOURS lines."""
AXES = {"step": "iterations", "seconds": "training time", "env_steps": "environment steps", "tokens": "sampled tokens"}
"""Quantities that the x axis can show."""
METRICS = ("collect/success", "policy/entropy", "collect/own_std_in_group", "collect/response_diversity")
"""Metrics that are drawn by default, below the curve of evaluations."""
SEEDS = 200
"""Maximum number of links to episodes that one run of a pair solved and the other run did not, for each run."""
WARNINGS = 20
"""Maximum number of warnings that are listed below the charts."""
INTERVAL_SEEDS = 3
"""Minimum number of runs for a confidence interval of their mean. With two runs, it would be too wide to be useful."""
POINTS = 200
"""Maximum number of points of a curve of the mean over seeds."""


@dataclass(slots=True)
class RunCurves:
    """A run that is compared."""

    summary: dict[str, Any]
    folder: Path
    config: dict[str, str]
    curve: Curve
    name: str = ""
    """Letter of the run's line, with the seed if the line has several runs."""
    colour: int = 0

    @property
    def path(self) -> str:
        return str(self.summary["path"])

    @property
    def seed(self) -> str:
        return self.config.get("seed", "")


@dataclass(slots=True)
class SeedGroup:
    """A line of the charts: one run, or the runs that differ only in their seed."""

    letter: str
    colour: int
    runs: list[RunCurves]

    @property
    def label(self) -> str:
        return f"{self.letter}, {len(self.runs)} seeds" if len(self.runs) > 1 else self.letter

    def success(self) -> tuple[str, str]:
        """Return the mean success of the runs' evaluations, and a note: interval, number of runs, whether final."""
        finals = [run.summary["evaluation"] for run in self.runs if run.summary["evaluation"] and run.summary["final"]]
        evaluations = finals or [run.summary["evaluation"] for run in self.runs if run.summary["evaluation"]]
        if not evaluations:
            return "-", ""
        _, name, kind = figure_of(evaluations)
        values = [evaluation[name] for evaluation in evaluations if evaluation[name] is not None]
        notes = [f"mean of {len(values)}"]
        if len(values) >= INTERVAL_SEEDS and min(values) < max(values):
            low, high = mean_interval(values)
            share = f"{100 * max(low, 0):.0f} to {100 * min(high, 1):.0f} %"
            notes.insert(0, share if kind == "share" else f"{show(low)} to {show(high)}")
        return brief({name: fmean(values)}), ", ".join([*notes, *(["final"] if finals else [])])


@dataclass(frozen=True, slots=True)
class ComparisonView:
    """The curves to draw, as chosen in the page's form. The page's script decides how they look."""

    over: str = "step"
    together: bool = False
    metrics: list[str] = field(default_factory=list)

    @classmethod
    def from_request(cls, request: Request, runs: int) -> ComparisonView:
        """Read the settings from a request that compares `runs` runs. Raises HTTPException 400."""
        parameters = request.query_params
        over, seeds = parameters.get("over", "step"), parameters.get("seeds", "together" if runs > COLOURS else "apart")
        for name, value, values in (("over", over, AXES), ("seeds", seeds, ("apart", "together"))):
            if value not in values:
                raise HTTPException(400, f"{name}={value[:20]} is not one of {', '.join(values)}.")
        return cls(over, seeds == "together", parameters.getlist("metric"))


def compare_page(site: LiveSite, request: Request) -> Response:
    """Compare the runs named in the query, in that order. The address holds all settings, so that it can be shared."""
    return render("compare.html", site=site, **_comparison(site, request))


def compare_file(site: LiveSite, request: Request) -> Response:
    """Return the comparison as a standalone HTML file, without links that lead elsewhere."""
    page = templates().get_template("compare.html").render(file=True, **_comparison(site, request))
    return HTMLResponse(page, headers={"Content-Disposition": 'attachment; filename="comparison.html"'})


def _comparison(site: LiveSite, request: Request) -> dict[str, Any]:
    """Return the values of the template. Raises HTTPException."""
    paths = list(dict.fromkeys(request.query_params.getlist("run")))
    if not 2 <= len(paths) <= MOST:
        raise HTTPException(400, f"Mark two to {MOST} runs to compare them; marked: {len(paths) or 'none'}.")
    view = ComparisonView.from_request(request, len(paths))
    summaries = [site.run(path) for path in paths]
    logged = {name for summary in summaries for name in site.index.metrics(summary["run"])}
    view.metrics[:] = [name for name in view.metrics if name in logged]
    names = view.metrics or [name for name in METRICS if name in logged]
    runs = [_run(site, summary, names) for summary in summaries]
    lines = _lines(runs, view.together)
    marks = _warnings(runs, view.over)
    charts = [_evaluations(lines, view), *(_metric(lines, name, view) for name in names)]
    return {
        "runs": runs, "lines": lines, "view": view, "axes": AXES, "query_text": request.url.query,
        "charts": [replace(chart, marks=marks) for chart in charts if chart],
        "metrics": [(name, metric(name).label) for name in sorted(logged, key=lambda name: (name not in SHOWN, name))],
        "warned": marks[:WARNINGS], "more": len(marks[WARNINGS:]), "differing": _differing(runs, lines),
        "pairs": _pairs(runs) if len(runs) <= COLOURS else None, "most_pairs": COLOURS,
    }  # fmt: skip


def _run(site: LiveSite, summary: dict[str, Any], metrics: Sequence[str]) -> RunCurves:
    folder = site.folder(summary["path"])
    try:
        stat = (folder / "config.yaml").stat()
        config = _config(folder / "config.yaml", (stat.st_ino, stat.st_mtime_ns, stat.st_size))
    except OSError:
        config = {}
    return RunCurves(summary, folder, config, site.index.curve(summary["run"], metrics))


@lru_cache(maxsize=256)
def _config(path: Path, stamp: tuple[int, int, int]) -> dict[str, str]:
    """Return a configuration's values by dotted key. It is cached, because parsing takes as long as drawing a chart."""
    return _flat(mapping(path, []))


def _flat(values: Mapping[str, Any], prefix: str = "") -> dict[str, str]:
    flat_values: dict[str, str] = {}
    for name, value in values.items():
        if isinstance(value, dict) and value:
            flat_values |= _flat(value, f"{prefix}{name}.")
        else:
            flat_values[f"{prefix}{name}"] = value if isinstance(value, str) else json.dumps(value)
    return flat_values


def _lines(runs: Sequence[RunCurves], together: bool) -> list[SeedGroup]:
    """Group runs into lines, in order, with letters and colours. Raises HTTPException 400 for too many lines."""
    groups: dict[Any, list[RunCurves]] = {}
    for run in runs:
        settings = frozenset((key, value) for key, value in run.config.items() if key != "seed")
        groups.setdefault(settings if together and settings else run.path, []).append(run)
    if len(groups) > COLOURS:
        raise HTTPException(
            400,
            f"These runs are {len(groups)} lines, and {COLOURS} can be distinguished. Mark fewer runs, or use "
            "seeds=together: runs that differ only in their seed then share a line.",
        )
    lines = [SeedGroup("ABCDEFGH"[index], index, group) for index, group in enumerate(groups.values())]
    for line in lines:
        for run in line.runs:
            run.colour = line.colour
            run.name = f"{line.letter} seed {run.seed}" if len(line.runs) > 1 else line.letter
    return lines


def _over(curve: Curve, axis: str, points: Sequence[Placed]) -> list[Placed]:
    """Replace each point's step by the run's total at that step, such as the seconds or tokens so far."""
    if axis == "step":
        return list(points)
    totals: Mapping[int, float] = {"seconds": curve.seconds, "env_steps": curve.env_steps, "tokens": curve.tokens}[axis]
    steps = sorted(totals)
    new_points = []
    for step, *values in points:
        index = bisect_right(steps, step)
        new_points.append((totals[steps[index - 1]] if index else 0.0, *values))
    return cast(list[Placed], new_points)


def _warnings(runs: Sequence[RunCurves], axis: str) -> list[Mark]:
    """Return the warnings of all runs, each with its run's name and colour, placed on the x axis."""
    marks = []
    for run in runs:
        run_marks = warning_marks(run.curve.lines)
        places = _over(run.curve, axis, [(mark.x, 0.0) for mark in run_marks])
        marks += [
            Mark(x, f"{run.name}, step {mark.x:,.0f}: {mark.label}", run.name, run.colour)
            for (x, _), mark in zip(places, run_marks, strict=True)
        ]
    return marks


def _metric(lines: Sequence[SeedGroup], name: str, view: ComparisonView) -> Chart:
    spec = metric(name)
    drawn = []
    for line in lines:
        curves = [(run.curve, curve_of(run.curve.lines, name)) for run in line.runs]
        if len(line.runs) > 1:
            drawn.append(_mean(line, curves, view, spec.kind))
        else:
            drawn.append(ChartLine(line.label, _over(line.runs[0].curve, view.over, curves[0][1]), line.colour))
    return Chart(spec.label, drawn, spec.kind, AXES[view.over], size="wide")


def _evaluations(lines: Sequence[SeedGroup], view: ComparisonView) -> Chart:
    drawn, rows_of = [], [[spread(evaluations_of(run.folder, []), POINTS) for run in line.runs] for line in lines]
    figure, _, kind = figure_of(row for rows in rows_of for each in rows for row in each)
    for line, rows in zip(lines, rows_of, strict=True):
        own = [evaluated(line.label, each, figure, line.colour) for each in rows]
        if len(line.runs) > 1:
            curves = [(run.curve, each.points) for run, each in zip(line.runs, own, strict=True)]
            drawn.append(_mean(line, curves, view, kind, dots=True))
            continue
        run, points = line.runs[0], _over(line.runs[0].curve, view.over, own[0].points)
        band = _over(run.curve, view.over, own[0].band)
        drawn.append(replace(own[0], points=points, band=band))
    return Chart(f"{figure.capitalize()} on selection seeds", drawn, kind, AXES[view.over], size="wide")


def _mean(
    line: SeedGroup,
    run_curves: Sequence[tuple[Curve, Sequence[Point]]],
    view: ComparisonView,
    kind: Kind,
    *,
    dots: bool = False,
) -> ChartLine:
    """Return the mean over the runs of a line, with its 95 % interval (Student's t) if there are three or more.

    The mean ends where the shortest run ends, because it would jump where a seed drops out. Faint lines show the single
    runs if there are only two.

    Args:
        run_curves: curve of each run, and its points (step, value) of the metric.
        dots: whether to draw a dot at each point. These are evaluations, which are not smoothed.
    """
    run_curves = [(curve, points) for curve, points in run_curves if points]
    if not run_curves:
        return ChartLine(line.label, [], line.colour)
    first, last = max(points[0][0] for _, points in run_curves), min(points[-1][0] for _, points in run_curves)
    steps = spread(sorted({x for _, points in run_curves for x, _ in points if first <= x <= last}), POINTS)
    if not steps:  # the shortest run has not reached the first point of a long one, which is a mean over iterations
        return ChartLine(line.label, [], line.colour)
    places = np.mean([[x for x, _ in _over(curve, view.over, [(x, 0.0) for x in steps])] for curve, _ in run_curves], 0)

    def at_steps(curves: Sequence[Sequence[Point]]) -> Any:
        return np.array([np.interp(steps, [x for x, _ in points], [y for _, y in points]) for points in curves])

    def drawn(values: Any) -> list[Point]:
        return list(zip(places.tolist(), values.tolist(), strict=True))

    raw = at_steps([points for _, points in run_curves])
    mean, count = raw.mean(0), len(run_curves)
    if count < INTERVAL_SEEDS:
        return ChartLine(line.label, drawn(mean), line.colour, faint=[drawn(row) for row in raw], dots=dots)
    half_width = t_quantile((1 + CONFIDENCE) / 2, count - 1) * raw.std(0, ddof=1) / math.sqrt(count)
    low, high = (0.0, 1.0) if kind == "share" else (0.0 if raw.min() >= 0 else -math.inf, math.inf)
    edges = np.clip(mean - half_width, low, high), np.clip(mean + half_width, low, high)
    band = list(zip(places.tolist(), edges[0].tolist(), edges[1].tolist(), strict=True))
    return ChartLine(line.label, drawn(mean), line.colour, band=band, dots=dots)


def _differing(runs: Sequence[RunCurves], lines: Sequence[SeedGroup]) -> list[tuple[str, list[str]]]:
    """Return the dotted keys whose values differ between runs, each with the values of every line."""
    keys = dict.fromkeys(key for run in runs for key in run.config)
    return [
        (key, [", ".join(dict.fromkeys(run.config.get(key, "-") for run in line.runs)) for line in lines])
        for key in keys
        if len({run.config.get(key, "-") for run in runs}) > 1
    ]


def _pairs(runs: Sequence[RunCurves]) -> list[dict[str, Any]]:
    """Compare the final evaluations of each pair of runs."""
    reports: list[dict[str, Any] | str] = []
    for run in runs:
        try:
            reports.append(read_evaluation(run.folder))
        except (NotComparable, OSError, *DAMAGED) as error:
            reports.append(str(error))
    return [
        _pair(first, second, reports)
        for (first, second), reports in zip(combinations(runs, 2), combinations(reports, 2), strict=True)
    ]


def _pair(first: RunCurves, second: RunCurves, reports: Sequence[dict[str, Any] | str]) -> dict[str, Any]:
    """Compare two runs seed by seed. If they cannot be compared, `problem` says why.

    reports: final evaluation of each run, or why it has none.
    """
    pair: dict[str, Any] = {"first": first, "second": second, "problem": "", "environments": []}
    first_report, second_report = reports
    if isinstance(first_report, str) or isinstance(second_report, str):
        pair["problem"] = first_report if isinstance(first_report, str) else second_report
        return pair
    try:
        comparison = compare_evaluations(first_report, second_report)
    except (NotComparable, *DAMAGED) as error:
        pair["problem"] = str(error)
        return pair
    for environment, figures in comparison.items():
        results = [_by_seed(report["environments"][environment]["results"]) for report in (first_report, second_report)]
        seeds_by_winner: dict[str, list[tuple[int, str, str]]] = {"first": [], "second": []}
        for seed in sorted(results[0].keys() & results[1].keys()):
            is_solved = results[0][seed]
            if is_solved != results[1][seed]:
                here, there = (query("/episodes", run=run.path, kind="final", seed=seed) for run in (first, second))
                seeds_by_winner["first" if is_solved else "second"].append((seed, here, there))
        difference = figures["success_difference"]
        pair["environments"].append(
            {
                "name": environment,
                "figures": figures,
                "difference": _signed_share(difference[0]) if difference else "-",
                "interval": f"{_signed_share(difference[1])} to {_signed_share(difference[2])}" if difference else "",
                "p_value": show(figures["p_value"]) if figures["p_value"] is not None else "-",
                "verdict": _verdict(difference, first, second),
                "apart": {name: seeds[:SEEDS] for name, seeds in seeds_by_winner.items()},
            }
        )
    return pair


def _by_seed(results: Mapping[str, Any]) -> dict[int, bool]:
    return {seed: success is True for seed, success in zip(results["seed"], results["success"], strict=True)}


def _signed_share(value: float) -> str:
    return f"{100 * value:+.1f}".replace("-", "\N{MINUS SIGN}") + " points"


def _verdict(difference: Sequence[float] | None, first: RunCurves, second: RunCurves) -> str:
    if difference is None:
        return ""
    if difference[1] > 0:
        return f"{second.name} solves more."
    if difference[2] < 0:
        return f"{first.name} solves more."
    return "The interval contains 0, so the difference may be chance."
