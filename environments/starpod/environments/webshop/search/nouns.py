"""The nouns of a product's title, which the reward compares: found by a spaCy model, or by textblob without one."""

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
"""The model that the original loads."""

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
    """Finds nouns. Safe to use from threads."""

    @property
    def name(self) -> str:
        """The tagger's name in the `info` of a purchase; known before anything is loaded."""

    def nouns(self, title: str) -> tuple[str, ...]:
        """The nouns and proper nouns of a title, lower-cased, in order, repeats kept."""


def load_tagger(name: str = "") -> Tagger:
    """The tagger of a name: `textblob`, or an installed spaCy model. Its data is loaded when the first title comes.

    Without a name it is en_core_web_sm where that is installed, otherwise textblob. Raises ValueError, with what to
    install, where the package is missing.
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
    """The process's one tagger for titles that no table holds: `load_tagger()`."""
    return load_tagger()


class SpacyTagger:
    """Nouns as the original finds them, by a spaCy model (a package's name, or a pipeline that is loaded already)."""

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

        # Neither of the two has a say in parts of speech; the parser does, through the attribute ruler.
        return spacy.load(self._model, exclude=["ner", "lemmatizer"])

    def _nouns(self, title: str) -> tuple[str, ...]:
        return tuple(token.text.lower() for token in self._pipeline(title) if token.pos_ in ("NOUN", "PROPN"))


class TextBlobTagger:
    """Nouns by the tagger that comes with textblob (a lexicon and rules), on tokens cut much as spaCy cuts them.

    An approximation of what the original finds, for machines without a spaCy model.
    """

    name = "textblob"

    def __init__(self) -> None:
        self.nouns = lru_cache(_CACHED_TITLES)(self._nouns)

    @cached_property
    def _tag(self) -> Callable[[Sequence[str]], list[list[str]]]:
        from textblob.en import parser

        tag: Callable[[Sequence[str]], list[list[str]]] = parser.find_tags
        with _LOADING:
            tag(["word"])  # the lexicon loads itself on its first use, which is not safe in two threads
        return tag

    def _nouns(self, title: str) -> tuple[str, ...]:
        tokens = _TOKEN.findall(title)
        return tuple(word.lower() for word, tag, *_ in self._tag(tokens) if tag.startswith("NN") and word[0].isalnum())


def _version(package: str) -> str | None:
    """The version of an installed distribution, found without importing it."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None
