"""Picture of the cube as a net of its six faces."""

from __future__ import annotations

from starpod.env_server import Canvas

from .cube import FACES, Cube

_PAINT = ((245, 245, 240), (243, 138, 30), (40, 160, 84), (206, 44, 52), (44, 92, 190), (246, 214, 60))
_PLACES = {"U": (1, 0), "L": (0, 1), "F": (1, 1), "R": (2, 1), "B": (3, 1), "D": (1, 2)}
"""Column and row of each face on the net."""

_STICKER, _MARGIN = 44, 16
_FACE = 2 * _STICKER + 14


def draw(cube: Cube, done: str) -> bytes:
    """Draw the cube as a PNG of 448 x 350 pixels, with the text `done` in a corner."""
    canvas = Canvas(4 * _FACE + 2 * _MARGIN + 8, 3 * _FACE + 2 * _MARGIN + 12, (58, 66, 80))
    for number, face in enumerate(FACES):
        column, row = _PLACES[face]
        left, top = _MARGIN + column * _FACE, _MARGIN + row * _FACE
        canvas.box(left, top, left + _FACE - 6, top + _FACE - 6, (20, 22, 28), radius=10)
        for index in range(4):
            x, y = left + 5 + index % 2 * _STICKER, top + 5 + index // 2 * _STICKER
            canvas.box(x, y, x + _STICKER - 2, y + _STICKER - 2, _PAINT[cube[4 * number + index]], radius=6)
        x, y = left + _FACE // 2 - 3, top + _FACE // 2 - 3
        canvas.ellipse(x - 13, y - 13, x + 13, y + 13, (20, 22, 28))
        canvas.text(x, y, face, (236, 238, 242), size=16)
    canvas.text(_MARGIN + 3 * _FACE, _MARGIN + 2.6 * _FACE, done, (220, 226, 236), size=16, width=2 * _FACE - 20)
    return canvas.png()
