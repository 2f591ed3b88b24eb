"""The durations that a server reports for each call (docs/protocol.md, section 13)."""

from __future__ import annotations

import math
import re
from typing import Any

TRAILER = "server-timing"

_ENTRY = re.compile(r"""\s*([!#$%&'*+.^_`|~0-9A-Za-z-]+)((?:\s*;\s*[^;,="]+=(?:"[^"]*"|[^;,"]*))*)\s*""")
_DURATION = re.compile(r""";\s*dur\s*=\s*"?([^;"\s]*)""", re.IGNORECASE)


def parse_server_timing(text: str) -> dict[str, float]:
    """Parse a Server-Timing header, such as `environment;dur=0.2, total;dur=0.3`.

    Returns:
        Milliseconds by name. Entries without a duration are left out.

    Raises:
        ValueError: the text is not a Server-Timing header, or a duration is negative or not a finite number.
    """
    durations: dict[str, float] = {}
    position = 0
    while True:
        entry = _ENTRY.match(text, position)
        if entry is None or text[entry.end() : entry.end() + 1] not in ("", ","):
            raise ValueError(f"{text!r} is not of the form `name;dur=milliseconds, ...`")
        if duration := _DURATION.search(entry[2]):
            durations[entry[1]] = _milliseconds(duration[1])
        if entry.end() == len(text):
            return durations
        position = entry.end() + 1


def find_server_timing(trailer: Any) -> str:
    """Return the Server-Timing entry of a call's trailing metadata, "" if there is none."""
    return next((str(value) for key, value in trailer or () if key == TRAILER), "")


def _milliseconds(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 <= value < math.inf:
        raise ValueError(f"the duration {text!r} is not a number of milliseconds from 0 up")
    return value
