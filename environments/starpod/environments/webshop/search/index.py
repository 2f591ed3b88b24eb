"""An inverted index with Lucene's ranking. Its arrays can be memory-mapped, so that all worker processes share them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .analyzer import analyze
from .bm25 import MOST_TERMS, TooManyTerms, best, find, length_factors, term_weights
from .inversion import invert


class SearchIndex:
    """An inverted index of the arrays made by `invert`. It is immutable and safe to use from many threads.

    Its methods number documents in the order given to `build`. The arrays number them by asin, because documents with
    equal scores are ranked by asin.

    Raises:
        KeyError: an array is missing.
        ValueError: the sizes of the arrays do not agree.
    """

    def __init__(self, arrays: Mapping[str, NDArray[Any]]) -> None:
        self.arrays: Mapping[str, NDArray[Any]] = {name: _read_only(array) for name, array in arrays.items()}
        self._check()
        self._with_terms = int(np.count_nonzero(self.arrays["lengths"]))
        mean = int(self.arrays["total"][0]) / self._with_terms if self._with_terms else 1.0
        # These are the first arguments of `find` and `best`; the others come from the query.
        self._dictionary = self.arrays["terms"], self.arrays["term_offsets"]
        self._postings = (
            self.arrays["documents"],
            self.arrays["frequencies"],
            _read_only(self.arrays["values"].astype(np.float32)),
            self.arrays["lengths"],
            _read_only(length_factors(mean)),
        )

    @classmethod
    def build(
        cls, documents: Iterable[tuple[str, str]], progress: Callable[[int], None] = lambda done: None
    ) -> SearchIndex:
        """Build an index of (asin, text) pairs. `progress` is called with the number of documents read so far."""
        return cls(invert(documents, progress))

    def __len__(self) -> int:
        return len(self.arrays["positions"])

    def search(self, query: str, k: int = 50) -> list[int]:
        """Return the numbers of the k best documents that contain a term of the query. Raises TooManyTerms."""
        return [document for document, _ in self.ranked(query, k)]

    def ranked(self, query: str, k: int = 50) -> list[tuple[int, float]]:
        """Return the k best documents with their single-precision scores. Raises TooManyTerms."""
        if k < 1:
            raise ValueError(f"{k} results asked for; at least one")
        counts = Counter(analyze(query))
        if len(counts) > MOST_TERMS:
            raise TooManyTerms(f"{len(counts)} distinct terms in a query; at most {MOST_TERMS} are allowed")
        terms = [term.encode() for term in counts]
        offsets = np.cumsum([0, *map(len, terms)])
        rows = find(*self._dictionary, np.frombuffer(b"".join(terms), np.uint8), offsets)
        is_known = rows >= 0
        starts, ends = (self.arrays["posting_offsets"][rows[is_known] + end] for end in (0, 1))
        weights = term_weights(np.array([*counts.values()])[is_known], ends - starts, self._with_terms)
        documents, scores = np.empty(k, np.int64), np.empty(k, np.float32)
        size = best(*self._postings, starts, ends, weights, documents, scores)
        return list(zip(self.arrays["positions"][documents[:size]].tolist(), scores[:size].tolist(), strict=True))

    def _check(self) -> None:
        sizes = {name: len(array) for name, array in self.arrays.items()}
        last_offsets = {name: int(self.arrays[name][-1:].sum()) for name in ("term_offsets", "posting_offsets")}
        if (
            sizes["lengths"] != sizes["positions"]
            or sizes["term_offsets"] != sizes["posting_offsets"]
            or last_offsets["term_offsets"] != sizes["terms"]
            or not last_offsets["posting_offsets"] == sizes["documents"] == sizes["frequencies"]
        ):
            raise ValueError(f"the arrays of the index do not fit together: {sizes}")


def _read_only(array: NDArray[Any]) -> NDArray[Any]:
    """Return a read-only view, so that memory-mapped and other arrays have the same type for numba."""
    view = array.view(np.ndarray)
    view.flags.writeable = False
    return view
