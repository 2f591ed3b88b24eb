"""Conversion of text to index terms, as by Anserini's default English analyzer."""

from __future__ import annotations

from .porter import stem
from .words import words

STOP_WORDS = frozenset(
    "a an and are as at be but by for if in into is it no not of on or such that the their then there these they this"
    " to was will with".split()
)
REMEMBERED = 1 << 17
"""Maximum number of cached words. A full cache is cleared."""


def analyze(text: str) -> list[str]:
    """Return the terms of a text in order: its words without stop words and possessive 's, in lower case, stemmed."""
    return [term for term in map(_remembered.__getitem__, words(text)) if term]


def term_of(word: str) -> str:
    """Return the term of a word, or "" for a stop word."""
    if word[-1] in "sS" and word[-2:-1] in ("'", "\u2019", "\uff07"):
        word = word[:-2]
    text = word.lower() if word.isascii() else _lower(word)
    return "" if text in STOP_WORDS else stem(text)


def _lower(word: str) -> str:
    """Lower the case of each letter separately, as Java does: no final sigma, and one letter for a dotted capital I."""
    return "".join("i" if letter == "\u0130" else letter.lower() for letter in word)


class _Terms(dict[str, str]):
    def __missing__(self, word: str) -> str:
        if len(self) >= REMEMBERED:
            self.clear()
        term = self[word] = term_of(word)
        return term


_remembered = _Terms()
