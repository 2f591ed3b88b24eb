"""Splitting of a model's answer. Marks such as `||` inside a JSON object belong to the object and do not split it."""

from __future__ import annotations

import json

_DECODER = json.JSONDecoder(strict=False)
_MOST_BROKEN = 64
"""Maximum number of opening braces that begin no valid JSON object. After that many, all further text is read without
looking for objects, so that the time stays linear in the length of the text."""


def split_objects(text: str) -> list[str]:
    """Split a text at its JSON objects. Pieces 1, 3, 5, ... are the objects; the other pieces are text."""
    pieces: list[str] = []
    start = position = broken_count = 0
    while broken_count < _MOST_BROKEN and (brace := text.find("{", position)) >= 0:
        try:
            _, end = _DECODER.raw_decode(text, brace)
        except (ValueError, RecursionError):
            broken_count += 1
            position = brace + 1
        else:
            pieces += [text[start:brace], text[brace:end]]
            start = position = end
    return [*pieces, text[start:]]


def find_mark(text: str, mark: str, start: int = 0) -> int:
    """Return the index of the first mark outside JSON objects.

    If every mark is inside an object, return the index of the first one. If there is no mark, return -1.
    """
    position = start
    for number, piece in enumerate(split_objects(text[start:])):
        if number % 2 == 0 and (offset := piece.find(mark)) >= 0:
            return position + offset
        position += len(piece)
    return text.find(mark, start)


def split_actions(text: str, separator: str) -> list[str]:
    """Split an answer into actions at the separator: `send_mail {"body": "a || b"} || finish` has two."""
    actions = [""]
    for number, piece in enumerate(split_objects(text)):
        continuation, *next_actions = [piece] if number % 2 else piece.split(separator)
        actions[-1] += continuation
        actions += next_actions
    return actions
