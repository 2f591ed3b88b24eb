"""Where a model's answer is cut: JSON objects in it are decoded first, so that a mark inside one belongs to it."""

from __future__ import annotations

import json

_DECODER = json.JSONDecoder(strict=False)
_MOST_BROKEN = 64
"""Braces that begin no object, after which all further ones count as text: time stays linear."""


def split_objects(text: str) -> list[str]:
    """Split a text into what is no JSON object, an object, what is none, and so on: every second piece is an object."""
    pieces: list[str] = []
    begin = at = broken = 0
    while broken < _MOST_BROKEN and (brace := text.find("{", at)) >= 0:
        try:
            _, end = _DECODER.raw_decode(text, brace)
        except (ValueError, RecursionError):
            broken += 1
            at = brace + 1
        else:
            pieces += [text[begin:brace], text[brace:end]]
            begin = at = end
    return [*pieces, text[begin:]]


def find_mark(text: str, mark: str, start: int = 0) -> int:
    """Return where a mark first stands outside of JSON objects, else where it first stands at all; -1 where nowhere."""
    at = start
    for number, piece in enumerate(split_objects(text[start:])):
        if number % 2 == 0 and (found := piece.find(mark)) >= 0:
            return at + found
        at += len(piece)
    return text.find(mark, start)


def split_actions(text: str, separator: str) -> list[str]:
    """Split an answer into its actions, such as `send_mail {"body": "a || b"} || finish` into two."""
    actions = [""]
    for number, piece in enumerate(split_objects(text)):
        first, *further = [piece] if number % 2 else piece.split(separator)
        actions[-1] += first
        actions += further
    return actions
