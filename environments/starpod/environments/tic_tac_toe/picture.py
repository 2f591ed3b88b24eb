"""Picture of the board, with a line through three marks in a row."""

from __future__ import annotations

from starpod.env_server import Canvas

from .board import winning_line

_CELL, _MARGIN = 96, 16
_INK, _PAPER, _PALE = (52, 58, 70), (246, 244, 238), (206, 202, 192)
_MARKS = {"X": (206, 60, 52), "O": (44, 100, 190)}


def draw(board: str) -> bytes:
    """Draw the board as a PNG of 320 x 320 pixels."""
    side = 3 * _CELL + 2 * _MARGIN
    canvas = Canvas(side, side, _PAPER)
    for number in (1, 2):
        offset = _MARGIN + number * _CELL
        canvas.line(offset, _MARGIN, offset, side - _MARGIN, fill=_INK, width=4)
        canvas.line(_MARGIN, offset, side - _MARGIN, offset, fill=_INK, width=4)
    for cell, mark in enumerate(board):
        x, y = _centre(cell)
        if mark == "X":
            for tilt in (-28, 28):
                canvas.line(x - 28, y - tilt, x + 28, y + tilt, fill=_MARKS["X"], width=10)
        elif mark == "O":
            canvas.ellipse(x - 33, y - 33, x + 33, y + 33, _MARKS["O"])
            canvas.ellipse(x - 23, y - 23, x + 23, y + 23, _PAPER)
        else:
            canvas.text(x, y, str(cell + 1), _PALE, size=26)
    if line := winning_line(board):
        canvas.line(*_centre(line[0]), *_centre(line[2]), fill=_INK, width=8)
    return canvas.png()


def _centre(cell: int) -> tuple[float, float]:
    return _MARGIN + (cell % 3 + 0.5) * _CELL, _MARGIN + (cell // 3 + 0.5) * _CELL
