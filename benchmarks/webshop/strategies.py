"""Alternative exact ways to find the best documents, which benchmarks/webshop/search.py compares with the chosen one.

Each takes the arrays of an index and the postings and weights of a query's terms, and returns document numbers.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numba import njit
from numpy.typing import NDArray

from starpod.environments.webshop.search.bm25 import BLOCK, insert, length_factors


@dataclass(frozen=True, slots=True)
class Postings:
    """The arrays of an index as arguments of `best` in the web shop's search, and the sums of dense ways."""

    documents: NDArray[np.uint32]
    frequencies: NDArray[np.uint8]
    values: NDArray[np.float32]
    lengths: NDArray[np.uint8]
    factors: NDArray[np.float32]
    offsets: NDArray[np.int64]
    peaks: NDArray[np.float32]
    sums: NDArray[np.float64]

    @classmethod
    def of(cls, arrays: dict[str, NDArray[Any]]) -> Postings:
        """Derive the arrays from those of an index. peaks: per term, the largest frequency times factor."""
        lengths, values = arrays["lengths"], arrays["values"].astype(np.float32)
        factors = length_factors(int(arrays["total"][0]) / np.count_nonzero(lengths))
        postings = arrays["documents"], arrays["frequencies"], values, lengths, factors
        offsets = arrays["posting_offsets"]
        return cls(*postings, offsets, _peaks(*postings, offsets), np.zeros(len(lengths)))


Way = Callable[[Postings, NDArray[np.int64], NDArray[np.float32], int], list[int]]
"""Function of the postings, the rows and weights of the query's terms, and k. Returns the k best documents in order."""


def dense_numpy(index: Postings, rows: NDArray[np.int64], weights: NDArray[np.float32], k: int) -> list[int]:
    """Add up terms one by one in NumPy, with a sum for every document. Returns the k best documents with a term."""
    index.sums[:] = 0
    for row, weight in zip(rows, weights, strict=True):
        postings = slice(index.offsets[row], index.offsets[row + 1])
        documents = index.documents[postings]
        saturation = 1 + index.values[index.frequencies[postings]] * index.factors[index.lengths[documents]]
        index.sums[documents] += weight - weight / saturation
    scores = index.sums.astype(np.float32)
    hits = np.flatnonzero(scores)
    if len(hits) > k:
        hits = hits[scores[hits] >= np.partition(scores[hits], len(hits) - k)[len(hits) - k]]
    best: list[int] = hits[np.argsort(-scores[hits], kind="stable")[:k]].tolist()
    return best


def dense_compiled(index: Postings, rows: NDArray[np.int64], weights: NDArray[np.float32], k: int) -> list[int]:
    """Add up terms like `dense_numpy`, with one compiled loop over postings and one over documents."""
    hits, scores = np.empty(k, np.int64), np.empty(k, np.float32)
    starts, ends = index.offsets[rows], index.offsets[rows + 1]
    best: list[int] = hits[: _dense(*_arrays(index), starts, ends, weights, index.sums, hits, scores)].tolist()
    return best


def bounded(index: Postings, rows: NDArray[np.int64], weights: NDArray[np.float32], k: int) -> list[int]:
    """Run MaxScore in blocks. Once k documents exceed the weakest terms' joint bound, these are only looked up."""
    hits, scores = np.empty(k, np.int64), np.empty(k, np.float32)
    starts, ends = index.offsets[rows], index.offsets[rows + 1]
    size = _bounded(*_arrays(index), starts, ends, weights, index.peaks[rows], hits, scores)
    best: list[int] = hits[:size].tolist()
    return best


def _arrays(index: Postings) -> tuple[NDArray[Any], ...]:
    return index.documents, index.frequencies, index.values, index.lengths, index.factors


@njit(nogil=True)
def _peaks(documents, frequencies, values, lengths, factors, offsets):
    peaks = np.zeros(len(offsets) - 1, np.float32)
    for term in range(len(peaks)):
        for index in range(offsets[term], offsets[term + 1]):
            peaks[term] = max(peaks[term], values[frequencies[index]] * factors[lengths[documents[index]]])
    return peaks


@njit(nogil=True)
def _dense(documents, frequencies, values, lengths, factors, starts, ends, weights, sums, found, scores):
    one = np.float32(1)
    for term in range(len(starts)):
        weight = weights[term]
        for index in range(starts[term], ends[term]):
            document = documents[index]
            saturation = one + values[frequencies[index]] * factors[lengths[document]]
            sums[document] += weight - weight / saturation
    count, threshold = 0, np.float32(0)
    for document in range(len(lengths)):
        total = sums[document]
        sums[document] = 0
        if total > threshold and np.float32(total) > threshold:
            count = insert(found, scores, count, document, np.float32(total))
            if count == len(found):
                threshold = scores[count - 1]
    return count


@njit(nogil=True)
def _bounded(documents, frequencies, values, lengths, factors, starts, ends, weights, peaks, found, scores):
    one = np.float32(1)
    bounds = weights - weights / (one + peaks)
    order = np.argsort(bounds)
    starts, ends, weights = starts[order], ends[order], weights[order]
    together = np.cumsum(bounds[order].astype(np.float64)) * (1 + 1e-6)  # bound of a term and all weaker ones
    places = starts.copy()
    sums = np.zeros(BLOCK)
    count, threshold, weak = 0, np.float32(0), 0
    while weak < len(starts):
        start = len(lengths)
        for term in range(weak, len(starts)):
            if places[term] < ends[term] and documents[places[term]] < start:
                start = documents[places[term]]
        if start == len(lengths):
            break
        end = min(start + BLOCK, len(lengths))
        for term in range(weak, len(starts)):
            index, weight = places[term], weights[term]
            while index < ends[term] and documents[index] < end:
                document = documents[index]
                saturation = one + values[frequencies[index]] * factors[lengths[document]]
                sums[document - start] += weight - weight / saturation
                index += 1
            places[term] = index
        for document in range(start, end):
            total = sums[document - start]
            sums[document - start] = 0
            if total == 0:
                continue
            for term in range(weak - 1, -1, -1):
                if total + together[term] <= threshold:
                    break
                index = _seek(documents, places[term], ends[term], document)
                places[term] = index
                if index < ends[term] and documents[index] == document:
                    saturation = one + values[frequencies[index]] * factors[lengths[document]]
                    total += weights[term] - weights[term] / saturation
            if total > threshold and np.float32(total) > threshold:
                count = insert(found, scores, count, document, np.float32(total))
                if count == len(found):
                    threshold = scores[count - 1]
        while weak < len(starts) and together[weak] <= threshold:
            weak += 1
    return count


@njit(nogil=True)
def _seek(documents, place, end, document):
    """Return the first posting from `place` on that is not before the document, by galloping search."""
    step = 1
    while place + step < end and documents[place + step] < document:
        place += step
        step *= 2
    high = min(place + step, end)
    while place < high:
        middle = (place + high) // 2
        if documents[middle] < document:
            place = middle + 1
        else:
            high = middle
    return place
