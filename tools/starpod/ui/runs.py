"""Page with the list of runs, and page of one run."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from starpod.report.curves import spread
from starpod.trainer.commands.train import commands
from starpod.trainer.evaluation.folder import EvaluationFolder
from starpod.trainer.output.run_page import run_values
from starpod.ui.compare import MOST
from starpod.ui.evaluation import evaluation_page
from starpod.ui.page import LiveSite, number, query, render
from starpod.ui.reading import checkpoints, doing_of, evaluations_of, mapping, read_notes, shown_text

SHOWN_RUNS = 200
"""Number of runs on a page of the list."""
EVALUATIONS = 400
"""Maximum number of evaluations in a chart."""
SEARCHED = ("path", "title", "environment", "algorithm")
"""Fields in which the list is searched for a text, besides the tags."""
STATUSES = ("running", "ended", "stopped", "interrupted")
SORTS: Mapping[str, Callable[[Mapping[str, Any]], Any]] = {
    "highest success": lambda run: -((run["evaluation"] or {}).get("success") or 0.0),
    "longest": lambda run: -run["seconds"],
    "environment": lambda run: run["environment"],
}
"""Sort keys of the list. The default is newest first, which also breaks ties."""


def runs_page(site: LiveSite, request: Request) -> Response:
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


def run_page(site: LiveSite, request: Request) -> Response:
    """Show one run: its progress, curves, checkpoints, configuration and provenance."""
    run = site.run(request.path_params["path"])
    folder = site.folder(run["path"])
    if (evaluation := EvaluationFolder(folder)).exists:
        return evaluation_page(site, run, evaluation)
    problems: list[str] = []
    facts, final = mapping(folder / "run.json", problems), mapping(folder / "final.json", problems)
    evaluations = evaluations_of(folder, problems)
    curve, files = site.index.curve(run["run"]), site.index.files(run["run"])
    checkpoint_rows = checkpoints(folder)
    best = next((row["step"] for row in checkpoint_rows if "best" in row["marks"]), None)
    shown = spread(evaluations, EVALUATIONS)
    values = run_values(run["title"] or run["path"], facts, curve.lines, shown, final or None, best)
    ended = facts.get("ended")
    limits = ended.get("limits") if isinstance(ended, dict) else ()
    return render(
        "run.html", site=site, **values, run=run, checkpoints=checkpoint_rows,
        problems=[*run["problems"], *(file["problem"] for file in files if file["problem"])],
        config=shown_text(folder / "config.yaml"),
        commands=commands(folder, mapping(folder / "config.yaml", []), limits),
        kinds=_kinds(files), doing=doing_of(folder) if run["status"] == "running" else "",
        notes=read_notes(folder, problems), token=site.guard.token("notes"),
    )  # fmt: skip


def _kinds(files: Sequence[Mapping[str, Any]]) -> Sequence[tuple[str, int]]:
    """Return the number of episodes of each kind, sorted by kind."""
    counts: dict[str, int] = {}
    for file in files:
        counts[file["kind"]] = counts.get(file["kind"], 0) + file["episodes"]
    return sorted(counts.items())
