"""Grammar of actions: `search[words]` or `click[text]`."""

from __future__ import annotations

from functools import lru_cache
from typing import Final

MAX_LENGTH: Final = 16_384
"""Maximum number of characters of an action; longer actions are invalid."""


def parse(action: str) -> tuple[str, str]:
    """Split an action into its name and its argument in lower case, or into the whole text and "" if it has neither.

    Only the first line is parsed, up to its last `]`. The name ends at the last `[` after which the argument is not
    empty. The time is linear in the length.
    """
    line = action.partition("\n")[0]
    end = line.rfind("]")
    start = line.rfind("[", 1, end - 1) if end > 2 else -1
    return (action, "") if start < 0 else (line[:start], line[start + 1 : end].lower())


@lru_cache(maxsize=1 << 14)
def click(text: str) -> str | None:
    """Return the action that clicks a text, or None if the grammar cannot express it."""
    return _format("click", text)


def search(text: str) -> str | None:
    """Return the action that searches for a text without its brackets, or None if nothing remains."""
    query = " ".join(text.replace("[", " ").replace("]", " ").split())
    return _format("search", query.lower())


def _format(name: str, argument: str) -> str | None:
    action = f"{name}[{argument}]"
    return action if parse(action) == (name, argument) and len(action) <= MAX_LENGTH else None
