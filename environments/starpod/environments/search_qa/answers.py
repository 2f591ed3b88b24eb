"""Comparison of answers as SQuAD does it (arXiv 1606.05250): exact match and F1 of words, both of plain words alone."""

from __future__ import annotations

import re
import string
from collections import Counter

_PUNCTUATION = str.maketrans("", "", string.punctuation)
_ARTICLES = re.compile(r"\b(a|an|the)\b")


def plain(answer: str) -> str:
    """The answer in lower case without punctuation, articles and further blanks."""
    return " ".join(_ARTICLES.sub(" ", answer.lower().translate(_PUNCTUATION)).split())


def exact_match(answer: str, truth: str) -> bool:
    """Whether both are the same plain words."""
    return plain(answer) == plain(truth)


def f1(answer: str, truth: str) -> float:
    """The harmonic mean of the share of the answer's words that are right and of the right words that are there."""
    ours, theirs = plain(answer).split(), plain(truth).split()
    same = sum((Counter(ours) & Counter(theirs)).values())
    return 2 * same / (len(ours) + len(theirs)) if same else 0.0
