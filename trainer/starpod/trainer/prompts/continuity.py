"""Find the part of a conversation that a chat template writes differently once the conversation continues.

Sampled ids are only extended if the next prompt is the previous prompt, the reply to it and the new message. Qwen3, for
example, drops the thoughts of earlier replies. Dummy conversations are rendered both ways, and this module compares the
texts.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from starpod.trainer.prompts.layout import QUESTION, SYSTEM

THOUGHT, ACTION = "starpod-thought", "starpod-action"
_NAMES = {
    THOUGHT: "the thoughts of earlier replies",
    ACTION: "earlier replies",
    QUESTION: "earlier messages of the user",
    SYSTEM: "the system message",
}
_WORDS = re.compile(r"[\w-]+|\s+|.")
_AROUND = 3
"""Number of words that an example shows before and after a change."""
_EQUAL = 16
"""Number of equal words after which a change is over."""
_LONGEST = 80
"""Maximum number of characters of an example."""


class Rewrite(NamedTuple):
    """The first change that a chat template makes to the past."""

    part: str
    """What it changes, such as "the thoughts of earlier replies"."""
    before: str
    """The changed text as it was first shown or sampled, with a few words around it."""
    after: str
    """The same place in a later prompt."""

    def __str__(self) -> str:
        return f"changes {self.part} as a conversation grows: {self.before!r} becomes {self.after!r}"


def compare_past(grown: str, whole: str, names: Mapping[str, str] | None = None) -> Rewrite | None:
    """Return what a chat template changes first; None if both texts are equal.

    Args:
        grown: A dummy conversation that was extended reply by reply.
        whole: The same conversation, rendered at once.
        names: Further names of parts, by a text that occurs only there.
    """
    if grown == whole:
        return None
    old, new = _WORDS.findall(grown), _WORDS.findall(whole)
    start = next((n for n, (word, other) in enumerate(zip(old, new, strict=False)) if word != other), len(old))
    removed, inserted = _shortest_edit(old[start:], new[start:])
    changed = "".join([*old[start : start + removed], *new[start : start + inserted]])
    named = [name for mark, name in {**_NAMES, **(names or {})}.items() if mark in changed]
    return Rewrite(
        " and ".join(named) or "the text around messages",
        _excerpt(old, start, start + removed),
        _excerpt(new, start, start + inserted),
    )


def _shortest_edit(old: Sequence[str], new: Sequence[str]) -> tuple[int, int]:
    """Return how many first words of both texts to skip, so that the next words are equal or both texts end."""
    # What is missing is preferred: if the template moves a short text behind a long one, the short one is named.
    for removed in range(1, len(old)):
        if old[removed : removed + _EQUAL] == new[:_EQUAL]:
            return removed, 0
    for total in range(1, len(old) + len(new)):
        for removed in range(max(0, total - len(new)), min(total, len(old)) + 1):
            inserted = total - removed
            if old[removed : removed + _EQUAL] == new[inserted : inserted + _EQUAL]:
                return removed, inserted
    return len(old), len(new)


def _excerpt(words: Sequence[str], start: int, end: int) -> str:
    text = "".join(words[max(start - _AROUND, 0) : end + _AROUND])
    half = _LONGEST // 2
    return text if len(text) <= _LONGEST else f"{text[:half]}...{text[-half:]}"
