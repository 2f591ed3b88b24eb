"""An inverted index over arrays, which all workers of a machine may map from one store, searched as Lucene does it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from starpod.environments.webshop.search.analyzer import analyze
from starpod.environments.webshop.search.bm25 import MOST_TERMS, TooManyTerms, best, find, length_factors, term_weights
from starpod.environments.webshop.search.inversion import invert

QUERIES_KEPT = 4096
"""Queries whose results an index remembers."""
_LONGEST_KEPT = 1000


class Index:
    """Which documents have which terms how often. Immutable, and safe to use from many threads.

    Inside, documents are numbered by asin, because that is how ties are ordered; outside, in the order of `build`.
    """

    def __init__(self, arrays: Mapping[str, NDArray[Any]], queries_kept: int = QUERIES_KEPT) -> None:
        self._arrays = {name: _read_only(array) for name, array in arrays.items()}
        self._check()
        self._with_terms = int(np.count_nonzero(self._arrays["lengths"]))
        mean = int(self._arrays["total"][0]) / self._with_terms if self._with_terms else 1.0
        # The last arguments of `best` and `find` are the query's, the first are the index's.
        self._dictionary = self._arrays["terms"], self._arrays["term_offsets"]
        self._postings = (
            self._arrays["documents"],
            self._arrays["frequencies"],
            _read_only(self._arrays["values"].astype(np.float32)),
            self._arrays["lengths"],
            _read_only(length_factors(mean)),
        )
        self._kept = lru_cache(queries_kept)(self._best)

    @classmethod
    def build(cls, documents: Iterable[tuple[str, str]], progress: Callable[[int], None] = lambda done: None) -> Index:
        """An index of (asin, text) pairs. progress: called now and then with the number of documents read."""
        return cls(invert(documents, progress))

    @classmethod
    def from_arrays(cls, arrays: Mapping[str, NDArray[Any]], queries_kept: int = QUERIES_KEPT) -> Index:
        """An index over what `arrays` gave, which may lie in mapped files.

        queries_kept: how many queries' results are remembered. Raises KeyError if an array is missing, ValueError if
        their sizes do not agree.
        """
        return cls(arrays, queries_kept)

    def arrays(self) -> dict[str, NDArray[Any]]:
        """The arrays that the index consists of."""
        return dict(self._arrays)

    def __len__(self) -> int:
        return len(self._arrays["positions"])

    def search(self, query: str, k: int = 50) -> list[int]:
        """The numbers of the k best documents that have a term of the query, best first. Raises TooManyTerms."""
        return list(self._found(query, k)[0])

    def ranked(self, query: str, k: int = 50) -> list[tuple[int, float]]:
        """The k best documents with their scores, which are single precision numbers."""
        return list(zip(*self._found(query, k), strict=True))

    def cache_info(self) -> Any:
        """Hits, misses and size of the cache of queries, as of `functools.lru_cache`."""
        return self._kept.cache_info()

    def _check(self) -> None:
        sizes = {name: len(array) for name, array in self._arrays.items()}
        last = {name: int(self._arrays[name][-1:].sum()) for name in ("term_offsets", "posting_offsets")}
        if (
            sizes["lengths"] != sizes["positions"]
            or sizes["term_offsets"] != sizes["posting_offsets"]
            or last["term_offsets"] != sizes["terms"]
            or not last["posting_offsets"] == sizes["documents"] == sizes["frequencies"]
        ):
            raise ValueError(f"the arrays of the index do not fit together: {sizes}")

    def _found(self, query: str, k: int) -> tuple[tuple[int, ...], tuple[float, ...]]:
        return self._kept(query, k) if len(query) <= _LONGEST_KEPT else self._best(query, k)

    def _best(self, query: str, k: int) -> tuple[tuple[int, ...], tuple[float, ...]]:
        if k < 1:
            raise ValueError(f"{k} results asked for; at least one")
        counts = Counter(analyze(query))
        if len(counts) > MOST_TERMS:
            raise TooManyTerms(f"{len(counts)} distinct terms in a query; at most {MOST_TERMS} are allowed")
        encoded = [term.encode() for term in counts]
        offsets = np.cumsum([0, *map(len, encoded)])
        rows = find(*self._dictionary, np.frombuffer(b"".join(encoded), np.uint8), offsets)
        known = rows >= 0
        starts, ends = (self._arrays["posting_offsets"][rows[known] + end] for end in (0, 1))
        weights = term_weights(np.array([*counts.values()])[known], ends - starts, self._with_terms)
        found, scores = np.empty(k, np.int64), np.empty(k, np.float32)
        size = best(*self._postings, starts, ends, weights, found, scores)
        return tuple(self._arrays["positions"][found[:size]].tolist()), tuple(scores[:size].tolist())


def _read_only(array: NDArray[Any]) -> NDArray[Any]:
    """A view that cannot be written through: mapped and other arrays are of one type to the compiled loops."""
    view = array.view(np.ndarray)
    view.flags.writeable = False
    return view
