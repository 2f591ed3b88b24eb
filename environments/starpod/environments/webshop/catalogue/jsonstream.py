"""Streaming of the elements of a JSON list or object, because files can be larger than memory."""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal, NamedTuple

CHUNK = 1 << 20
"""Number of characters that are read at a time."""
MAX_ELEMENT = 64 << 20
"""Maximum number of characters of one element. The file counts as broken if an element is longer."""

_BLANKS = " \t\n\r"
_ENDS = tuple(_BLANKS + ",:]}")


class JSONElement(NamedTuple):
    """An element: its key ("" in a list), its value, and the line on which it begins, from 1."""

    key: str
    value: Any
    line: int


class BrokenJson(ValueError):
    """The text is not JSON, not of the expected kind, or incomplete. The rest of the file cannot be read."""

    def __init__(self, line: int, reason: str) -> None:
        super().__init__(f"line {line}: {reason}")
        self.line = line
        self.reason = reason


def elements(path: Path, kind: Literal["list", "object"]) -> Iterator[JSONElement]:
    """Yield the elements of a file in order, including repeated keys. `.gz` files are unpacked.

    Raises:
        OSError: the file cannot be opened.
        BrokenJson: the file cannot be read further.
    """
    opener = gzip.open if path.suffix == ".gz" else open
    with opener(path, "rt", encoding="utf-8-sig") as file:
        reader = _Reader(file.read)
        opening, closing = "[]" if kind == "list" else "{}"
        if (opening_sign := reader.sign()) != opening:
            raise reader.broken(
                f"a JSON {kind} was expected, which begins with {opening}, not with {opening_sign or 'nothing'!r}"
            )
        sign = reader.peek()
        if sign == closing:
            reader.sign()
        while sign != closing:
            reader.peek()
            line = reader.line
            key = ""
            if kind == "object":
                key = reader.value()
                if not isinstance(key, str) or reader.sign() != ":":
                    raise reader.broken("a key in double quotes and a colon were expected")
            yield JSONElement(key, reader.value(), line)
            sign = reader.sign()
            if sign not in (",", closing):
                raise reader.broken(f"a comma or {closing} was expected, not {sign or 'the end of the file'!r}")
        if trailing := reader.sign():
            raise reader.broken(f"nothing was expected after the {kind}, but {trailing!r} follows")


class _Reader:
    """A sliding window over the text of a file."""

    def __init__(self, read: Any) -> None:
        self._read = read
        self._text = ""
        self._at = 0
        self._ended = False
        self.line = 1
        """Line of the next character, from 1."""
        self._decode = json.JSONDecoder().raw_decode

    def broken(self, reason: str) -> BrokenJson:
        return BrokenJson(self.line, reason)

    def peek(self) -> str:
        """Return the next character that is not blank without consuming it; "" at the end of the file."""
        while True:
            text = self._text
            for index in range(self._at, len(text)):
                if text[index] not in _BLANKS:
                    self._move(index)
                    return text[index]
            self._move(len(text))
            if not self._more(CHUNK):
                return ""

    def sign(self) -> str:
        """Consume and return the next character that is not blank; "" at the end of the file."""
        sign = self.peek()
        if sign:
            self._move(self._at + 1)
        return sign

    def value(self) -> Any:
        """Consume and return the next value."""
        self.peek()
        size = CHUNK
        while True:
            try:
                value, end = self._decode(self._text, self._at)
            except (ValueError, RecursionError) as error:
                # The value may continue beyond the window, so report the error only if no more text can be read.
                if len(self._text) - self._at > MAX_ELEMENT or not self._more(size):
                    raise self._unreadable(error) from None
                size *= 2
                continue
            # A number may continue beyond the window: 12|34, 1.|5. Other values have an explicit end.
            is_whole = not isinstance(value, (int, float)) or self._text[end : end + 1] in _ENDS
            if is_whole or len(self._text) - self._at > MAX_ELEMENT or not self._more(size):
                self._move(end)
                return value
            size *= 2

    def _unreadable(self, error: ValueError | RecursionError) -> BrokenJson:
        if not isinstance(error, json.JSONDecodeError):
            return self.broken(str(error))
        line = self.line + self._text.count("\n", self._at, error.pos)
        is_cut = error.pos >= len(self._text) - 1 or error.msg.startswith("Unterminated")
        return BrokenJson(line, f"{error.msg} (the file ends here)" if is_cut and self._ended else error.msg)

    def _move(self, to: int) -> None:
        self.line += self._text.count("\n", self._at, to)
        self._at = to

    def _more(self, size: int) -> bool:
        """Read more text into the window. Return False at the end of the file."""
        try:
            text = self._read(size)
        except UnicodeDecodeError as error:
            raise self.broken(f"not UTF-8: {error.reason}") from None
        except (EOFError, gzip.BadGzipFile, zlib.error) as error:
            raise self.broken(f"not a whole gzip file: {error}") from None
        if not text:
            self._ended = True
            return False
        self._text = self._text[self._at :] + text
        self._at = 0
        return True
