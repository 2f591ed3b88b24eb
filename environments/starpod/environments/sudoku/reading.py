"""Reads puzzles and actions as they are written."""

from __future__ import annotations

import math
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


def read_rows(value: str | tuple[tuple[int, ...], ...], name: str) -> tuple[tuple[int, ...], ...]:
    """The rows of a puzzle, from rows or one text. name: of the option, for errors. Raises ValueError."""
    if isinstance(value, str):
        cells = "".join(value.split())
        size = math.isqrt(len(cells))
        if size not in (4, 9) or size * size != len(cells) or not re.fullmatch(r"[0-9.]+", cells):
            raise ValueError(
                f"{name} is {len(cells)} characters: write the 16 or 81 cells as digits, with . or 0 for an empty one"
            )
        digits = [int(cell) if cell != "." else 0 for cell in cells]
        value = tuple(tuple(digits[start : start + size]) for start in range(0, size * size, size))
    size = len(value)
    if size not in (4, 9, 16):
        raise ValueError(f"{name} has {size} rows: make it 4, 9 or 16")
    for index, row in enumerate(value, 1):
        if len(row) != size:
            raise ValueError(f"row {index} of {name} has {len(row)} cells: make it {size}, like the number of rows")
        for digit in row:
            if not 0 <= digit <= size:
                raise ValueError(f"row {index} of {name} holds {digit}: use 0 for an empty cell, or 1 to {size}")
    return value
