"""Helpers of all pages: the site's state, templates, parsing of queries, and formatting of numbers."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlencode

from jinja2 import Environment
from markupsafe import Markup
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import HTMLResponse, Response

from starpod.report import pages
from starpod.report.form import marked
from starpod.report.site import Guard
from starpod.report.tree import Continuation, draw_tree
from starpod.trainer.output.words import brief, figure_of, interval_of
from starpod.ui.continuing import Branches, Continuing
from starpod.ui.games import Games
from starpod.ui.index import RunIndex
from starpod.ui.indexer import Indexer
from starpod.ui.jobs import TurnJobs
from starpod.ui.reading import find_run

OWN = files(__package__) / "assets"
BIGGEST = 2**53


@dataclass(frozen=True, slots=True)
class LiveSite:
    """The index, live sessions and form tokens that pages use."""

    index: RunIndex
    indexer: Indexer
    continuing: Continuing | None = None
    jobs: TurnJobs | None = None
    guard: Guard = field(default_factory=Guard)

    @property
    def games(self) -> Games | None:
        """Live sessions; None if no server was named."""
        return self.continuing.games if self.continuing else None

    def run(self, path: str) -> dict[str, Any]:
        """Return the summary of the run at a path. Raises HTTPException 404."""
        summary = self.index.run(path)
        if summary is None:
            raise HTTPException(404, f"There is no run {path!r} here: it was deleted, renamed, or is not read yet.")
        return summary

    def folder(self, path: str) -> Path:
        """Return the folder of a run. Raises HTTPException 404 if it is gone."""
        folder = find_run(self.index.folder, path)
        if folder is None:
            raise HTTPException(404, f"The folder of the run {path!r} is gone.")
        return folder

    def notices(self) -> list[str]:
        """Return sentences about problems and progress of the index, to show on each page."""
        return [text for text in (self.index.database.problem, self.indexer.problem, self.indexer.progress) if text]


def render(template: str, *, status: int = 200, site: LiveSite | None = None, **fields: Any) -> Response:
    """Render a template as a page.

    Args:
        site: if given, the page shows the site's notices and links to its servers.
    """
    notices = site.notices() if site else []
    page = (
        templates()
        .get_template(template)
        .render(file=False, notices=notices, fleet=site is not None and site.games is not None, **fields)
    )
    return HTMLResponse(page, status)


def number(request: Request, name: str, default: int = 0, *, minimum: int = 0) -> int:
    """Return an integer from the query. Raises HTTPException 400 if it is not a whole number in the range.

    Args:
        default: the result if the parameter is absent or empty.
        minimum: smallest allowed number. The largest is BIGGEST.
    """
    text = request.query_params.get(name, "")
    if not text:
        return default
    if not (text.isascii() and text.isdecimal() and len(text) < 20 and minimum <= int(text) <= BIGGEST):
        raise HTTPException(400, f"{name}={text[:20]} is not a whole number from {minimum} up.")
    return int(text)


def run_link(path: str) -> str:
    return f"/runs/{quote(path)}"


def query(path: str, **values: Any) -> str:
    """Return a path with a query string. Empty values are left out."""
    parameters = {name: value for name, value in values.items() if value not in ("", None)}
    return f"{path}?{urlencode(parameters, True)}"


def ago(moment: float | None) -> str:
    """Return how long ago a moment was, such as "3 minutes ago". moment: seconds since the epoch."""
    seconds = max(time.time() - (moment or 0), 0)
    for size, name in ((86400, "day"), (3600, "hour"), (60, "minute")):
        if seconds >= size:
            count = int(seconds // size)
            return f"{count} {name}{'s'[: count != 1]} ago"
    return "just now"


def interval(summary: Mapping[str, Any] | None) -> str:
    """Return the interval of an evaluation's success, such as "66 to 77 %", or of its return; empty if it has none."""
    return interval_of(summary, figure_of([summary])[0]) if summary else ""


def continuation_link(branches: Branches, number: int) -> str:
    return f"/continuations/{quote(branches.id)}/{number}"


def _tree(branches: Branches, label: str) -> Markup:
    """Draw continuations as a tree whose ends are links to their pages."""
    lines = [
        Continuation(line.actions, line.value, line.success, link=continuation_link(branches, number))
        for number, line in enumerate(branches.lines)
    ]
    return Markup(draw_tree(lines, label))


@cache
def templates() -> Environment:
    environment = pages.environment(Path(str(files(__package__) / "templates")))
    environment.globals.update(
        ago=ago, brief=brief, interval=interval, query=query, run_link=run_link, tree=_tree,
        continuation_link=continuation_link, marked=lambda text: Markup(marked(text)),
    )  # fmt: skip
    return environment
