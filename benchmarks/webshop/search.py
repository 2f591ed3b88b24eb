"""Cost of WebShop's search by number of documents (build, size, query time), compared with other ways and engines.

    python -m benchmarks.webshop.search [--documents 1000 100000 1180000] [--queries 300]

The documents are made up: words follow a power law, with lengths and repetitions as in WebShop's products (107 terms,
67 of them distinct, the commonest term in 44 % of the documents; a query touches half as many postings as there are
documents). Queries are words of a document. `starpod` is the whole search from text to ranking, without the query
cache. The other ways start from the terms. bm25s and tantivy are measured if installed, up to --peers documents: bm25s
with our terms and parameters, tantivy with its English analyzer. Times are of one thread, and `cpu` excludes other
programs. `same_top_10` is the share of queries whose first ten results are Lucene's, which starpod's always are.
"""

from __future__ import annotations

import argparse
import functools
import importlib.util
import json
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Table

from benchmarks.machine import origin
from benchmarks.webshop import strategies
from starpod.environments.webshop.search.analyzer import analyze
from starpod.environments.webshop.search.bm25 import find, term_weights
from starpod.environments.webshop.search.index import Index
from tests.support import ROOT

VOCABULARY = 2_000_000
CHUNK = 20_000
TOP = 10
HITS = 50

Search = Callable[[str], Sequence[int]]
Built = TypeVar("Built")


@dataclass(frozen=True, slots=True)
class Result:
    """Result of a way. build_seconds: CPU time without making the texts; None if it uses starpod's index."""

    way: str
    documents: int
    build_seconds: float | None
    megabytes: float | None
    p50_seconds: float
    p99_seconds: float
    p50_cpu_seconds: float
    p99_cpu_seconds: float
    same_top_10: float


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--documents", type=int, nargs="+", default=[1000, 100_000, 1_180_000])
    parser.add_argument("--queries", type=int, default=300)
    parser.add_argument("--peers", type=int, default=100_000, help="bm25s and tantivy get at most so many documents")
    parser.add_argument("--json", type=Path, default=ROOT / "docs" / "benchmarks" / "webshop_search.json")
    arguments = parser.parse_args()
    results = []
    for count in arguments.documents:
        results += measure(count, arguments.queries, peers=count <= arguments.peers)
        print_table([result for result in results if result.documents == count])
    content = origin() | {"results": [asdict(result) for result in results]}
    packages = ("numpy", "numba", "bm25s", "tantivy")
    content["machine"]["versions"] |= {name: version(name) for name in packages if installed(name)}
    arguments.json.parent.mkdir(parents=True, exist_ok=True)
    arguments.json.write_text(json.dumps(content, indent=2) + "\n")


def measure(count: int, queries: int, *, peers: bool) -> list[Result]:
    """Measure every way on the same documents and queries."""
    texts = list(questions(count, queries))
    seconds, index = timed(count, Index.build)
    index = Index(index.arrays)
    size = sum(array.nbytes for array in index.arrays.values()) / 1e6
    truth = [index.search(query, HITS)[:TOP] for query in texts]
    results = [result("starpod", count, seconds, size, lambda query: index.search(query, HITS), texts, truth)]
    postings = strategies.Postings.of(index.arrays)
    for name, way in STRATEGIES.items():
        results.append(result(name, count, None, None, strategy(index, postings, way, texts), texts, truth))
    for name, peer in PEERS.items():
        if peers and installed(name):
            seconds, search = timed(count, peer)
            results.append(result(name, count, seconds, None, search, texts, truth))
    return results


def result(
    way: str,
    count: int,
    build_seconds: float | None,
    megabytes: float | None,
    search: Search,
    queries: list[str],
    truth: list[list[int]],
) -> Result:
    """Measure a way: every query once as a warm-up, and then once with the clock."""
    matches = [list(search(query)[:TOP]) == hits for query, hits in zip(queries, truth, strict=True)]
    waits, cpu = [], []
    for query in queries:
        start, start_cpu = time.perf_counter(), time.thread_time()
        search(query)
        cpu.append(time.thread_time() - start_cpu)
        waits.append(time.perf_counter() - start)
    p50, p99 = np.percentile(waits, (50, 99))
    cpu50, cpu99 = np.percentile(cpu, (50, 99))
    share = sum(matches) / len(matches)
    return Result(way, count, build_seconds, megabytes, float(p50), float(p99), float(cpu50), float(cpu99), share)


def timed(count: int, build: Callable[[Iterator[tuple[str, str]]], Built]) -> tuple[float, Built]:
    """Build something from `count` documents. Returns the CPU seconds, without making the documents, and the result."""
    making = 0.0

    def metered() -> Iterator[tuple[str, str]]:
        nonlocal making
        stream = documents(count)
        while True:
            start = time.process_time()
            document = next(stream, None)
            making += time.process_time() - start
            if document is None:
                return
            yield document

    start = time.process_time()
    built = build(metered())
    return time.process_time() - start - making, built


# --- documents and queries ---------------------------------------------------------------------------------------


def documents(count: int) -> Iterator[tuple[str, str]]:
    """Yield (asin, text) pairs, the same in every run."""
    rng = np.random.default_rng(0)
    chances = np.cumsum((np.arange(VOCABULARY) + 20.0) ** -1.15)
    words = _words()
    for start in range(0, count, CHUNK):
        size = min(CHUNK, count - start)
        lengths = np.clip(rng.lognormal(np.log(76.5), 0.82, size), 4, 4000).astype(np.int64)
        ends = np.cumsum(lengths)
        starts = np.repeat(ends - lengths, lengths)
        draws = np.searchsorted(chances, rng.random(ends[-1]) * chances[-1])
        earlier = starts + (rng.random(len(draws)) * (np.arange(len(draws)) - starts)).astype(np.int64)
        row = words[np.where(rng.random(len(draws)) < 0.4, draws[earlier], draws)].tolist()
        asins = rng.permutation(size)
        for number, (length, end) in enumerate(zip(lengths.tolist(), ends.tolist(), strict=True)):
            yield f"B{start // CHUNK:03d}{asins[number]:06d}", " ".join(row[end - length : end])


def questions(count: int, queries: int) -> Iterator[str]:
    """Yield queries of 1 to 25 words of a document, 8 on average."""
    rng = np.random.default_rng(1)
    texts = [text for _, text in documents(min(count, CHUNK))]
    for number in rng.integers(0, len(texts), queries):
        words = texts[number].split()
        yield " ".join(rng.choice(words, min(len(words), int(np.clip(rng.normal(8, 4), 1, 25))), replace=False))


@functools.cache
def _words() -> NDArray[np.object_]:
    """Return made-up words, shortest (and commonest) first, that the stemmer does not change."""
    syllables = np.array([a + b for a in "bcdfghklmnprtvz" for b in "aeou"], dtype=object)
    numbers = np.arange(VOCABULARY)
    words = np.full(VOCABULARY, "k", dtype=object)
    while numbers.any():
        words = np.where(numbers > 0, syllables[numbers % len(syllables)] + words, words)
        numbers = numbers // len(syllables)
    return words


# --- peers -------------------------------------------------------------------------------------------------------


def strategy(index: Index, postings: strategies.Postings, way: strategies.Way, queries: list[str]) -> Search:
    """Return a search for which the terms of these queries are precomputed."""
    terms = {query: _terms(index, query) for query in queries}
    positions = index.arrays["positions"]
    return lambda query: positions[way(postings, *terms[query], HITS)].tolist()


def _terms(index: Index, query: str) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
    """Return the rows and weights of a query's distinct terms."""
    arrays = index.arrays
    counts = Counter(analyze(query))
    terms = [term.encode() for term in counts]
    buffer = np.frombuffer(b"".join(terms), np.uint8)
    rows = find(arrays["terms"], arrays["term_offsets"], buffer, np.cumsum([0, *map(len, terms)]))
    document_counts = arrays["posting_offsets"][rows + 1] - arrays["posting_offsets"][rows]
    return rows, term_weights(np.array([*counts.values()]), document_counts, len(index))


def bm25s(texts: Iterator[tuple[str, str]]) -> Search:
    import bm25s

    engine = bm25s.BM25(method="lucene", k1=0.9, b=0.4)
    engine.index([analyze(text) for _, text in texts], show_progress=False)

    def search(query: str) -> list[int]:
        hits, _ = engine.retrieve([analyze(query)], k=HITS, show_progress=False)
        return [int(number) for number in hits[0]]

    return search


def tantivy(texts: Iterator[tuple[str, str]]) -> Search:
    import tantivy

    schema = tantivy.SchemaBuilder()
    schema.add_text_field("contents", tokenizer_name="en_stem")
    schema.add_unsigned_field("number", stored=True)
    engine = tantivy.Index(schema.build())
    writer = engine.writer(num_threads=1)
    for number, (_, text) in enumerate(texts):
        writer.add_document(tantivy.Document(contents=text, number=number))
    writer.commit()
    writer.wait_merging_threads()
    engine.reload()
    searcher = engine.searcher()

    def search(query: str) -> list[int]:
        hits = searcher.search(engine.parse_query(query, ["contents"]), HITS).hits
        return [searcher.doc(address)["number"][0] for _, address in hits]

    return search


STRATEGIES = {
    "MaxScore, compiled": strategies.bounded,
    "dense, compiled": strategies.dense_compiled,
    "dense, NumPy": strategies.dense_numpy,
}
PEERS: dict[str, Callable[[Iterator[tuple[str, str]]], Search]] = {"bm25s": bm25s, "tantivy": tantivy}


def installed(package: str) -> bool:
    return importlib.util.find_spec(package) is not None


def print_table(results: list[Result]) -> None:
    headings = ["Way", "Documents", "Build CPU s", "MB", "p50 ms", "p99 ms", "p50 CPU ms", "p99 CPU ms", "Same top 10"]
    table = Table()
    for index, heading in enumerate(headings):
        table.add_column(heading, justify="right" if index else "left")
    for entry in results:
        times = (entry.p50_seconds, entry.p99_seconds, entry.p50_cpu_seconds, entry.p99_cpu_seconds)
        table.add_row(
            entry.way,
            f"{entry.documents:,}",
            "" if entry.build_seconds is None else f"{entry.build_seconds:,.1f}",
            "" if entry.megabytes is None else f"{entry.megabytes:,.1f}",
            *(f"{value * 1e3:,.3f}" for value in times),
            f"{entry.same_top_10:.3f}",
        )
    Console(width=None if sys.stdout.isatty() else 120).print(table)


if __name__ == "__main__":
    main()
