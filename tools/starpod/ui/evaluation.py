"""Page of an evaluation: its table, comparisons of its models, and the outcome of each episode."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

from markupsafe import Markup
from starlette.responses import Response

from starpod.report.pages import PageSection, PageTable
from starpod.trainer.data.files import BadEpisodes
from starpod.trainer.evaluation.folder import EvaluationFolder
from starpod.trainer.evaluation.plan import EvaluationPlan
from starpod.trainer.evaluation.table import comparison_rows, evaluation_report, figure_rows
from starpod.ui.episode_rows import episode_files
from starpod.ui.page import LiveSite, query, render
from starpod.ui.reading import BadFile

SHOWN_STARTS = 500
"""Number of start states of an environment whose episodes are listed."""
WORDS = {True: ("plus", "solved"), False: ("minus", "not solved"), None: ("muted", "over")}
"""CSS class and text of an episode by its success."""


def read_plan(evaluation: EvaluationFolder) -> EvaluationPlan:
    """Return the plan of an evaluation. Raises BadFile."""
    try:
        return evaluation.read_plan()
    except BadEpisodes as error:
        raise BadFile(str(error)) from error


def read_evaluation(evaluation: EvaluationFolder) -> tuple[EvaluationPlan, dict[str, Any]]:
    """Return the plan and the report of an evaluation, which are kept while its files do not change. Raises BadFile."""
    try:
        stamps = evaluation.plan_file.stat().st_mtime_ns, *episode_files(evaluation.path / "episodes").items()
        return _read(evaluation.path, stamps)
    except (BadEpisodes, OSError) as error:
        raise BadFile(str(error)) from error


@lru_cache(maxsize=8)
def _read(path: Path, stamps: tuple[object, ...]) -> tuple[EvaluationPlan, dict[str, Any]]:
    evaluation = EvaluationFolder(path)
    plan = evaluation.read_plan()
    return plan, evaluation_report(evaluation, plan)


def evaluation_page(site: LiveSite, run: Mapping[str, Any], evaluation: EvaluationFolder) -> Response:
    """Show an evaluation. run: its summary in the index."""
    plan, report = read_evaluation(evaluation)
    heads, rows = figure_rows(report)
    linked = [[_link(plan, run["path"], *row[:2]), *row[1:]] for row in rows]
    pairs = comparison_rows(report)
    numbers = [head if head in ("Model", "A", "B", "Environment") else f"#{head}" for head in heads]
    sections = [
        PageSection("Figures", table=PageTable(numbers, linked)),
        PageSection("Pairs of models on the same start states", table=PageTable(*pairs)),
        *(_episodes(plan, run["path"], report, environment) for environment in plan.environments),
    ]
    return render("evaluation.html", site=site, run=run, plan=plan, sections=sections)


def _link(plan: EvaluationPlan, run: str, model: str, environment: str) -> Markup:
    """Return the model's name as a link to the list of its episodes in an environment."""
    kind, _, step = plan.file_name(model).removesuffix(".jsonl").rpartition("-")
    id = plan.environments[environment].task.environment
    return _anchor(query("/episodes", run=run, kind=kind, step=step, environment=id), model)


def _episodes(plan: EvaluationPlan, run: str, report: Mapping[str, Any], environment: str) -> PageSection:
    """Return a section with a row per start state and a link to each episode that did not fail."""
    cells: dict[tuple[int, str], Markup] = {}
    for model in plan.models:
        results = report["models"][model]["environments"][environment]["results"]
        file = plan.file_name(model)
        for seed, member, success in zip(results["seed"], results["sample"], results["success"], strict=True):
            group = plan.group(environment, seed)
            url = query("/episode", run=run, file=file, group=group, member=member)
            style, text = WORDS[success]
            before = cells.get((seed, model), Markup())
            cells[seed, model] = before + " " + _anchor(url, text, f"badge {style}")
    rows = [[seed, *(cells.get((seed, model), "-") for model in plan.models)] for seed in plan.seeds[:SHOWN_STARTS]]
    sentence = f"The first {SHOWN_STARTS} start states." if plan.episodes > SHOWN_STARTS else ""
    return PageSection(f"Episodes of {environment}", sentence, table=PageTable(["#Seed", *plan.models], rows))


def _anchor(url: str, text: str, style: str = "") -> Markup:
    return Markup('<a class="{}" href="{}">{}</a>').format(style, url, text)
