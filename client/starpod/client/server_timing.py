"""What a server says of the time that a call took there (docs/protocol.md, section 13)."""

from __future__ import annotations

import math
import re
from typing import Any

TRAILER = "server-timing"

_ENTRY = re.compile(r"""\s*([!#$%&'*+.^_`|~0-9A-Za-z-]+)((?:\s*;\s*[^;,="]+=(?:"[^"]*"|[^;,"]*))*)\s*""")
_DURATION = re.compile(r""";\s*dur\s*=\s*"?([^;"\s]*)""", re.IGNORECASE)


def parse_server_timing(text: str) -> dict[str, float]:
    """Milliseconds by name, of the entries that have a duration, as in `environment;dur=0.2, total;dur=0.3`.

    Raises ValueError if the text is not of the form of a Server-Timing header, or a duration is no number from 0 up.
    """
    durations: dict[str, float] = {}
    place = 0
    while True:
        entry = _ENTRY.match(text, place)
        if entry is None or text[entry.end() : entry.end() + 1] not in ("", ","):
            raise ValueError(f"{text!r} is not of the form `name;dur=milliseconds, ...`")
        if duration := _DURATION.search(entry[2]):
            durations[entry[1]] = _milliseconds(duration[1])
        if entry.end() == len(text):
            return durations
        place = entry.end() + 1


def find_server_timing(trailer: Any) -> str:
    """The entry of trailing metadata; empty where there is none."""
    return next((str(value) for key, value in trailer or () if key == TRAILER), "")


def _milliseconds(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 <= value < math.inf:
        raise ValueError(f"the duration {text!r} is no number of milliseconds from 0 up")
    return value
