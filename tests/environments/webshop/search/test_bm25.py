"""Lucene's numbers, and its rankings: every recorded list, real and synthetic."""

import numpy as np
import pytest

from starpod.environments.webshop.search.bm25 import (
    LENGTHS,
    TooManyTerms,
    length_codes,
)
from starpod.environments.webshop.search.index import SearchIndex
from tests.environments.webshop.catalogues import real, real_data, recorded
from tests.golden import golden


@pytest.mark.parametrize(
    ("length", "kept"), [(0, 0), (1, 1), (39, 39), (40, 40), (41, 40), (42, 42), (100, 96), (107, 104), (300, 280)]
)
def test_lengths_in_one_byte(length: int, kept: int) -> None:
    assert LENGTHS[length_codes(np.array([length]))].tolist() == [kept]


def test_length_codes_keep_the_order_and_reach_far() -> None:
    assert len(set(LENGTHS.tolist())) == 256
    assert np.array_equal(length_codes(LENGTHS), np.arange(256))
    assert LENGTHS[-1] == 2013265944  # Lucene's largest: 24 + (15 << 27)


def test_recorded_rankings_of_a_synthetic_catalogue() -> None:
    records = golden("rankings", "webshop_golden")
    documents = [(product.asin, product.index_text()) for product in recorded("1k")]
    index = SearchIndex.build(documents)
    for record in records:
        if isinstance(record["1k"], dict):
            with pytest.raises(TooManyTerms):
                index.search(record["query"])
            continue
        found = index.ranked(record["query"])
        assert [documents[number][0] for number, _ in found] == [asin for asin, _ in record["1k"]], record["id"]
        for place, ((_, ours), (_, theirs)) in enumerate(zip(found, record["1k"], strict=True)):
            # Rounded to four digits, then lowered by a millionth for each of the same before it.
            slack = 0.5e-4 + place * 1e-6 + float(np.spacing(np.float32(theirs)))
            assert abs(ours - theirs) <= slack, record["id"]


def test_recorded_rankings_of_the_real_catalogue() -> None:
    documents = [(product.asin, product.index_text()) for product in real()]
    index = SearchIndex.build(documents)
    for line in real_data("lucene_golden_top50.tsv").read_text(encoding="utf-8").splitlines():
        query, *theirs = line.split("\t")
        found = index.ranked(query)
        assert [documents[number][0] for number, _ in found] == [hit.split()[0] for hit in theirs], query
        for (_, ours), hit in zip(found, theirs, strict=True):
            assert abs(ours - float(hit.split()[1])) < 1e-4
