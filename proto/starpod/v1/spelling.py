"""Suggestions for mistyped names."""

from __future__ import annotations

import difflib
from collections.abc import Collection, Iterable


def near(name: str, known: Iterable[str]) -> list[str]:
    """Return up to three known names that resemble `name`, closest first, ignoring case."""
    by_lower_case = {candidate.lower(): candidate for candidate in known}
    matches = difflib.get_close_matches(name.lower(), by_lower_case, n=3, cutoff=0.5)
    return [by_lower_case[match] for match in matches]


def nearest(name: str, known: Collection[str]) -> str:
    """Return the end of an error message: `; did you mean X or Y?`, or `; there are X, Y` if no name is close."""
    if close := near(name, known):
        return f"; did you mean {' or '.join(close)}?"
    return f"; there are {', '.join(known)}" if known else "; there are none"
