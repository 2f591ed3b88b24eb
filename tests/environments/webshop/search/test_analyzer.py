"""Terms: as Lucene made them of real and synthetic texts, on the edges of the grammar, and by rule."""

import json
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from nltk.stem.porter import PorterStemmer

from starpod.environments.webshop.search import analyzer
from starpod.environments.webshop.search.analyzer import STOP_WORDS, analyze, term_of
from starpod.environments.webshop.search.porter import stem
from starpod.environments.webshop.search.words import LONGEST, _longest, words
from tests.environments.webshop.catalogues import real, real_data, recorded
from tests.golden import golden

# What Lucene made of difficult texts: scripts, emoji, quotes, connectors, long runs, and random mixtures of them.
RECORDED = Path(__file__).with_name("lucene_words.jsonl")


def test_recorded_words_of_difficult_texts() -> None:
    for record in map(json.loads, RECORDED.read_text().splitlines()):
        assert words(record["text"]) == record["words"]
        assert analyze(record["text"]) == record["terms"]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("3.5mm u.s.a 1,000.50 12:30 1/2 a:b 1:a .5 5.", "3.5mm u.s.a 1,000.50 12 30 1 2 a:b 1 a 5 5"),
        ("Hello's x-large h&m usb_c __a__ _ e@x.com", "Hello's x large h m usb_c __a__ e x.com"),
        ("\u6f22\u5b57\u3072\u3089\u30ab\u30bf \u0e01a", "\u6f22 \u5b57 \u3072 \u3089 \u30ab\u30bf \u0e01 a"),
        ("\u2605\u2122 \xbd \U0001f1fa\U0001f1f8 \U0001f1fa #\u20e3", "\u2605 \u2122 \U0001f1fa\U0001f1f8 #\u20e3"),
        ("\u1c90 \u0860 \u9fd6 \U0001fa70", "\U0001fa70"),  # younger than Unicode 9, but for the last
    ],
)
def test_words(text: str, expected: str) -> None:
    assert words(text) == expected.split()


@pytest.mark.parametrize(
    ("text", "lengths"),
    [
        ("x" * 255, [255]),
        ("x" * 256, [255, 1]),
        ("x" * 600 + " y", [255, 255, 90, 1]),
        ("\U0001d400" * 200, [127, 73]),
        ("x" + "\U0001d400" * 200, [128, 73]),
        ("_" * 300 + "ab", [255, 1]),
        ("1," * 200 + "1", [255, 145]),
    ],
)
def test_a_word_has_at_most_255_units(text: str, lengths: list[int]) -> None:
    assert [len(word) for word in words(text)] == lengths


# What the rules speak of, some of everything else, and little of each so that it meets.
ALPHABET = (
    "aB1_ .,:;'\"-\u2019é\u0301\u00ad\u200d\ufe0f\u20e3#אבกั漢ひカー★"
    "\u2139\u24c2\U0001f385\U0001f3fb\U0001f1e6\U0001f171\U0001d400"
)


@given(st.text(st.sampled_from(ALPHABET), max_size=20))
@example("_" * 600 + "a" + "\u200d" * 600 + "★")
def test_the_fast_way_finds_the_same_words(text: str) -> None:
    assert words(text) == _longest(text)


@given(st.text(max_size=30) | st.text(st.sampled_from(ALPHABET), max_size=20))
def test_words_are_in_the_text_in_order(text: str) -> None:
    rest = text
    for word in words(text):
        assert word
        assert len(word.encode("utf-16-le", "surrogatepass")) <= 2 * LONGEST
        before, found, rest = rest.partition(word)
        assert found
        assert not words(before)


@pytest.mark.parametrize("unit", ["_", "\u200d", "a.", "#\u0301", "\u2139", "\U0001f385\u200d", "א'", "1,"])
def test_no_text_takes_quadratic_time(unit: str) -> None:
    """A hundred thousand characters: with a quadratic rule this would run into the time limit of the tests."""
    assert sum(map(len, words(unit * (100_000 // len(unit))))) <= 100_000


@pytest.mark.parametrize(
    ("word", "term"),
    [
        ("Women's", "women"), ("WOMEN\u2019S", "women"), ("o'rourke", "o'rourk"), ("The", ""), ("the's", ""),
        ("my", "my"), ("ties", "ti"), ("caresses", "caress"), ("possibly", "possibl"),
        ("archaeology", "archaeolog"), ("trekking", "trek"), ("generalizations", "gener"), ("Stra\xdfe", "stra\xdfe"),
        ("3.5MM", "3.5mm"), ("\u0130d", "id"), ("\u0130t", ""),
        ("\u0391\u03a3", "\u03b1\u03c3"), ("\U0001d400s", "\U0001d400"),
    ],
)  # fmt: skip
def test_terms(word: str, term: str) -> None:
    assert term_of(word) == term


LETTERS = st.text("abcdefghijklmnopqrstuvwxyz", max_size=7) | st.text("aybloges", max_size=5)
ENDINGS = st.sampled_from(
    "s es ies sses ed eed ing eds ings bly blies blied logy logies logied y yyed xxed ational tional enci anci izer"
    " abli alli entli eli ousli ization ation ator alism iveness fulness ousness aliti iviti biliti icate ative alize"
    " ical iciti ful ness al ance ence er ic able ible ant ement ment ent sion tion ou ism ate iti ous ive ize".split()
)


@given(st.builds("{}{}{}".format, LETTERS, st.just("") | ENDINGS, st.just("") | ENDINGS))
def test_stems_as_an_independent_program_makes_them(word: str) -> None:
    assert stem(word) == PorterStemmer(mode=PorterStemmer.MARTIN_EXTENSIONS).stem(word)


def test_stop_words_have_no_term() -> None:
    assert len(STOP_WORDS) == 33
    for nothing in (" ".join(STOP_WORDS), "", " ", "... !!!", "½", "\n\t"):
        assert analyze(nothing) == []


def test_more_words_than_are_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(analyzer, "REMEMBERED", 3)
    text = "red shoes, blue shirts and green hats for running dogs"
    assert analyze(text) == analyze(text) == "red shoe blue shirt green hat run dog".split()
    assert len(analyzer._remembered) <= 3


def test_recorded_terms_of_real_texts() -> None:
    documents = {product.asin: product.index_text() for product in real()}
    records = [json.loads(line) for line in real_data("lucene_golden_tokens.jsonl").open()]
    for record in records:
        assert analyze(record["text"] if "text" in record else documents[record["id"]]) == record["tokens"]


def test_recorded_terms_of_synthetic_texts() -> None:
    documents = {product.asin: product.index_text() for product in recorded("1k")}
    texts = [(documents[record["asin"]], record["terms"]) for record in golden("index_terms_1k", "webshop_golden")]
    texts += [(record["query"], record["terms"]) for record in golden("rankings", "webshop_golden")]
    for text, terms in texts:
        assert analyze(text) == terms
