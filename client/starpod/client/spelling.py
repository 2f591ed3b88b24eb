"""What a mistyped name might have meant."""

from __future__ import annotations

import difflib
from collections.abc import Sequence


def nearest(name: str, known: Sequence[str]) -> str:
    """`; did you mean X or Y?`, or where nothing is near `; there are X, Y`, to put behind an error message."""
    written = {each.lower(): each for each in known}
    near = [written[each] for each in difflib.get_close_matches(name.lower(), written, n=3, cutoff=0.5)]
    if near:
        return f"; did you mean {' or '.join(near)}?"
    return f"; there are {', '.join(known)}" if known else "; there are none"
