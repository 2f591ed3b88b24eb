"""BM25 as Lucene 8 computes it: lengths in one byte, term scores in single precision, sums in double."""

from __future__ import annotations

from collections.abc import Callable
from typing import ParamSpec, TypeVar

import numba
import numpy as np
from numpy.typing import NDArray

K1 = np.float32(0.9)
B = np.float32(0.4)
"""Parameters of BM25: Anserini's defaults."""
MOST_TERMS = 1024
"""Maximum number of distinct terms of a query, as in Lucene."""
BLOCK = 4096
"""Number of documents whose scores are summed at a time. Their sums take 32 KB, which fit the CPU cache."""

P = ParamSpec("P")
R = TypeVar("R")


class TooManyTerms(ValueError):
    """A query has more than MOST_TERMS distinct terms."""


def compiled(function: Callable[P, R]) -> Callable[P, R]:
    """Compile a function with numba when it is first called; it runs without the GIL.

    The machine code is cached in __pycache__ or, if that is read-only, in the user's cache folder.
    """
    machine_code: Callable[P, R]
    try:
        machine_code = numba.njit(nogil=True, cache=True)(function)
    except RuntimeError:  # no folder for the cache is writable
        machine_code = numba.njit(nogil=True)(function)
    return machine_code


def _length(code: int) -> int:
    """Return the shortest length, in terms, that has this code.

    Lengths up to 40 are exact. For longer ones, the excess over 24 is rounded down to four significant bits.
    """
    if code < 24:
        return code
    bits, shift = (code - 24) & 7, ((code - 24) >> 3) - 1
    return 24 + (bits if shift < 0 else (bits | 8) << shift)


LENGTHS = np.array([_length(code) for code in range(256)])
"""int64[256]: the shortest length, in terms, for each length code."""


def length_codes(lengths: NDArray[np.int64]) -> NDArray[np.uint8]:
    """Return the code of each length, as uint8[documents]. Lengths between those of two codes are rounded down."""
    return (np.searchsorted(LENGTHS, lengths, side="right") - 1).astype(np.uint8)


def length_factors(mean: float) -> NDArray[np.float32]:
    """Return float32[256]: the factor of a term's frequency for each length code. `mean` is the mean exact length."""
    one = np.float32(1)
    return one / (K1 * ((one - B) + B * LENGTHS.astype(np.float32) / np.float32(mean)))


def term_weights(counts: NDArray[np.int64], containing: NDArray[np.int64], documents: int) -> NDArray[np.float32]:
    """Return a query's weights, float32[terms]: count in the query times idf. containing: documents with each term."""
    idf: NDArray[np.float64] = np.log(1 + (documents - containing + 0.5) / (containing + 0.5))
    return counts.astype(np.float32) * idf.astype(np.float32)


@compiled
def find(
    terms: NDArray[np.uint8], offsets: NDArray[np.int64], wanted: NDArray[np.uint8], wanted_offsets: NDArray[np.int64]
) -> NDArray[np.int64]:
    """Return the row of each wanted term among the sorted terms, or -1. Offsets mark where terms begin and end."""
    rows = np.full(len(wanted_offsets) - 1, -1)
    for index in range(len(rows)):
        term = wanted[wanted_offsets[index] : wanted_offsets[index + 1]]
        low, high = 0, len(offsets) - 1
        while low < high:
            row = (low + high) // 2
            order = _compare(terms[offsets[row] : offsets[row + 1]], term)
            if order == 0:
                rows[index] = row
                break
            if order < 0:
                low = row + 1
            else:
                high = row
    return rows


@compiled
def _compare(one: NDArray[np.uint8], other: NDArray[np.uint8]) -> int:
    """Return a negative number, 0 or a positive one if `one` sorts before, with or after `other`."""
    for index in range(min(len(one), len(other))):
        if one[index] != other[index]:
            return -1 if one[index] < other[index] else 1
    return len(one) - len(other)


@compiled
def best(
    documents: NDArray[np.uint32],
    frequencies: NDArray[np.uint8],
    values: NDArray[np.float32],
    lengths: NDArray[np.uint8],
    factors: NDArray[np.float32],
    starts: NDArray[np.int64],
    ends: NDArray[np.int64],
    weights: NDArray[np.float32],
    found: NDArray[np.int64],
    scores: NDArray[np.float32],
) -> int:
    """Find the best documents. The loop runs over blocks of documents, and in each block over the terms.

    Args:
        documents, frequencies: postings, by term and then by document. Frequencies are indices into `values`.
        values: the distinct frequencies.
        lengths: length code of each document.
        factors: see `length_factors`.
        starts, ends, weights: for each term of the query, the range of its postings and its weight.
        found, scores: receive the best documents and their scores, best first. Ties are ordered by number.

    Returns:
        The number of results.
    """
    one = np.float32(1)
    places = starts.copy()
    sums = np.zeros(BLOCK, np.float64)
    count = 0
    threshold = np.float32(0)
    while True:
        start = len(lengths)
        for term in range(len(starts)):
            if places[term] < ends[term] and documents[places[term]] < start:
                start = documents[places[term]]
        if start == len(lengths):
            return count
        end = min(start + BLOCK, len(lengths))
        for term in range(len(starts)):
            index = places[term]
            factor = weights[term]
            while index < ends[term] and documents[index] < end:
                document = documents[index]
                saturation = one + values[frequencies[index]] * factors[lengths[document]]
                sums[document - start] += factor - factor / saturation
                index += 1
            places[term] = index
        for row in range(end - start):
            total = sums[row]
            sums[row] = 0
            if total > threshold:  # a cheap test that rarely holds, and always holds if the rounded sum is larger
                score = np.float32(total)
                if score > threshold:
                    count = insert(found, scores, count, start + row, score)
                    if count == len(found):
                        threshold = scores[count - 1]


@compiled
def insert(found: NDArray[np.int64], scores: NDArray[np.float32], count: int, document: int, score: np.float32) -> int:
    """Insert a document after all with the same or a higher score; if the list is full, the last one is dropped.

    Returns:
        The new number of documents.
    """
    count = min(count + 1, len(found))
    row = count - 1
    while row > 0 and scores[row - 1] < score:
        found[row], scores[row] = found[row - 1], scores[row - 1]
        row -= 1
    found[row], scores[row] = document, score
    return count
