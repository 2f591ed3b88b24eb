"""A rendered page as text: the visible lines, and the interactive elements by number."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .chromium import Browser


@dataclass(frozen=True, slots=True)
class PageElement:
    """An interactive element: something to click or to type into."""

    text: str
    value: str
    """Value that the element sends, or the content of a field."""
    field: str
    """Name of a field; "" for other elements."""
    sends: bool
    """Whether a click on the element, in its current state, submits a form."""
    disabled: bool


@dataclass(frozen=True, slots=True)
class PageView:
    """The current state of a page in the browser. Lengths are in CSS pixels."""

    text: str
    """Visible lines, with elements as `[number] text`."""
    elements: tuple[PageElement, ...]
    """Elements of the whole page, numbered from 1."""
    scroll: int
    """Scroll position."""
    height: int
    """Height of the window."""
    page: int
    """Height of the page."""

    def find(self, name: str) -> int | None:
        """Return the index of the element with this text (in any case), this sent value or this number, or None.

        `#7` is always a number. `7` is a number only if no element on the page has that text.
        """
        text = " ".join(name.split()).lower()
        index = None if text.startswith("#") else self._find_text(text)
        number = text.removeprefix("#")
        if index is None and number.isdecimal() and 1 <= int(number) <= len(self.elements):
            return int(number) - 1
        return index

    def _find_text(self, text: str) -> int | None:
        action = f"click[{text}]"
        for index, element in enumerate(self.elements):
            if not element.field and (element.value.lower() == action or element.text.lower() == text):
                return index
        return None

    def find_field(self, name: str) -> int | None:
        """Return the index of the field with this number, name or label, or None."""
        text = name.strip().lower()
        for index, element in enumerate(self.elements):
            if element.field and text in (
                str(index + 1),
                f"#{index + 1}",
                element.field.lower(),
                element.text.lower(),
            ):
                return index
        return None


@functools.cache
def _script() -> str:
    return (Path(__file__).parent / "view.js").read_text(encoding="utf-8")


def look(browser: Browser) -> PageView:
    """Read the page in the tab."""
    result: dict[str, Any] = browser.driver.execute_script(_script())
    scroll, height, page = result["scroll"], result["height"], result["page"]
    lines = [line["text"] for line in result["lines"] if line["bottom"] > 0 and line["top"] < height]
    if page > height:
        lines.append(f"(pixels {scroll} to {scroll + height} of {page} are in view)")
    elements = tuple(PageElement(**element) for element in result["elements"])
    return PageView("\n".join(lines), elements, scroll, height, page)
