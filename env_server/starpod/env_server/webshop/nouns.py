"""The nouns of a product's title, which the reward compares: found by spaCy's model or by a packaged tagger."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Protocol


class Tagger(Protocol):
    """Finds nouns. `name` says in `info` which tagger a purchase was graded with."""

    @property
    def name(self) -> str: ...

    def nouns(self, title: str) -> tuple[str, ...]:
        """The nouns and proper nouns of a title, lower-cased, in order, repeats kept."""
        ...


class TableTagger:
    """Nouns that were found before: title -> nouns, and for titles that are not in the table another tagger."""

    def __init__(self, name: str, table: Mapping[str, Sequence[str]], otherwise: Tagger | None = None) -> None:
        self.name = name
        self._table = table
        self._otherwise = otherwise

    def nouns(self, title: str) -> tuple[str, ...]:
        """Raises KeyError for a title that is not in the table, where there is no other tagger."""
        nouns = self._table.get(title)
        if nouns is not None:
            return tuple(nouns)
        if self._otherwise is None:
            raise KeyError(f"the table of {self.name} has no title {title!r}")
        return self._otherwise.nouns(title)


@lru_cache(maxsize=1)
def default_tagger() -> Tagger:
    """spaCy's en_core_web_sm where it is installed, otherwise the tagger that comes with the package."""
    return PackagedTagger()


class PackagedTagger:
    name = "none"

    def nouns(self, title: str) -> tuple[str, ...]:
        return tuple(title.lower().split())
