"""What a mistyped name might have meant."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence


def near(name: str, known: Iterable[str]) -> list[str]:
    """Up to three of the known names that are close, closest first, whatever their case."""
    written = {each.lower(): each for each in known}
    return [written[each] for each in difflib.get_close_matches(name.lower(), written, n=3, cutoff=0.5)]


def nearest(name: str, known: Sequence[str]) -> str:
    """`; did you mean X or Y?`, or where nothing is near `; there are X, Y`, to put behind an error message."""
    if close := near(name, known):
        return f"; did you mean {' or '.join(close)}?"
    return f"; there are {', '.join(known)}" if known else "; there are none"
