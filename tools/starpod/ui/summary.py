"""Summary of a run for the list of runs: its environment, state, latest evaluation and remaining time."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from starpod.report.curves import smooth, spread
from starpod.trainer.evaluation.folder import PLAN
from starpod.trainer.output.words import evaluation_after_best, missing_result, standing_warnings
from starpod.ui.reading import FIGURES, evaluations_of, mapping, read_notes, status

SUMMARISED = ("config.yaml", "run.json", "metrics.jsonl", "evaluations.jsonl", "final.json", "notes.json", PLAN)
"""Files from which the summary of a run is made."""
SPARK = 60
"""Maximum number of points of a run's sparkline."""
_MOST_FLOAT = 1e300


def fits(value: float) -> bool:
    """Return whether sums of many such values are finite."""
    return -_MOST_FLOAT < value < _MOST_FLOAT


def as_number(value: Any) -> float | None:
    """Return the value if it is a finite number of moderate size, else None."""
    return value if isinstance(value, int | float) and fits(value) else None


def summarise(
    database: sqlite3.Connection, run: int, folder: Path, metrics_problems: Sequence[str], locks: set[int]
) -> dict[str, Any]:
    """Return the summary of a run for the list of runs, as JSON values.

    Args:
        metrics_problems: sentences about metrics that could not be read.
        locks: result of `held_locks`.
    """
    problems = list(metrics_problems)
    facts, config = mapping(folder / "run.json", problems), mapping(folder / "config.yaml", problems)
    final = mapping(folder / "final.json", problems)
    evaluations = evaluations_of(folder, problems)
    points = database.execute(
        "SELECT count, step, time, seconds, metrics FROM points WHERE run = ? ORDER BY bucket", (run,)
    ).fetchall()
    warnings = standing_warnings(database.execute("SELECT step, text FROM warnings WHERE run = ?", (run,)).fetchall())
    success = [
        (row["step"], mean)
        for row in points
        if (mean := json.loads(row["metrics"]).get("collect/success", [None])[0]) is not None
    ]
    start_time = as_number(facts.get("time"))
    written = points[-1]["time"] if points else start_time or 0.0
    tasks = _part(config, "environments")
    environment, stop = _part(config, "environment"), _part(config, "stop")
    environments = ", ".join(str(_part(tasks, name).get("id") or name) for name in tasks)
    evaluation = final or (evaluations[-1] if evaluations else {})
    last = evaluation_after_best(final, evaluations)
    state = status(folder, facts, locks, written)
    plan = mapping(folder / PLAN, problems)
    if plan:
        environments = ", ".join(map(str, _part(plan, "environments")))
        state = "running" if state == "running" else "ended"
        start_time = written = (folder / PLAN).stat().st_mtime
    seconds = points[-1]["seconds"] if points else 0.0
    return {
        **read_notes(folder, problems),
        "title": f"evaluation of {', '.join(map(str, _part(plan, 'models')))}"
        if plan
        else str(facts.get("title") or ""),
        "environment": environments or str(environment.get("id") or ""),
        "algorithm": str(_part(config, "algorithm").get("preset") or ""),
        "model": str(facts.get("model") or ""),
        "started": start_time or written,
        "written": written,
        "status": state,
        "outcome": str(_part(facts, "ended").get("outcome") or ""),
        "step": points[-1]["step"] if points else 0,
        "iterations": as_number(stop.get("iterations")),
        "seconds": seconds,
        "left": _left(stop, points) if state == "running" else None,
        "evaluation": {name: as_number(evaluation.get(name)) for name in ("step", *FIGURES, "episodes")}
        if evaluation and not missing_result(evaluation)
        else None,
        "missing_result": missing_result(final) if final else "",
        "final": bool(final),
        "last": last and {name: as_number(last.get(name)) for name in ("step", "success", "return_mean")},
        "spark": [round(y, 4) for _, y in smooth([(x, y) for x, y in spread(success, SPARK)])],
        "warnings": len(warnings),
        "last_warning": list(warnings[-1]) if warnings else None,
        "problems": problems,
    }


def _part(values: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    section = values.get(name)
    return section if isinstance(section, dict) else {}


def _left(stop: Mapping[str, Any], points: list[sqlite3.Row]) -> float | None:
    """Return the seconds until the run reaches `iterations` or `minutes`, at the pace of the latest tenth of its curve.

    Return None without a limit, before the first iteration, when `minutes` begin to count, and once a limit is reached,
    because the final evaluation's duration is not known.
    """
    limits = []
    steps, minutes = stop.get("iterations"), stop.get("minutes")
    if isinstance(minutes, int | float) and points:
        limits.append(60 * minutes - points[-1]["seconds"])
    if isinstance(steps, int) and len(points) > 1:
        window = points[-max(len(points) // 10, 2) :]
        pace = (window[-1]["time"] - window[0]["time"]) / max(window[-1]["step"] - window[0]["step"], 1)
        limits.append(pace * (steps - window[-1]["step"]))
    seconds = min(limits, default=0.0)
    return seconds if seconds > 0 else None
