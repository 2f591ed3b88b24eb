"""Text into index terms, as Anserini's default English analyzer makes them."""

from __future__ import annotations

from .porter import stem
from .words import words

STOP_WORDS = frozenset(
    "a an and are as at be but by for if in into is it no not of on or such that the their then there these they this"
    " to was will with".split()
)
REMEMBERED = 1 << 17
"""How many words are remembered with their terms; then all are forgotten and it begins anew."""


def analyze(text: str) -> list[str]:
    """The terms of a text in order: words without possessive 's, in lower case, without stop words, stemmed."""
    return [term for term in map(_remembered.__getitem__, words(text)) if term]


def term_of(word: str) -> str:
    """The term of a word as it stands in a text; empty for a stop word."""
    if word[-1] in "sS" and word[-2:-1] in ("'", "\u2019", "\uff07"):
        word = word[:-2]
    lower = word.lower() if word.isascii() else _lower(word)
    return "" if lower in STOP_WORDS else stem(lower)


def _lower(word: str) -> str:
    """Lower case letter by letter, as in Java: no final sigma, and one letter for a dotted capital I."""
    return "".join("i" if letter == "\u0130" else letter.lower() for letter in word)


class _Terms(dict[str, str]):
    """Words to terms, made when they are first asked for."""

    def __missing__(self, word: str) -> str:
        if len(self) >= REMEMBERED:
            self.clear()
        term = self[word] = term_of(word)
        return term


_remembered = _Terms()
