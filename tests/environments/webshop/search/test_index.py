"""The index against a scorer written out document by document, and its life as arrays."""

import math
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from starpod.environments.webshop.search.analyzer import analyze
from starpod.environments.webshop.search.bm25 import BLOCK, MOST_TERMS, TooManyTerms, compiled
from starpod.environments.webshop.search.index import SearchIndex


def stored(length: int) -> int:
    """Return a length as Lucene stores it in one byte: it keeps the four leading bits of the part above 24."""
    rest = length - 24
    if rest < 0:
        return length
    shift = max(0, rest.bit_length() - 4)
    return 24 + (rest >> shift << shift)


def expected(documents: list[tuple[str, str]], query: str, k: int = 50) -> list[tuple[int, float]]:
    """BM25 by the book, in Lucene's precision."""
    one, k1, b = np.float32(1), np.float32(0.9), np.float32(0.4)
    terms = [Counter(analyze(text)) for _, text in documents]
    lengths = [each.total() for each in terms]
    count = sum(length > 0 for length in lengths)
    mean = np.float32(sum(lengths) / max(1, count))
    weights = {}
    for term, times in Counter(analyze(query)).items():
        containing = sum(term in each for each in terms)
        weights[term] = np.float32(times) * np.float32(math.log(1 + (count - containing + 0.5) / (containing + 0.5)))
    hits = []
    for number, has in enumerate(terms):
        total = 0.0
        factor = one / (k1 * ((one - b) + b * np.float32(stored(lengths[number])) / mean)) if has else one
        for term, weight in weights.items():
            if has[term]:
                total += float(weight - weight / (one + np.float32(has[term]) * factor))
        if total:
            hits.append((number, float(np.float32(total))))
    return sorted(hits, key=lambda hit: (-hit[1], documents[hit[0]][0]))[:k]


WORDS = "red blue green shoe shirt lamp chair the of 5.5 caf\xe9 \u6f22 x\u0301 zebra".split()
TEXTS = st.lists(st.sampled_from(WORDS), max_size=60).map(" ".join)


@given(st.lists(TEXTS, max_size=30), TEXTS, st.integers(1, 40))
def test_ranks_as_the_book_says(texts: list[str], query: str, k: int) -> None:
    asins = [f"B{number * 7919 % 997:03d}" for number in range(len(texts))]
    documents = list(zip(asins, texts, strict=True))
    index = SearchIndex.build(documents)
    assert len(index) == len(documents)
    assert index.ranked(query, k) == expected(documents, query, k)
    assert index.search(query, k) == [number for number, _ in expected(documents, query, k)]


def test_many_blocks_long_texts_and_frequent_terms() -> None:
    """More documents than one block, lengths far apart, and more different frequencies than one byte can code."""
    texts = ["lamp " * (number % 300) + "chair " * (number % 7) for number in range(400)] + ["", "of the"]
    documents = [(f"B{number * 7 % 4099:04d}", texts[number % len(texts)]) for number in range(BLOCK + 3)]
    index = SearchIndex.build(documents)
    assert index.arrays["frequencies"].dtype.itemsize == 2
    for query in ("lamp lamp chair", "stool", "chair stool"):
        assert index.ranked(query) == expected(documents, query)


def test_nothing_found() -> None:
    for query in ("", "the of", "unknown", "...", "\u6f22", "\ud800"):
        assert SearchIndex.build([("B1", "red shoes")]).search(query) == SearchIndex.build([]).search(query) == []


def test_at_most_1024_distinct_terms_and_at_least_one_result() -> None:
    index = SearchIndex.build([("B1", "w7 w8")])
    assert index.search(" ".join(f"w{number}" for number in range(MOST_TERMS)) + " w1 w2 the of") == [0]
    with pytest.raises(TooManyTerms, match="1025 distinct terms"):
        index.search(" ".join(f"w{number}" for number in range(MOST_TERMS + 1)))
    for k in (0, -1):
        with pytest.raises(ValueError, match="at least one"):
            index.search("w7", k)


def test_arrays_make_the_same_index_also_mapped(tmp_path: Path) -> None:
    documents = [(f"B{number:03d}", " ".join(WORDS[number % 5 :])) for number in range(100)]
    index = SearchIndex.build(documents)
    mapped = {}
    for name, array in index.arrays.items():
        assert array.ndim == 1 and not array.flags.writeable
        np.save(tmp_path / name, array)
        mapped[name] = np.load(tmp_path / f"{name}.npy", mmap_mode="r")
    again = SearchIndex(mapped)
    for query in WORDS:
        assert again.ranked(query) == index.ranked(query)


@pytest.mark.parametrize("name", ["terms", "term_offsets", "posting_offsets", "documents", "frequencies", "lengths"])
def test_arrays_that_do_not_fit_together_are_refused(name: str) -> None:
    arrays = dict(SearchIndex.build([("B1", "red shoes"), ("B2", "blue")]).arrays)
    with pytest.raises(ValueError, match="do not fit together"):
        SearchIndex({**arrays, name: arrays[name][:-1]})
    del arrays[name]
    with pytest.raises(KeyError, match=name):
        SearchIndex(arrays)


def test_many_threads_get_the_same() -> None:
    documents = [(f"B{number:04d}", " ".join(WORDS[number % 11 :: number % 3 + 1])) for number in range(1000)]
    index = SearchIndex.build(documents)
    queries = [" ".join(WORDS[start::step]) for start in range(10) for step in (1, 2, 3)]
    alone = {query: index.ranked(query) for query in queries}
    with ThreadPoolExecutor(8) as pool:
        turns = [queries[turn:] + queries[:turn] for turn in range(8)]
        found = pool.map(lambda turn: {query: index.ranked(query) for query in turn}, turns)
        assert all(each == alone for each in found)


def test_chunks_do_not_show_and_progress_counts_every_document(monkeypatch: pytest.MonkeyPatch) -> None:
    documents = [(f"B{number}", " ".join(WORDS[: number % 14])) for number in range(50)]
    told: list[int] = []
    whole = SearchIndex.build(documents, told.append).arrays
    assert told == list(range(1, 51))
    monkeypatch.setattr("starpod.environments.webshop.search.inversion._CHUNK", 20)
    for name, array in SearchIndex.build(documents).arrays.items():
        assert np.array_equal(array, whole[name])


def test_loops_run_where_compiled_code_cannot_be_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("numba.core.caching.CacheImpl._locator_classes", [])  # as on a read-only disk without a home

    def double(number: int) -> int:
        return 2 * number

    assert compiled(double)(21) == 42
