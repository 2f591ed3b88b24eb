"""What every page has: one file, no network, light and dark."""

from __future__ import annotations

from html import escape
from importlib.resources import files

from starpod.report.charts import STYLE

ASSETS = files(__package__) / "assets"


def dotted(key: str) -> str:
    """A dotted key as html, which is broken after its dots alone."""
    return f'<code class="key">{escape(key).replace(".", ".<wbr>")}</code>'


def page(title: str, body: str, *, style: str = "", script: str = "") -> str:
    """A whole HTML document. style, script: of the page's own, after what all pages share."""
    shared, common = ((ASSETS / name).read_text(encoding="utf-8") for name in ("page.css", "page.js"))
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(title)}</title><style>{STYLE}{shared}{style}</style></head>\n"
        f'<body><main>\n{body}\n</main><div id="tip" aria-hidden="true"></div>'
        f"<script>{common}{script}</script></body></html>\n"
    )
