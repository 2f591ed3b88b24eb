"""Charts that compare kinds of runs. Each kind has one line, the mean over its seeds with an interval."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from itertools import product
from pathlib import Path
from statistics import fmean
from typing import Any

from starpod.report.curves import COLOURS, Chart, ChartLine, Point, Rule, smooth
from starpod.report.figures import Kind, show
from starpod.trainer.data.metric_names import metric
from starpod.trainer.diagnostics.metrics import spent_in
from starpod.trainer.evaluation.statistics import mean_interval
from starpod.trainer.output.run_folder import RunFolder
from starpod.trainer.output.run_page import curve

EVALUATION = "evaluation/success"
"""Metric of the success in evaluations.jsonl. `evaluation/success/NAME` is the success in one environment."""
RETURN = "evaluation/return"
"""Name, among metrics, of the environment's own return in evaluations.jsonl, such as the grade of a purchase."""
_EVALUATED = {EVALUATION: ("success", "success"), RETURN: ("return_mean", "return")}
"""Metric -> its key in evaluations.jsonl, and the prefix of the keys of its interval."""

STEPS = "step"
END = math.inf
"""Placeholder for the last step of each run."""
TOKENS = "sampled tokens"
FORKS = "forks"
SPENT = ("environment steps", TOKENS, FORKS)
"""Cumulative quantities, other than STEPS, over which charts can be drawn. A run that used none of one has no line."""

DEFAULT_METRICS = (
    EVALUATION,
    "collect/reward_std_in_group",
    "policy/entropy",
    "collect/response_diversity",
    "update/grad_norm",
    "collect/success",
)


def compare_runs(
    run_dirs: Mapping[str, Sequence[Path]], metrics: Sequence[str] = DEFAULT_METRICS, over: Sequence[str] = (STEPS,)
) -> list[Chart]:
    """Return a chart of each metric over each x axis that any run has.

    Lines are means over seeds, and thin lines the seeds. Bands are 95 % intervals of the mean (Student's t), or the
    evaluation's own interval if there is only one seed.

    Args:
        run_dirs: folders of the seeds by label.
        metrics: names of metrics.
        over: x axes of each metric, STEPS or names of SPENT.
    """
    kinds = {label: [RunFolder(folder) for folder in folders] for label, folders in run_dirs.items()}
    charts = []
    for name, axis in product(metrics, over):
        lines = [
            line
            for colour, (label, folders) in enumerate(kinds.items())
            if (line := _line(label, folders, name, axis, colour % COLOURS)) is not None
        ]
        # A run without iterations is a dot at 0. A line that stays there has nothing to do with this axis.
        lines = [line for line in lines if len(line.points) == 1 or any(x for x, _ in line.points)]
        if axis != STEPS and not any(x for line in lines for x, _ in line.points):
            continue
        spec, environment = metric(_figure(name)), _environment(name)
        rules = _rules(kinds, name, spec.kind) if _figure(name) in _EVALUATED else []
        label = f"{spec.label}: {environment}" if environment else spec.label
        charts.append(Chart(label, lines, spec.kind, axis, rules))
    return [chart for chart in charts if chart]


def _line(label: str, folders: Sequence[RunFolder], name: str, axis: str, colour: int) -> ChartLine | None:
    pairs = [(folder, points) for folder in folders if (points := _curve(folder, name))]
    curves = [points for _, points in pairs]
    if not curves:
        return None
    scales = [spent_by(folder, axis) for folder, _ in pairs]
    dots = _figure(name) in _EVALUATED
    if not dots:
        curves = [smooth(points) for points in curves]
    if len(curves) == 1:
        (at_step,) = scales
        band = [(at_step(x), low, high) for x, low, high in _own_interval(pairs[0][0], name)] if dots else ()
        return ChartLine(label, [(at_step(x), y) for x, y in curves[0]], colour, band=band, dots=dots)
    values: defaultdict[float, list[float]] = defaultdict(list)
    for points in curves:
        for x, y in points:
            values[x].append(y)
    ends = [points[-1] for points in curves]
    if dots and axis != STEPS and len({x for x, _ in ends}) > 1:  # runs with the same budget end at different steps
        values[END] = [y for _, y in ends]
    # A mean over fewer seeds would jump where a run ends early.
    xs = [x for x in sorted(values) if len(values[x]) == len(curves)]
    share = metric(_figure(name)).kind == "share"
    low_end, high_end = (0.0, 1.0) if share else (0.0 if min(map(min, values.values())) >= 0 else -math.inf, math.inf)
    intervals = {x: mean_interval(values[x]) for x in xs}
    places = {
        x: fmean(at_step(end if x == END else x) for at_step, (end, _) in zip(scales, ends, strict=True)) for x in xs
    }
    return ChartLine(
        label,
        [(places[x], fmean(values[x])) for x in xs],
        colour,
        band=[(places[x], max(low, low_end), min(high, high_end)) for x, (low, high) in intervals.items()],
        faint=[[(at_step(x), y) for x, y in points] for at_step, points in zip(scales, curves, strict=True)],
        dots=dots,
    )


def spent_by(folder: RunFolder, axis: str) -> Callable[[float], float]:
    """Return a function from a step to the quantity that the run had used by then."""
    if axis == STEPS:
        return lambda step: step
    total, totals = 0.0, {0.0: 0.0}
    for line in folder.read_metrics():
        total += spent_in(line["metrics"])[axis.replace(" ", "_")]
        totals[line["step"]] = total
    return lambda step: totals[step]


def _curve(folder: RunFolder, name: str) -> list[Point]:
    if _figure(name) in _EVALUATED:
        value = _EVALUATED[_figure(name)][0]
        return [(step, line[value]) for step, line in _evaluations(folder, name) if line.get(value) is not None]
    return curve(folder.read_metrics(), name)


def _environment(name: str) -> str:
    """Return the environment in a metric's name; empty if the metric covers all environments."""
    return name.removeprefix(f"{EVALUATION}/") if name.startswith(f"{EVALUATION}/") else ""


def _figure(name: str) -> str:
    """Return a metric's name without the environment."""
    return EVALUATION if _environment(name) else name


def _evaluations(folder: RunFolder, name: str) -> list[tuple[int, Mapping[str, Any]]]:
    """Return the steps and figures of a run's evaluations, of one environment if the metric's name has one."""
    environment = _environment(name)
    return [
        (line["step"], line.get("environments", {}).get(environment, {}) if environment else line)
        for line in folder.read_evaluations()
    ]


def _own_interval(folder: RunFolder, name: str) -> list[tuple[float, float, float]]:
    low, high = (f"{_EVALUATED[_figure(name)][1]}_{end}" for end in ("low", "high"))
    return [(step, line[low], line[high]) for step, line in _evaluations(folder, name) if line.get(low) is not None]


def _rules(kinds: Mapping[str, Sequence[RunFolder]], name: str, kind: Kind) -> list[Rule]:
    """Return a horizontal line for each reference policy in the runs' evaluations."""
    reference: dict[str, Any] = {}
    for folders in kinds.values():
        for folder in folders:
            for _, line in _evaluations(folder, name):
                reference = line.get("reference") or reference
    value = _EVALUATED[_figure(name)][0]
    return [Rule(each[value], f"{name} {show(each[value], kind)}") for name, each in reference.items() if value in each]
