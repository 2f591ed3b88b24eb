"""Links between pages lead somewhere: to a file that is there, and to a heading that it has."""

from pathlib import Path

import pytest

from tests.docs.pages import anchors, links, name_of, pages
from tests.support import ROOT


@pytest.mark.parametrize("page", pages(), ids=name_of)
def test_links_lead_somewhere(page: Path) -> None:
    broken = []
    for link in links(page.read_text(encoding="utf-8")):
        if "://" in link or link.startswith("mailto:"):
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        if not target.is_relative_to(ROOT) or not target.exists():
            broken.append(f"{link}: no such file")
        elif anchor and anchor not in anchors(target.read_text(encoding="utf-8")):
            broken.append(f"{link}: no such heading")
    assert broken == []


def test_every_page_is_linked() -> None:
    """A page that no other page links is never read."""
    linked = {
        (page.parent / link.partition("#")[0]).resolve()
        for page in pages()
        for link in links(page.read_text(encoding="utf-8"))
        if "://" not in link and not link.startswith("#")
    }
    readme = ROOT / "README.md"
    assert [name_of(page) for page in pages() if page not in linked and page != readme] == []


def test_every_picture_is_shown() -> None:
    shown = {
        (page.parent / link).resolve()
        for page in pages()
        for link in links(page.read_text(encoding="utf-8"))
        if link.endswith((".png", ".svg"))
    }
    kept = [*ROOT.glob("docs/images/*"), *ROOT.glob("docs/benchmarks/*.svg")]
    assert [name_of(picture) for picture in kept if picture not in shown] == []
