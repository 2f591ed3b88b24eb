"""Picture of the board, with coloured tiles."""

from __future__ import annotations

from starpod.env_server import Canvas

from .board import Board

_COLOURS = (
    *((238, 228, 218), (237, 224, 200), (242, 177, 121), (245, 149, 99), (246, 124, 95), (246, 94, 59)),
    *((237, 207, 114), (237, 204, 97), (237, 200, 80), (237, 197, 63), (237, 194, 46)),
)
"""Colours of the tiles 2, 4, 8, ..., 2048. Larger tiles are dark."""

_CELL, _GAP, _HEAD = 92, 10, 62


def draw(board: Board, size: int, points: int, target: int) -> bytes:
    """Draw points, target (the tile that wins) and tiles as a PNG. A tile is 92 pixels wide."""
    side = size * (_CELL + _GAP) + _GAP
    canvas = Canvas(side + 24, side + _HEAD + 12, (250, 248, 239))
    middle = (side + 24) / 2
    for x, label, number in ((middle - 50, "SCORE", points), (middle + 50, "TARGET", target)):
        canvas.box(x - 45, 10, x + 45, _HEAD - 6, (187, 173, 160), radius=6)
        canvas.text(x, 21, label, (238, 228, 218), size=11, width=80)
        canvas.text(x, 40, str(number), (255, 255, 255), size=20, width=80)
    canvas.box(12, _HEAD, 12 + side, _HEAD + side, (187, 173, 160), radius=8)
    for cell, tile in enumerate(board):
        row, column = divmod(cell, size)
        left, top = 12 + _GAP + column * (_CELL + _GAP), _HEAD + _GAP + row * (_CELL + _GAP)
        rank = tile.bit_length() - 2
        colour = (205, 193, 180) if not tile else _COLOURS[rank] if rank < len(_COLOURS) else (60, 58, 50)
        canvas.box(left, top, left + _CELL, top + _CELL, colour, radius=6)
        if tile:
            ink = (119, 110, 101) if tile < 8 else (249, 246, 242)
            canvas.text(left + _CELL / 2, top + _CELL / 2, str(tile), ink, size=38, width=_CELL - 16, bold=True)
    return canvas.png()
