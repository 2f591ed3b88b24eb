"""Documents into the arrays of an index: counted as they come, then turned into postings in one pass."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from starpod.env_server.webshop.analyzer import REMEMBERED, term_of
from starpod.env_server.webshop.compiled import compiled
from starpod.env_server.webshop.search import length_codes
from starpod.env_server.webshop.words import words

_CHUNK = 1 << 21
"""Terms that wait as Python integers before they are counted."""


def invert(documents: Iterable[tuple[str, str]], progress: Callable[[int], None]) -> dict[str, NDArray[Any]]:
    """The arrays of an index of (asin, text) pairs, N documents with T distinct terms and P postings:

    positions uint32[N]: the place of each document in the order given; documents are numbered by asin.
    lengths uint8[N]: the code of its number of terms. total int64[1]: of the exact numbers.
    terms uint8[...], term_ends int64[T]: the terms as UTF-8, sorted, one after another, and where each ends.
    posting_ends int64[T]: where the postings of each term end.
    documents uint32[P], frequencies uint8[P] (or uint16): postings, by term and then by document; a frequency is a code.
    values uint32[...]: the frequency that a code stands for.
    """
    numbers = _Numbers()
    asins: list[str] = []
    forward: list[tuple[NDArray[np.uint32], NDArray[np.uint32], NDArray[np.int64], NDArray[np.int64]]] = []
    waiting: list[int] = []
    ends: list[int] = []
    for asin, text in documents:
        asins.append(asin)
        waiting.extend(map(numbers.__getitem__, words(text)))
        ends.append(len(waiting))
        if len(waiting) >= _CHUNK:
            forward.append(_counted(waiting, ends, len(numbers.terms)))
            waiting.clear()
            ends.clear()
            progress(len(asins))
    forward.append(_counted(waiting, ends, len(numbers.terms)))
    progress(len(asins))
    terms, frequencies, distinct, lengths = (np.concatenate(column) for column in zip(*forward, strict=True))
    forward.clear()

    order = np.array(sorted(range(len(asins)), key=asins.__getitem__), np.int64)
    values, codes = _coded(frequencies)
    sorted_terms = sorted(numbers.terms)
    rows = np.empty(len(sorted_terms), np.uint32)
    rows[[numbers.terms[term] for term in sorted_terms]] = np.arange(len(sorted_terms))
    terms = rows[terms]
    posting_ends = np.cumsum(np.bincount(terms, minlength=len(rows)))
    arrays = {
        "positions": order.astype(np.uint32),
        "lengths": length_codes(lengths[order]),
        "total": lengths.sum(keepdims=True),
        "terms": np.frombuffer("".join(sorted_terms).encode(), np.uint8),
        "term_ends": np.cumsum([len(term.encode()) for term in sorted_terms], dtype=np.int64),
        "posting_ends": posting_ends,
        "documents": np.empty(len(terms), np.uint32),
        "frequencies": np.empty(len(terms), codes.dtype),
        "values": values,
    }
    places = posting_ends - np.bincount(terms, minlength=len(rows))
    _turn(order, np.cumsum(distinct), terms, codes, places, arrays["documents"], arrays["frequencies"])
    return arrays


class _Numbers(dict[str, int]):
    """Words to the numbers of their terms, in order of first appearance; -1 for stop words."""

    def __init__(self) -> None:
        super().__init__()
        self.terms: dict[str, int] = {}

    def __missing__(self, word: str) -> int:
        if len(self) >= REMEMBERED:
            self.clear()
        term = term_of(word)
        number = self[word] = self.terms.setdefault(term, len(self.terms)) if term else -1
        return number


def _counted(
    numbers: list[int], ends: list[int], vocabulary: int
) -> tuple[NDArray[np.uint32], NDArray[np.uint32], NDArray[np.int64], NDArray[np.int64]]:
    """Distinct terms of the documents one after another, their frequencies; per document distinct terms, all terms."""
    terms, frequencies = np.empty(len(numbers), np.uint32), np.empty(len(numbers), np.uint32)
    distinct, lengths = np.empty(len(ends), np.int64), np.empty(len(ends), np.int64)
    size = _count(
        np.array(numbers, np.int32), np.array(ends, np.int64), terms, frequencies, distinct, lengths, vocabulary
    )
    return terms[:size].copy(), frequencies[:size].copy(), distinct, lengths


def _coded(numbers: NDArray[np.uint32]) -> tuple[NDArray[np.uint32], NDArray[Any]]:
    """The distinct numbers in order, and for each number its place among them in as few bytes as will do."""
    values = np.flatnonzero(np.bincount(numbers))
    codes = np.zeros(int(values.max(initial=0)) + 1, np.min_scalar_type(len(values)))
    codes[values] = np.arange(len(values))
    return values.astype(np.uint32), codes[numbers]


@compiled
def _count(
    numbers: NDArray[np.int32],
    ends: NDArray[np.int64],
    terms: NDArray[np.uint32],
    frequencies: NDArray[np.uint32],
    distinct: NDArray[np.int64],
    lengths: NDArray[np.int64],
    vocabulary: int,
) -> int:
    """Puts the distinct terms of each document one after another, with how often it has them; returns how many."""
    slots = np.full(vocabulary, -1, np.int64)
    size = 0
    start = 0
    for document in range(len(ends)):
        first = size
        for place in range(start, ends[document]):
            number = numbers[place]
            if number < 0:
                continue
            if slots[number] < first:
                slots[number] = size
                terms[size] = number
                frequencies[size] = 0
                size += 1
            frequencies[slots[number]] += 1
        start = ends[document]
        distinct[document] = size - first
        lengths[document] = frequencies[first:size].sum()
    return size


@compiled
def _turn(
    order: NDArray[np.int64],
    ends: NDArray[np.int64],
    terms: NDArray[np.uint32],
    frequencies: NDArray[Any],
    places: NDArray[np.int64],
    posting_documents: NDArray[np.uint32],
    posting_frequencies: NDArray[Any],
) -> None:
    """Counting sort of (document, term, frequency) by term. places: where each term's postings begin; moved to their end."""
    for document in range(len(order)):
        position = order[document]
        for entry in range(ends[position - 1] if position else 0, ends[position]):
            place = places[terms[entry]]
            posting_documents[place] = document
            posting_frequencies[place] = frequencies[entry]
            places[terms[entry]] = place + 1
