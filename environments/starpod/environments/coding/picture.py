"""Picture of the task, the program and the results of its tests."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence

from starpod.env_server import Canvas

_GREY, _LIGHT = (150, 156, 170), (222, 226, 236)


def draw(text: str, program: str, passed: Sequence[bool], message: str) -> bytes:
    """Draw a PNG that is 720 pixels wide.

    Args:
        program: the latest program, of which 16 lines are shown; empty before the first attempt.
        passed: results of the latest attempt's tests.
        message: feedback on the latest attempt, of which the first line is shown.
    """
    story = textwrap.wrap(text, 84)
    code = [line[:84] for line in program.splitlines()][:16] or ["# nothing written yet"]
    height = 90 + 20 * len(story) + 19 * len(code) + 60
    canvas = Canvas(720, height, (36, 40, 52))
    y = 26
    for line in story:
        canvas.text(360, y, line, _LIGHT, size=15, width=690)
        y += 20
    canvas.box(20, y, 700, y + 19 * len(code) + 20, (24, 26, 34), radius=8)
    y += 20
    for line in code:
        line_text = "".join(character if character.isprintable() else " " for character in line)
        indent = len(line) - len(line.lstrip())
        canvas.text(40 + 8 * indent, y, line_text.strip(), (166, 214, 150), size=14, width=650 - 8 * indent, left=True)
        y += 19
    y += 24
    for index, right in enumerate(passed):
        x = 40 + 26 * (index % 24)
        canvas.ellipse(x, y, x + 18, y + 18, (84, 180, 110) if right else (214, 84, 80))
    canvas.text(360, y + 36, message.splitlines()[0][:90] if message else "", _GREY, size=14, width=680)
    return canvas.png()
