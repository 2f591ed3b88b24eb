"""Reads actions as they are written."""

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
"""How a placement is written. The first form that occurs anywhere counts. All take time linear in the text."""


def read_action(text: str, size: int) -> tuple[int, int, int]:
    """Row, column and number, each from 1. Raises ValueError that says what is wrong."""
    text = text.strip().lower()
    for form in FORMS:
        if match := form.search(text):
            # Python refuses to read thousands of digits.
            first, second, third = (int(group[:200]) for group in match.groups())
            # With "place" or "at" anywhere in it, the text reads number, row, column; else row, column, number.
            worded = "place" in text or "at" in text
            row, column, number = (second, third, first) if worded else (first, second, third)
            for name, value in (("Row", row), ("Column", column), ("Number", number)):
                if not 1 <= value <= size:
                    raise ValueError(f"{name} {value} is out of range (1-{size})")
            return row, column, number
    shown = text if len(text) <= 200 else text[:200] + "..."
    raise ValueError(f"Could not parse action: '{shown}'. Expected format: 'place 5 at row 2 col 3' or '2,3,5'")
