"""Grammar of actions: `search[words]` or `click[text]`."""

from __future__ import annotations

from functools import lru_cache
from typing import Final

MAX_LENGTH: Final = 16_384
"""Characters of an action; a longer one is invalid."""


def parse(action: str) -> tuple[str, str]:
    """The name and the argument of an action, the argument in lower case; the whole text and '' if it has no such form.

    What counts is the text's first line from its start to its last `]`. The name ends at the last `[` that leaves an
    argument. Linear in the length.
    """
    line = action.partition("\n")[0]
    end = line.rfind("]")
    start = line.rfind("[", 1, end - 1) if end > 2 else -1
    return (action, "") if start < 0 else (line[:start], line[start + 1 : end].lower())


@lru_cache(maxsize=1 << 14)
def click(text: str) -> str | None:
    """The action that clicks a text; None if the text cannot be written as one."""
    return _written("click", text)


def search(text: str) -> str | None:
    """The action that searches for a text, blanks for what cannot stand in an argument. None if nothing is left."""
    words = " ".join(text.replace("[", " ").replace("]", " ").split())
    return _written("search", words.lower())


def _written(name: str, argument: str) -> str | None:
    action = f"{name}[{argument}]"
    return action if parse(action) == (name, argument) and len(action) <= MAX_LENGTH else None
