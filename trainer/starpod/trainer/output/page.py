"""The trainer's pages: what all pages have, and the style of episodes."""

from __future__ import annotations

from importlib.resources import files

from starpod.report import page as shared

STYLE = (files(__package__) / "assets" / "report.css").read_text(encoding="utf-8")


def page(title: str, body: str) -> str:
    """A whole HTML document."""
    return shared.page(title, body, style=STYLE)
