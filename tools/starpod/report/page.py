"""The frame of all pages: one file that needs no network, with light and dark colours."""

from __future__ import annotations

import re
from html import escape
from importlib.resources import files

from starpod.report.charts import STYLE

ASSETS = files(__package__) / "assets"


def breakable(name: str) -> str:
    """Return the name of a metric or a key as HTML that may break only after `.`, `/` and `_`."""
    return re.sub(r"[./_](?=.)", r"\g<0><wbr>", escape(name))


def dotted(key: str) -> str:
    """Return a key as code that breaks as `breakable` does."""
    return f'<code class="key">{breakable(key)}</code>'


def tagged(text: str) -> str:
    """Return a text as HTML in which no tag breaks: browsers break a line within `</think>` and `<|im_end|>`."""
    return re.sub(r"&lt;[/|]?[\w:-]+\|?&gt;", r'<span class="tag">\g<0></span>', escape(text))


def page(title: str, body: str, *, style: str = "", script: str = "") -> str:
    """Return a whole HTML document. style, script: CSS and JavaScript of this page, besides what all pages share."""
    shared_style, shared_script = ((ASSETS / name).read_text(encoding="utf-8") for name in ("page.css", "page.js"))
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(title)}</title><style>{STYLE}{shared_style}{style}</style></head>\n"
        f'<body><main>\n{body}\n</main><div id="tip" aria-hidden="true"></div>'
        f"<script>{shared_script}{script}</script></body></html>\n"
    )
