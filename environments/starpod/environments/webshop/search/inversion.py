"""Building of an index's arrays: terms are counted per document, then sorted into postings in one pass."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .analyzer import REMEMBERED, term_of
from .bm25 import compiled, length_codes
from .words import words

_CHUNK = 1 << 21
"""Number of terms that are collected as Python integers before they are counted."""


def invert(documents: Iterable[tuple[str, str]], progress: Callable[[int], None]) -> dict[str, NDArray[Any]]:
    """Build the arrays of an index of (asin, text) pairs, for N documents with T distinct terms and P postings.

    Returns:
        positions uint32[N]: the number of each document in the given order. The arrays number documents by asin.
        lengths uint8[N]: code of the document's number of terms.
        total int64[1]: sum of the exact numbers of terms of all documents.
        terms uint8[...], term_offsets int64[T + 1]: the sorted terms as UTF-8, and where each begins and ends.
        posting_offsets int64[T + 1]: where the postings of each term begin and end.
        documents uint32[P], frequencies uint8[P] (or wider): postings, sorted by term and then by document.
            Frequencies are indices into `values`.
        values uint32[...]: the distinct frequencies.
    """
    numbers = _Numbers()
    asins: list[str] = []
    parts: list[_Part] = []
    chunk: list[int] = []
    ends: list[int] = []
    for asin, text in documents:
        asins.append(asin)
        chunk.extend(map(numbers.__getitem__, words(text)))
        ends.append(len(chunk))
        if len(chunk) >= _CHUNK:
            parts.append(_counted(chunk, ends, len(numbers.terms)))
            chunk.clear()
            ends.clear()
        progress(len(asins))
    parts.append(_counted(chunk, ends, len(numbers.terms)))
    terms, frequencies, sizes, lengths = (np.concatenate(column) for column in zip(*parts, strict=True))
    parts.clear()

    order = np.array(sorted(range(len(asins)), key=asins.__getitem__), np.int64)
    vocabulary = sorted(numbers.terms)
    rows = np.empty(len(vocabulary), np.uint32)
    rows[[numbers.terms[term] for term in vocabulary]] = np.arange(len(vocabulary))
    values, codes = _coded(frequencies)
    arrays = {
        "positions": order.astype(np.uint32),
        "lengths": length_codes(lengths[order]),
        "total": lengths.sum(keepdims=True),
        "terms": np.frombuffer("".join(vocabulary).encode(), np.uint8),
        "term_offsets": np.cumsum([0, *(len(term.encode()) for term in vocabulary)], dtype=np.int64),
        "posting_offsets": np.zeros(len(vocabulary) + 1, np.int64),
        "documents": np.empty(len(terms), np.uint32),
        "frequencies": np.empty(len(terms), codes.dtype),
        "values": values,
    }
    _sort_postings(
        order,
        np.cumsum(sizes),
        terms,
        codes,
        rows,
        arrays["posting_offsets"],
        arrays["documents"],
        arrays["frequencies"],
    )
    return arrays


class _Numbers(dict[str, int]):
    """A cache of the number of each word's term; -1 for stop words. Terms are numbered in order of appearance."""

    def __init__(self) -> None:
        super().__init__()
        self.terms: dict[str, int] = {}

    def __missing__(self, word: str) -> int:
        if len(self) >= REMEMBERED:
            self.clear()
        term = term_of(word)
        number = self[word] = self.terms.setdefault(term, len(self.terms)) if term else -1
        return number


_Part = tuple[NDArray[np.uint32], NDArray[np.uint32], NDArray[np.int64], NDArray[np.int64]]
"""Counts of some documents. Two arrays contain the distinct terms of each document, concatenated, and their
frequencies. The other two contain each document's number of distinct terms and its total number of terms."""


def _counted(numbers: list[int], ends: list[int], vocabulary: int) -> _Part:
    terms, frequencies = np.empty(len(numbers), np.uint32), np.empty(len(numbers), np.uint32)
    sizes, lengths = np.empty(len(ends), np.int64), np.empty(len(ends), np.int64)
    size = _count(np.array(numbers, np.int32), np.array(ends, np.int64), terms, frequencies, sizes, lengths, vocabulary)
    return terms[:size].copy(), frequencies[:size].copy(), sizes, lengths


def _coded(numbers: NDArray[np.uint32]) -> tuple[NDArray[np.uint32], NDArray[Any]]:
    """Return the sorted distinct numbers, and for each number its index among them (in the smallest unsigned type)."""
    mask = np.zeros(int(numbers.max(initial=0)) + 1, np.bool_)
    mask[numbers] = True
    values = np.flatnonzero(mask)
    codes = np.zeros(len(mask), np.min_scalar_type(len(values)))
    codes[values] = np.arange(len(values))
    return values.astype(np.uint32), codes[numbers]


@compiled
def _count(
    numbers: NDArray[np.int32],
    ends: NDArray[np.int64],
    terms: NDArray[np.uint32],
    frequencies: NDArray[np.uint32],
    sizes: NDArray[np.int64],
    lengths: NDArray[np.int64],
    vocabulary: int,
) -> int:
    """Write the distinct terms of each document, concatenated, and their frequencies. Return their total number."""
    slots = np.full(vocabulary, -1, np.int64)
    size = 0
    start = 0
    for document in range(len(ends)):
        first_slot = size
        for index in range(start, ends[document]):
            number = numbers[index]
            if number < 0:
                continue
            if slots[number] < first_slot:
                slots[number] = size
                terms[size] = number
                frequencies[size] = 0
                size += 1
            frequencies[slots[number]] += 1
        start = ends[document]
        sizes[document] = size - first_slot
        lengths[document] = frequencies[first_slot:size].sum()
    return size


@compiled
def _sort_postings(
    order: NDArray[np.int64],
    ends: NDArray[np.int64],
    terms: NDArray[np.uint32],
    frequencies: NDArray[Any],
    rows: NDArray[np.uint32],
    offsets: NDArray[np.int64],
    posting_documents: NDArray[np.uint32],
    posting_frequencies: NDArray[Any],
) -> None:
    """Sort the counts by term, with a counting sort. Write the result into the last three arrays.

    Args:
        order: the documents, sorted by asin.
        ends, terms, frequencies: the counts of the documents.
        rows: index of each term among the sorted terms.
        offsets, posting_documents, posting_frequencies: receive the postings.
    """
    for term in terms:
        offsets[rows[term] + 1] += 1
    for row in range(len(rows)):
        offsets[row + 1] += offsets[row]
    places = offsets.copy()
    for document in range(len(order)):
        position = order[document]
        for entry in range(ends[position - 1] if position else 0, ends[position]):
            row = rows[terms[entry]]
            posting_documents[places[row]] = document
            posting_frequencies[places[row]] = frequencies[entry]
            places[row] += 1
