"""Picture of the question, the search field and the results."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence

from starpod.env_server import Canvas

_INK, _BLUE = (36, 40, 50), (40, 84, 170)


def draw(question: str, query: str, found: Sequence[tuple[str, str]], verdict: str) -> bytes:
    """Draw a PNG that is 640 pixels wide.

    Args:
        found: titles and texts of the results.
        verdict: "right" or "wrong"; "" before the answer.
    """
    question_lines = textwrap.wrap(question, 66)
    cards = [(title, textwrap.wrap(text, 84)[:4]) for title, text in found[:5]]
    height = 92 + 22 * len(question_lines) + sum(50 + 18 * len(lines) for _, lines in cards) + (0 if cards else 60)
    canvas = Canvas(640, height, (238, 240, 244))
    y = 24
    for line in question_lines:
        canvas.text(320, y, line, _INK, size=17, width=600)
        y += 22
    canvas.box(60, y, 580, y + 34, (255, 255, 255), radius=17)
    canvas.ellipse(74, y + 9, 88, y + 23, _BLUE)
    canvas.ellipse(77, y + 12, 85, y + 20, (255, 255, 255))
    canvas.line(86, y + 21, 92, y + 27, fill=_BLUE, width=3)
    query_text = "".join(character if character.isprintable() else " " for character in query)
    canvas.text(330, y + 17, query_text if len(query_text) <= 60 else query_text[:59] + "…", _INK, size=15, width=440)
    y += 48
    for title, lines in cards:
        canvas.box(30, y, 610, y + 40 + 18 * len(lines), (255, 255, 255), radius=8)
        canvas.text(320, y + 16, title, _BLUE, size=16, width=540)
        for row, line in enumerate(lines):
            canvas.text(320, y + 40 + 18 * row, line, _INK, size=13, width=560)
        y += 50 + 18 * len(lines)
    if verdict:
        colour = (40, 140, 84) if verdict == "right" else (200, 60, 60)
        canvas.box(250, height - 38, 390, height - 8, colour, radius=8)
        canvas.text(320, height - 23, verdict, (255, 255, 255), size=18, width=130)
    return canvas.png()
