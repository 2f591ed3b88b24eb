"""Comparison of answers as in SQuAD (arXiv 1606.05250): exact match, and F1 of words, after normalisation."""

from __future__ import annotations

import re
import string
from collections import Counter

_PUNCTUATION = str.maketrans("", "", string.punctuation)
_ARTICLES = re.compile(r"\b(a|an|the)\b")


def normalise_answer(answer: str) -> str:
    """Return the answer in lower case, without punctuation, articles and redundant blanks."""
    return " ".join(_ARTICLES.sub(" ", answer.lower().translate(_PUNCTUATION)).split())


def exact_match(answer: str, truth: str) -> bool:
    """Return whether answer and truth are equal after `normalise_answer`."""
    return normalise_answer(answer) == normalise_answer(truth)


def f1(answer: str, truth: str) -> float:
    """Return the harmonic mean of precision and recall of the answer's words."""
    words, true_words = normalise_answer(answer).split(), normalise_answer(truth).split()
    overlap = sum((Counter(words) & Counter(true_words)).values())
    return 2 * overlap / (len(words) + len(true_words)) if overlap else 0.0
