"""Taggers: tables, textblob's, and spaCy's behind the interface that spaCy has."""

import importlib.metadata
import re
import sys
import types
from collections.abc import Iterator
from fractions import Fraction
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from starpod.environments.webshop.search import nouns
from starpod.environments.webshop.search.nouns import SpacyTagger, TextBlobTagger, default_tagger, load_tagger
from tests.environments.webshop.catalogues import real_sessions


@pytest.fixture(scope="module")
def textblob() -> TextBlobTagger:
    return TextBlobTagger()


CORD = "Saireed UL Listed 2 Prong Power Cord for JBL Bar 3.1 Bar 2.1 Channel 4K Ultra HD Soundbar"
LEAD = "BRST AC Power Cord Outlet Socket Cable Plug Lead for Panasonic SC-HT830V DVD/VCR Combo Home Theater System"
SHOES = "Mens D.O.N. Issue 2 Gca Basketball Sneakers Shoes Casual - Off White"
PEAK = "PEAK High Top Mens Basketball Shoes Lou Williams Streetball Master Breathable Non Slip Outdoor Sneakers"
KNOB = "Rusticware 921ORB Kitchen and Bath Cabinet Knob"
TWEEZERS = "Minkissy 2pcs Stainless Steel Eyebrow Tweezers Blackhead Acne Remover Portable Makeup Tweezers (Silver)"
TITLES = [
    (SHOES, PEAK, 0.333, 0.12),
    (f"{CORD} Home Theater System Subwoofer", LEAD, 0.3, 0.01),
    (CORD, LEAD, 0.15, 0.01),
    (KNOB, TWEEZERS, 0.0, 0.05),
]


@pytest.mark.parametrize(("wanted", "bought", "score", "tolerance"), TITLES)
def test_textblob_scores_titles_about_as_the_originals_tests_ask(
    textblob: TextBlobTagger, wanted: str, bought: str, score: float, tolerance: float
) -> None:
    ours = textblob.nouns(wanted)
    assert len(set(ours) & set(textblob.nouns(bought))) / len(ours) == pytest.approx(score, abs=tolerance)


def test_textblob_counts_about_the_nouns_of_real_sessions(textblob: TextBlobTagger) -> None:
    """The denominator of a real title score is the number of nouns that spaCy found in the goal's title, or a part."""
    counts = []
    for session in real_sessions():
        ours = len(textblob.nouns(session["goal"]["name"]))
        part = Fraction(session["reward_info"]["title_score"]).limit_denominator(50).denominator
        counts.append((ours, min((part * times for times in range(1, 6)), key=lambda count: abs(count - ours))))
    missed = sum(abs(ours - spacy) for ours, spacy in counts)
    assert missed <= 0.12 * sum(spacy for _, spacy in counts)


@pytest.mark.parametrize(
    ("title", "found"),
    [
        ("", ()),
        ("12 - / 5.5 ( )", ()),
        ("Women's In-Ear Phones & Socks", ("women", "ear", "phones", "socks")),
        ("Laptop 4GB RAM, 1,000 for 2", ("laptop", "gb", "ram")),
        ("3-Piece M&M Set with D.O.N. Case", ("piece", "m&m", "d.o.n", "case")),
        ("Caf\u00e9 \u5317\u4eac Lamp Lamp", ("caf\u00e9", "\u5317\u4eac", "lamp", "lamp")),
    ],
)
def test_textblobs_nouns(textblob: TextBlobTagger, title: str, found: tuple[str, ...]) -> None:
    assert textblob.nouns(title) == found


@given(title=st.text(st.characters(codec="utf-8", exclude_characters="\u03a3"), max_size=60))  # lower case by context
def test_nouns_stand_in_the_title_in_order(textblob: TextBlobTagger, title: str) -> None:
    place = 0
    for noun in textblob.nouns(title):
        assert any(character.isalnum() for character in noun)
        place = title.lower().index(noun, place) + len(noun)


def test_textblob_needs_no_download(monkeypatch: pytest.MonkeyPatch) -> None:
    import nltk.data

    def refuse(*_: Any, **__: Any) -> None:
        raise AssertionError("looked for downloaded data")

    monkeypatch.setattr(nltk.data, "find", refuse)
    monkeypatch.setattr(nltk.data, "load", refuse)
    assert TextBlobTagger().nouns("Oak Table") == ("oak", "table")


class FakeSpacy(types.ModuleType):
    """A fake of spaCy, with a model that takes every capitalised word for a proper noun."""

    def __init__(self) -> None:
        super().__init__("spacy")
        self.loads: list[tuple[str, list[str]]] = []

    def load(self, name: str, *, exclude: list[str]) -> Any:
        self.loads.append((name, exclude))
        tag = lambda word: "PROPN" if word.istitle() else "NOUN" if word == "lamp" else "X"  # noqa: E731
        return lambda title: [types.SimpleNamespace(text=word, pos_=tag(word)) for word in title.split()]


@pytest.fixture
def spacy(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeSpacy]:
    fake = FakeSpacy()
    versions = {"spacy": "3.7.2", "en_core_web_sm": "3.7.1", "en_core_web_lg": "3.7.0", "textblob": "0.20.1"}

    def version(package: str) -> str:
        if package not in versions:
            raise importlib.metadata.PackageNotFoundError(package)
        return versions[package]

    monkeypatch.setitem(sys.modules, "spacy", fake)
    monkeypatch.setattr(nouns.importlib.metadata, "version", version)
    fake.versions = versions  # type: ignore[attr-defined]
    default_tagger.cache_clear()
    yield fake
    default_tagger.cache_clear()


def test_spacys_model_is_the_default_where_it_is_installed(spacy: FakeSpacy) -> None:
    tagger = load_tagger()
    assert (tagger.name, spacy.loads) == ("spacy:en_core_web_sm-3.7.1", [])
    assert [tagger.nouns("Floor lamp with Shade") for _ in range(2)] == [("floor", "lamp", "shade")] * 2
    assert spacy.loads == [("en_core_web_sm", ["ner", "lemmatizer"])]
    assert load_tagger("en_core_web_lg").name == "spacy:en_core_web_lg-3.7.0"
    assert load_tagger("textblob").name == "textblob"


def test_without_a_model_it_is_textblob(spacy: FakeSpacy) -> None:
    del spacy.versions["en_core_web_sm"]  # type: ignore[attr-defined]
    assert load_tagger().name == default_tagger().name == "textblob"
    assert default_tagger() is default_tagger()
    with pytest.raises(ValueError, match=re.escape("python -m spacy download en_core_web_sm")):
        load_tagger("en_core_web_sm")
    del spacy.versions["textblob"]  # type: ignore[attr-defined]
    with pytest.raises(ValueError, match=re.escape("pip install '.[webshop]'")):
        load_tagger()


def test_a_real_pipeline_of_spacys() -> None:
    """Use the installed spaCy with an empty pipeline that assigns one part of speech."""
    module = pytest.importorskip("spacy", reason="spaCy is not installed")
    pipeline = module.blank("en")
    pipeline.add_pipe("attribute_ruler").add(patterns=[[{"LOWER": "lamp"}]], attrs={"POS": "NOUN"})
    tagger = SpacyTagger(pipeline)
    assert tagger.name.startswith("spacy:en_")
    assert tagger.nouns("A Floor Lamp, a lamp") == ("lamp", "lamp")
