"""Nouns of titles, which the reward compares. They are found by a spaCy model or, without one, by textblob."""

from __future__ import annotations

import importlib.metadata
import re
import threading
from collections.abc import Callable, Sequence
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from spacy.language import Language

SPACY_MODEL = "en_core_web_sm"
"""Name of the spaCy model that the original WebShop uses."""

_CACHED_TITLES = 1 << 13
_LOADING = threading.Lock()

_UNITS = "km|cm|mm|nm|m|ft|in|kg|mg|g|lb|oz|mph|mb|MB|kb|KB|gb|GB|tb|TB|T|G|M|K"
_TOKEN = re.compile(
    rf"""
    \d+(?:[.,]\d+)*(?=(?:{_UNITS})\b)           # 4 of 4GB
    | [^\W_]+(?:                                # a word, and what may stand inside one:
        (?: [.&](?=[^\W_]) | [/,](?=\d)         # D.O.N, M&M, 13/12, 1,000
        | (?<=[^\W\d_])-(?=\d)                  # but not the hyphens of 3-Piece and In-Ear
        | ['\u2019](?![sS]\b)(?=[^\W_]) )     # nor the possessive
        [^\W_]+)*
    | ['\u2019][sS]\b | \S
    """,
    re.VERBOSE,
)


class Tagger(Protocol):
    """A tagger that finds nouns. It is safe to use from many threads."""

    @property
    def name(self) -> str:
        """Name that the `info` of a purchase reports. It is available before the tagger's data is loaded."""

    def nouns(self, title: str) -> tuple[str, ...]:
        """Return the nouns and proper nouns of a title in lower case, in order, with repeats."""


def load_tagger(name: str = "") -> Tagger:
    """Return a tagger. It loads its data when it tags the first title.

    Args:
        name: `textblob` or an installed spaCy model. By default en_core_web_sm if it is installed, else textblob.

    Raises:
        ValueError: a package is missing. The message says what to install.
    """
    if not name:
        name = SPACY_MODEL if _version("spacy") and _version(SPACY_MODEL) else "textblob"
    if name == "textblob":
        if not _version("textblob"):
            raise ValueError("titles need a tagger; from a clone of the repository: pip install '.[webshop]'")
        return TextBlobTagger()
    if not _version("spacy") or not _version(name):
        raise ValueError(f"no spaCy model {name!r}: pip install spacy && python -m spacy download {name}")
    return SpacyTagger(name)


@lru_cache(maxsize=1)
def default_tagger() -> Tagger:
    """Return the process's tagger for stores without a table of nouns: `load_tagger()`."""
    return load_tagger()


class SpacyTagger:
    """The original WebShop's tagger: a spaCy model, given as the name of its package or as a loaded pipeline."""

    def __init__(self, model: str | Language = SPACY_MODEL) -> None:
        if isinstance(model, str):
            self.name = f"spacy:{model}-{_version(model)}"
        else:
            self.name = f"spacy:{model.meta['lang']}_{model.meta['name']}-{model.meta['version']}"
        self._model = model
        self.nouns = lru_cache(_CACHED_TITLES)(self._nouns)

    @cached_property
    def _pipeline(self) -> Language:
        if not isinstance(self._model, str):
            return self._model
        import spacy

        # These two do not affect parts of speech. The parser does, through the attribute ruler.
        return spacy.load(self._model, exclude=["ner", "lemmatizer"])

    def _nouns(self, title: str) -> tuple[str, ...]:
        return tuple(token.text.lower() for token in self._pipeline(title) if token.pos_ in ("NOUN", "PROPN"))


class TextBlobTagger:
    """An approximation of the original WebShop's tagger, for machines without a spaCy model.

    It uses textblob's tagger (a lexicon and rules), on tokens similar to spaCy's.
    """

    name = "textblob"

    def __init__(self) -> None:
        self.nouns = lru_cache(_CACHED_TITLES)(self._nouns)

    @cached_property
    def _tag(self) -> Callable[[Sequence[str]], list[list[str]]]:
        from textblob.en import parser

        tag: Callable[[Sequence[str]], list[list[str]]] = parser.find_tags
        with _LOADING:
            tag(["word"])  # the lexicon is loaded on first use, which is not thread-safe
        return tag

    def _nouns(self, title: str) -> tuple[str, ...]:
        tokens = _TOKEN.findall(title)
        return tuple(word.lower() for word, tag, *_ in self._tag(tokens) if tag.startswith("NN") and word[0].isalnum())


def _version(package: str) -> str | None:
    """Return the version of an installed distribution without importing it, or None."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None
