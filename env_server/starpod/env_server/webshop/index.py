"""An inverted index over arrays: built once, mapped from a store by all workers of a machine, searched as Lucene does."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from starpod.env_server.webshop.analyzer import analyze
from starpod.env_server.webshop.inversion import invert
from starpod.env_server.webshop.search import MOST_TERMS, TooManyTerms, best, find, length_factors, term_weights

QUERIES_KEPT = 4096
"""Queries whose results an index remembers."""
_LONGEST_KEPT = 1000


class Index:
    """Which documents have which terms how often. Immutable, and safe to use from many threads.

    Inside, documents are numbered by asin, because that is how ties are ordered; outside, in the order of `build`.
    """

    def __init__(self, arrays: Mapping[str, NDArray[Any]], queries_kept: int = QUERIES_KEPT) -> None:
        self._arrays = {name: _read_only(array) for name, array in arrays.items()}
        self._positions = self._arrays["positions"]
        self._term_ends = self._arrays["term_ends"]
        self._posting_ends = self._arrays["posting_ends"]
        with_terms = int(np.count_nonzero(self._arrays["lengths"]))
        self._with_terms = with_terms
        self._factors = _read_only(length_factors(int(self._arrays["total"][0]) / max(1, with_terms)))
        self._values = _read_only(self._arrays["values"].astype(np.float32))
        self._kept = lru_cache(queries_kept)(self._best)

    @classmethod
    def build(cls, documents: Iterable[tuple[str, str]], progress: Callable[[int], None] = lambda done: None) -> Index:
        """An index of (asin, text) pairs. progress: called now and then with the number of documents read."""
        return cls(invert(documents, progress))

    @classmethod
    def from_arrays(cls, arrays: Mapping[str, NDArray[Any]], queries_kept: int = QUERIES_KEPT) -> Index:
        """An index over what `arrays` gave, which may lie in mapped files. Raises KeyError if one is missing."""
        return cls(arrays, queries_kept)

    def arrays(self) -> dict[str, NDArray[Any]]:
        """All that the index consists of."""
        return dict(self._arrays)

    def __len__(self) -> int:
        return len(self._lengths)

    def search(self, query: str, k: int = 50) -> list[int]:
        """The numbers of the k best documents that have a term of the query, best first. Raises TooManyTerms."""
        return list(self._found(query, k)[0])

    def ranked(self, query: str, k: int = 50) -> list[tuple[int, float]]:
        """The same with their scores, which are single precision numbers."""
        return list(zip(*self._found(query, k), strict=True))

    def _found(self, query: str, k: int) -> tuple[tuple[int, ...], tuple[float, ...]]:
        return self._kept(query, k) if len(query) <= _LONGEST_KEPT else self._best(query, k)

    def _best(self, query: str, k: int) -> tuple[tuple[int, ...], tuple[float, ...]]:
        counts = Counter(analyze(query))
        if len(counts) > MOST_TERMS:
            raise TooManyTerms(f"{len(counts)} distinct terms in a query; at most {MOST_TERMS} are allowed")
        encoded = [term.encode() for term in counts]
        rows = find(
            self._arrays["terms"],
            self._term_ends,
            np.frombuffer(b"".join(encoded), np.uint8),
            np.cumsum([len(term) for term in encoded], dtype=np.int64),
        )
        known = rows >= 0
        rows = rows[known]
        ends = self._posting_ends[rows]
        starts = np.where(rows > 0, self._posting_ends[rows - 1], 0)
        weights = term_weights(np.array([*counts.values()])[known], ends - starts, self._with_terms)
        found, scores = np.empty(k, np.int64), np.empty(k, np.float32)
        size = best(
            self._arrays["documents"],
            self._arrays["frequencies"],
            self._values,
            self._arrays["lengths"],
            self._factors,
            starts,
            ends,
            weights,
            found,
            scores,
        )
        return tuple(self._positions[found[:size]].tolist()), tuple(scores[:size].tolist())


def _read_only(array: NDArray[Any]) -> NDArray[Any]:
    """A view that cannot be written through: mapped and other arrays are of one type to the compiled loops."""
    view = array.view(np.ndarray)
    view.flags.writeable = False
    return view
