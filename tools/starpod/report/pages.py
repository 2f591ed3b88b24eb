"""All pages are made here: Jinja templates, shared by the live site and by pages that are one file.

A page that is one file needs no network: it holds its styles, its scripts and, if it has charts, Plotly.
"""

from __future__ import annotations

import base64
import gzip
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup, escape

from starpod.report.curves import Chart, spark
from starpod.report.figures import duration, milliseconds, show, signed

FOLDER = files(__package__)


@dataclass(frozen=True, slots=True)
class PageTable:
    """A table of a page. Cells are text, or Markup."""

    heads: Sequence[str]
    """Names of the columns. One that begins with `#` is a column of numbers."""
    rows: Sequence[Sequence[Any]]
    folded: str = ""
    """Words that open the table; empty: it is open."""


@dataclass(frozen=True, slots=True)
class PageSection:
    """A part of a page with a heading, left out if it has neither charts nor a table."""

    title: str
    sentence: str = ""
    charts: Sequence[Chart] = ()
    table: PageTable | None = None
    after: PageTable | None = None
    """A table below the charts."""
    warnings: Sequence[tuple[int, str]] | None = None
    """Step and text of each warning, listed below the charts; None: the section is not about warnings."""

    def __bool__(self) -> bool:
        return any(self.charts) or any(table and table.rows for table in (self.table, self.after))

    @property
    def id(self) -> str:
        """Anchor of the heading."""
        return re.sub("[^a-z0-9]+", "-", self.title.lower()).strip("-")


def breakable(name: str) -> Markup:
    """Return the name of a metric or a key, which may break only after `.`, `/` and `_`."""
    return Markup(re.sub(r"[./_](?=.)", r"\g<0><wbr>", str(escape(name))))


def dotted(key: str) -> Markup:
    """Return a key as code that breaks as `breakable` does."""
    return Markup(f'<code class="key">{breakable(key)}</code>')


def tagged(text: str) -> Markup:
    """Return a text in which no tag breaks: browsers break a line within `</think>` and `<|im_end|>`."""
    return Markup(re.sub(r"&lt;[/|]?[\w:-]+\|?&gt;", r'<span class="tag">\g<0></span>', str(escape(text))))


def tone(value: float) -> str:
    """Return the CSS class of a reward."""
    return "plus" if value > 0 else "minus" if value < 0 else "muted"


def asset(name: str) -> str:
    """Return a style sheet or a script of all pages."""
    return (FOLDER / "assets" / name).read_text(encoding="utf-8")


@cache
def plotly() -> bytes:
    """Return the script of Plotly from its package, compressed with gzip."""
    from plotly.offline import get_plotlyjs

    return gzip.compress(get_plotlyjs().encode(), 9, mtime=0)


@cache
def _packed_plotly() -> Markup:
    return Markup(base64.b64encode(plotly()).decode())


def environment(*folders: Path) -> Environment:
    """Return the templates of all pages, and those of a component in its own folders."""
    templates = Environment(
        loader=FileSystemLoader([str(folder) for folder in (*folders, FOLDER / "templates")]),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    templates.globals.update(
        asset=lambda name: Markup(asset(name)), breakable=breakable, dotted=dotted, duration=duration,
        milliseconds=milliseconds, packed_plotly=_packed_plotly, show=show, signed=signed, spark=spark, tagged=tagged,
        tone=tone, headings=headings,
    )  # fmt: skip
    return templates


_templates = cache(environment)


def headings(content: str) -> list[tuple[str, str]]:
    """Return the ids and texts of the second-level headings of a page."""
    return re.findall(r'<h2 id="([^"]+)">([^<]+)</h2>', content)


def render_file(template: str, **values: Any) -> str:
    """Return a page as one file."""
    return _templates().get_template(template).render(file=True, **values)
