"""Picture of the problem and its calculations, as a page of a notebook."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence

from starpod.env_server import Canvas

_LINE, _WIDTH = 26, 620


def draw(problem: str, work: Sequence[str], verdict: str) -> bytes:
    """Draw a PNG, 620 pixels wide, with the problem, a line per calculation, and the verdict.

    Args:
        work: the calculations, of which the last 12 are shown.
        verdict: "right" or "wrong"; empty before the answer.
    """
    story = textwrap.wrap(problem, 62)
    lines = [line if len(line) <= 60 else line[:59] + "…" for line in work[-12:]]
    rows = len(story) + max(3, len(lines)) + 3
    canvas = Canvas(_WIDTH, rows * _LINE + 30, (252, 250, 242))
    for row in range(1, rows + 1):
        canvas.box(0, row * _LINE + 14, _WIDTH, row * _LINE + 15, (196, 214, 232))
    canvas.box(44, 0, 46, rows * _LINE + 30, (232, 150, 150))
    y = _LINE
    for line in story:
        canvas.text(330, y, line, (35, 40, 52), size=17, width=550)
        y += _LINE
    y += _LINE // 2
    for line in lines:
        text = "".join(character if character.isprintable() else " " for character in line)
        canvas.text(330, y, text, (44, 92, 190), size=17, width=550)
        y += _LINE
    if verdict:
        colour = (40, 140, 84) if verdict == "right" else (200, 60, 60)
        canvas.text(330, rows * _LINE, verdict, colour, size=22, width=400, bold=True)
    return canvas.png()
