"""Page with the list of runs, and page of one run."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from markupsafe import Markup
from starlette.requests import Request
from starlette.responses import Response

from starpod.report.figures import show
from starpod.trainer.commands.train import commands
from starpod.trainer.output import sections
from starpod.trainer.output.words import SHOWN, metric, trend
from starpod.ui.compare import MOST
from starpod.ui.index import Curve, spread
from starpod.ui.page import Site, number, query, render
from starpod.ui.reading import checkpoints, doing_of, mapping, objects, read_notes, shown_text

SHOWN_RUNS = 200
"""Number of runs on a page of the list."""
EVALUATIONS = 400
"""Maximum number of evaluations in a chart."""
SEARCHED = ("path", "title", "environment", "algorithm")
"""Fields in which the list is searched for a text, besides the tags."""
STATUSES = ("running", "ended", "interrupted")
SORTS: Mapping[str, Callable[[Mapping[str, Any]], Any]] = {
    "highest success": lambda run: -(run["evaluation"] or {"success": -1.0})["success"],
    "longest": lambda run: -run["seconds"],
    "environment": lambda run: run["environment"],
}
"""Sort keys of the list. The default is newest first, which also breaks ties."""


def runs_page(site: Site, request: Request) -> Response:
    """List all runs, or those with a given status or a given text in their path, title or tags."""
    all_runs = site.index.runs()
    choice, text = request.query_params.get("status", ""), request.query_params.get("text", "").strip()
    order = request.query_params.get("sort", "")
    runs = [
        run
        for run in all_runs
        if choice in ("", run["status"])
        and text.lower() in " ".join([*(run[name] for name in SEARCHED), *run["tags"]]).lower()
    ]
    if order in SORTS:
        runs.sort(key=SORTS[order])
    page = number(request, "page", 1, minimum=1)
    page_runs = runs[(page - 1) * SHOWN_RUNS : page * SHOWN_RUNS]
    counts = {status: sum(run["status"] == status for run in all_runs) for status in STATUSES}
    return render(
        "runs.html", site=site, runs=page_runs, found=len(runs), known=len(all_runs), counts=counts, wanted=choice,
        text=text, page=page, pages=-(-len(runs) // SHOWN_RUNS), sorts=SORTS, order=order,
        pages_url=lambda target: query("/", status=choice, text=text, sort=order, page=target),
        folder=shlex.quote(str(site.index.folder)), most=MOST,
    )  # fmt: skip


def run_page(site: Site, request: Request) -> Response:
    """Show one run: its progress, curves, checkpoints, configuration and provenance."""
    run = site.run(request.path_params["path"])
    folder = site.folder(run["path"])
    problems: list[str] = []
    facts, final = mapping(folder / "run.json", problems), mapping(folder / "final.json", problems)
    evaluations = [line for line in objects(folder / "evaluations.jsonl", problems) if line.get("success") is not None]
    curve, files = site.index.curve(run["run"]), site.index.files(run["run"])
    metric_lines = [line for line in curve.lines if line["metrics"]]
    checkpoint_rows = checkpoints(folder)
    best = next((row["step"] for row in checkpoint_rows if "best" in row["marks"]), None)
    shown = spread(evaluations, EVALUATIONS)
    body = [
        sections.evaluation(shown, curve.lines),
        sections.environments(curve.lines, shown, final or None),
        sections.learning(curve.lines),
        sections.agents(curve.lines),
        sections.echo_trap(curve.lines),
        sections.information(curve.lines),
        sections.time_spent(curve.lines),
    ]
    return render(
        "run.html", site=site, run=run,
        problems=[*run["problems"], *(file["problem"] for file in files if file["problem"])],
        headline=Markup(sections.headline(run["title"] or run["path"], facts, curve.lines, shown, final or None, best)),
        metrics=metrics_table(curve), sections=[Markup(part) for part in body if part], checkpoints=checkpoint_rows,
        configuration=Markup(sections.configuration(facts)), config=shown_text(folder / "config.yaml"),
        provenance=Markup(sections.provenance(facts, metric_lines)),
        commands=commands(folder, mapping(folder / "config.yaml", [])), kinds=_kinds(files),
        doing=doing_of(folder) if run["status"] == "running" else "",
        notes=read_notes(folder, problems), token=site.guard.token("notes"),
    )  # fmt: skip


def metrics_table(curve: Curve) -> list[dict[str, Any]]:
    """Return a row for each metric, with its newest value, formatted as on the terminal's screen."""
    points = [line["metrics"] for line in curve.lines if line["metrics"]]
    if not points:
        return []
    row = points[-1]
    rows = []
    for name in [*(name for name in SHOWN if name in row), *sorted(name for name in row if name not in SHOWN)]:
        values = [metrics[name] for metrics in points if name in metrics]
        spec, arrow = metric(name), trend(values)
        sign = {"↗": 1, "↘": -1}.get(arrow, 0) * spec.better
        rows.append(
            {
                "name": name,
                "label": spec.label,
                "value": show(row[name], spec.kind),
                "trend": arrow.strip(),
                "tone": "plus" if sign > 0 else "minus" if sign < 0 else "muted",
                "spark": spread(values, 60),
                "main": name in SHOWN,
            }
        )
    return rows


def _kinds(files: Sequence[Mapping[str, Any]]) -> Sequence[tuple[str, int]]:
    """Return the number of episodes of each kind, sorted by kind."""
    counts: dict[str, int] = {}
    for file in files:
        counts[file["kind"]] = counts.get(file["kind"], 0) + file["episodes"]
    return sorted(counts.items())
