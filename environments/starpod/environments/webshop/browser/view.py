"""A rendered page as text: its lines in view, and its interactive elements by number."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .chromium import Browser


@dataclass(frozen=True, slots=True)
class Element:
    """Something to click or to type into. value: what it sends or holds. field: the name of a field, else empty.

    sends: whether a click sends a form as it is now.
    """

    text: str
    value: str
    field: str
    sends: bool
    disabled: bool


@dataclass(frozen=True, slots=True)
class View:
    """A page as it stands in the browser.

    text: what is in view, a line each, elements as `[number] text`. elements: of the whole page; number 1 is the first.
    scroll, height, page: the place of the view, the height of the window and of the page, in CSS pixels.
    """

    text: str
    elements: tuple[Element, ...]
    scroll: int
    height: int
    page: int

    def find(self, name: str) -> int | None:
        """The place of the element with this text (in any case), sent value or number; None if there is none.

        `#7` is always a number; `7` is one only where nothing on the page is called 7.
        """
        wanted = " ".join(name.split()).lower()
        place = None if wanted.startswith("#") else self._texted(wanted)
        number = wanted.removeprefix("#")
        if place is None and number.isdecimal() and 1 <= int(number) <= len(self.elements):
            return int(number) - 1
        return place

    def _texted(self, wanted: str) -> int | None:
        sent = f"click[{wanted}]"
        for place, element in enumerate(self.elements):
            if not element.field and (element.value.lower() == sent or element.text.lower() == wanted):
                return place
        return None

    def find_field(self, name: str) -> int | None:
        """The place of a field by its number, name or label."""
        wanted = name.strip().lower()
        for place, element in enumerate(self.elements):
            if element.field and wanted in (
                str(place + 1),
                f"#{place + 1}",
                element.field.lower(),
                element.text.lower(),
            ):
                return place
        return None


@functools.cache
def _script() -> str:
    return (Path(__file__).parent / "view.js").read_text(encoding="utf-8")


def look(browser: Browser) -> View:
    """Reads the page in the tab."""
    seen: dict[str, Any] = browser.driver.execute_script(_script())
    scroll, height, page = seen["scroll"], seen["height"], seen["page"]
    lines = [line["text"] for line in seen["lines"] if line["bottom"] > 0 and line["top"] < height]
    if page > height:
        lines.append(f"(pixels {scroll} to {scroll + height} of {page} are in view)")
    elements = tuple(Element(**element) for element in seen["elements"])
    return View("\n".join(lines), elements, scroll, height, page)
