"""Parsing and writing of actions."""

from __future__ import annotations

import re

FORMS = tuple(
    re.compile(form)
    for form in (
        r"place\s+(\d+)\s+at\s+row\s+(\d+)\s+col\s+(\d+)",
        r"place\s+(\d+)\s+at\s+\((\d+),\s*(\d+)\)",
        r"place\s+(\d+)\s+at\s+(\d+),\s*(\d+)",
        r"(?<!\d)(\d+)\s+at\s+(\d+),\s*(\d+)",
        r"\((\d+),\s*(\d+),\s*(\d+)\)",
        r"(?<!\d)(\d+),\s*(\d+),\s*(\d+)",
    )
)
"""Forms of a placement. The first form with a match anywhere in the text is used. Matching takes linear time."""


def read_action(text: str, size: int) -> tuple[int, int, int]:
    """Parse an action into row, column and number, each from 1. Raises ValueError that says what is wrong."""
    text = text.strip().lower()
    for form in FORMS:
        if match := form.search(text):
            # int() fails for texts of thousands of digits.
            first, second, third = (int(group[:200]) for group in match.groups())
            # The order is number, row, column if the text contains "place" or "at", otherwise row, column, number.
            has_words = "place" in text or "at" in text
            row, column, number = (second, third, first) if has_words else (first, second, third)
            for name, value in (("Row", row), ("Column", column), ("Number", number)):
                if not 1 <= value <= size:
                    raise ValueError(f"{name} {value} is out of range (1-{size})")
            return row, column, number
    excerpt = text if len(text) <= 200 else text[:200] + "..."
    raise ValueError(f"Could not parse action: '{excerpt}'. Expected format: 'place 5 at row 2 col 3' or '2,3,5'")


def write_action(cell: int, number: int, size: int) -> str:
    """Return the placement of a number (from 1) in a cell (index from 0), in the longest of the accepted forms."""
    return f"place {number} at row {cell // size + 1} col {cell % size + 1}"
