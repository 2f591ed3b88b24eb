"""The text of a reply that arrives in pieces, and the steps with which formats read it.

A step is a generator that yields while it needs more text. So a format is written as if it had the whole reply, and the
result cannot depend on how the reply was cut. A step searches every character once.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Generator
from functools import lru_cache
from typing import TypeVar

Result = TypeVar("Result")
Steps = Generator[None, None, Result]

_BLANKS = re.compile(r"\s*")
_SYNTAX = re.compile(r"\\.?|[\"'()\[\]{}]", re.DOTALL)
"""Matches an escaped character, a quote or a bracket. A backslash alone is one whose character has not arrived."""


class EndOfReply(Exception):
    """A reply ends inside a call. Its argument, if any, is the text in brackets that has no end."""


class Source:
    """The unread text of a reply. `position` is the number of characters that were read."""

    def __init__(self) -> None:
        self.position = 0
        self._text, self._index = "", 0
        self._pieces: list[str] = []
        self._complete = False
        self._since_anchor: list[str] = []

    def feed(self, piece: str, *, complete: bool = False) -> None:
        """Add text. complete: whether the reply ends with it."""
        self._pieces += [piece] * bool(piece)
        self._complete = complete

    def anchor(self) -> None:
        """Remember this place, for `rewind`."""
        self._since_anchor = []

    @property
    def since_anchor(self) -> str:
        return "".join(self._since_anchor)

    def rewind(self) -> None:
        """Return to the anchor."""
        text = self.since_anchor
        self._text, self._index = text + self._text[self._index :], 0
        self.position -= len(text)
        self.anchor()

    def until(self, marks: tuple[str, ...], take: Callable[[str], object]) -> Steps[str]:
        """Pass the text before the next mark to `take`, piece by piece. Read the mark and return it; "" at the end."""
        while True:
            found = _any_of(marks).search(self._text, self._index)
            if text := self._read(found.start() if found else self._certain_end(marks)):
                take(text)
            if found:
                return self._read(found.end())
            if not (yield from self._more()):
                if text := self._read(len(self._text)):
                    take(text)
                return ""

    def before(self, *marks: str) -> Steps[tuple[str, str]]:
        """Read the text before the next mark, and the mark. Return both. Raise EndOfReply if there is none."""
        texts: list[str] = []
        mark = yield from self.until(marks, texts.append)
        if not mark:
            raise EndOfReply
        return "".join(texts), mark

    def value(self, close: str, *followers: str) -> Steps[str]:
        """Read a text and its closing mark, after which only blanks and one of `followers` may come.

        A closing mark before anything else is part of the text. Raise EndOfReply if there is no closing mark.
        """
        texts: list[str] = []
        while (yield from self.until((close,), texts.append)):
            blanks = yield from self.blanks()
            if self._ends_in(followers) or (yield from self.starts(*followers)):
                return "".join(texts)
            texts += [close, blanks]
        raise EndOfReply

    def blanks(self) -> Steps[str]:
        """Read white space and return it."""
        texts: list[str] = []
        while True:
            found = _BLANKS.match(self._text, self._index)
            texts.append(self._read(found.end() if found else self._index))
            if self._index < len(self._text) or not (yield from self._more()):
                return "".join(texts)

    def starts(self, *marks: str) -> Steps[str]:
        """Return the mark that comes next, without reading it; "" if none does."""
        while True:
            for mark in marks:
                if self._text.startswith(mark, self._index):
                    return mark
            if not self._begins_any(marks) or not (yield from self._more()):
                return ""

    def accept(self, *marks: str) -> Steps[str]:
        """Read blanks and the mark that comes next. Return the mark; "" if none does.

        Raise EndOfReply if the reply ends before that is known.
        """
        yield from self.blanks()
        mark = yield from self.starts(*marks)
        if not mark and self._ends_in(marks):
            raise EndOfReply
        return self._read(self._index + len(mark))

    def closes(self, mark: str) -> Steps[bool]:
        """Read blanks and a closing mark. At the end of the reply, its end may be missing."""
        try:
            return bool((yield from self.accept(mark)))
        except EndOfReply:
            return bool(self._read(len(self._text))) or True

    def brackets(self, quotes: str = '"') -> Steps[str]:
        """Read a text in brackets, such as a JSON object, whose first bracket was read before. Return all of it.

        Brackets in quoted texts do not count. Raise EndOfReply if the last bracket is missing.
        """
        texts = [self._since_anchor[-1]]
        depth, quote = 1, ""
        while True:
            end = len(self._text)
            for found in _SYNTAX.finditer(self._text, self._index):
                symbol = found[0]
                if symbol == "\\":
                    end -= 1
                elif quote:
                    quote = "" if symbol == quote else quote
                elif symbol in quotes:
                    quote = symbol
                elif len(symbol) == 1 and symbol not in "\"'":
                    depth += 1 if symbol in "([{" else -1
                    if not depth:
                        return "".join([*texts, self._read(found.end())])
            texts.append(self._read(end))
            if not (yield from self._more()):
                raise EndOfReply("".join(texts))

    def _ends_in(self, marks: tuple[str, ...]) -> bool:
        """Return whether the reply ends here or inside a mark that begins here."""
        return self._complete and not self._pieces and self._begins_any(marks)

    def _begins_any(self, marks: tuple[str, ...]) -> bool:
        """Return whether all text that has arrived may be the beginning of a mark."""
        rest = self._text[self._index : self._index + max(map(len, marks))]
        return any(len(rest) < len(mark) and mark.startswith(rest) for mark in marks)

    def _certain_end(self, marks: tuple[str, ...]) -> int:
        """Return the index from which on the text may be the beginning of a mark."""
        longest = max(map(len, marks), default=1) - 1
        indices = range(max(len(self._text) - longest, self._index), len(self._text))
        return next(
            (index for index in indices if any(_begins(mark, self._text, index) for mark in marks)), indices.stop
        )

    def _read(self, end: int) -> str:
        text = self._text[self._index : end]
        self._index = end
        self.position += len(text)
        self._since_anchor.append(text)
        return text

    def _more(self) -> Steps[bool]:
        """Wait for more text. Return whether there is any."""
        while not self._pieces:
            if self._complete:
                return False
            yield
        self._text, self._index = self._text[self._index :] + "".join(self._pieces), 0
        self._pieces.clear()
        return True


@lru_cache(64)
def _any_of(marks: tuple[str, ...]) -> re.Pattern[str]:
    return re.compile("|".join(map(re.escape, marks)) or "(?!)")


def _begins(mark: str, text: str, index: int) -> bool:
    return mark.startswith(text[index:])
