"""Picture of the board, from the sprites in sprites_48.png (in observations: sprites_16.png)."""

from __future__ import annotations

import functools
from collections.abc import Sequence

from PIL import Image

from starpod.env_server import encode_png, read_sprites

PICTURE_CELL = 48
"""Pixels of a cell's edge in a rendered picture."""

OBSERVATION_CELL = 16
"""Pixels of a cell's edge in an `rgb` observation."""


def draw(rows: Sequence[Sequence[str]], size: int) -> bytes:
    """Draw the board as a PNG.

    Args:
        rows: the cells, by their default symbols.
        size: PICTURE_CELL or OBSERVATION_CELL.
    """
    sprites = _sprites(size)
    picture = sprites["#"].resize((len(rows[0]) * size, len(rows) * size))
    for row, symbols in enumerate(rows):
        for column, symbol in enumerate(symbols):
            picture.paste(sprites[symbol], (column * size, row * size))
    return encode_png(picture)


@functools.cache
def _sprites(size: int) -> dict[str, Image.Image]:
    """Return sprites by symbol. They share a palette, because paletted images are encoded ten times as fast."""
    return read_sprites(__package__, f"sprites_{size}.png", "#_O√XPS")
