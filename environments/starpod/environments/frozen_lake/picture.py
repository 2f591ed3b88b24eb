"""Picture of the lake, from the sprites in sprites.png: a penguin on its way to a present."""

from __future__ import annotations

import functools

from PIL import Image

from starpod.env_server import encode_png, read_sprites

_SPRITES = ("ice 0", "ice 1", "ice 2", "ice 3", "hole", "goal", "start", "player", "in hole", "on goal")
TILE = 64
"""Width and height of a sprite in pixels."""


@functools.lru_cache(maxsize=256)
def draw(tiles: str, columns: int, position: int, pixels: int = TILE) -> bytes:
    """Draw the lake.

    Args:
        tiles: the characters S, F, H and G, row by row.
        position: index of the player's tile in `tiles`.
        pixels: width and height of a tile; reduced on large boards.

    Returns:
        A PNG.
    """
    rows = len(tiles) // columns
    size = min(pixels, max(16, 768 // max(rows, columns)))
    margin = size // 4
    sprites = _sprites(size)
    picture = Image.new("RGB", (columns * size + 2 * margin, rows * size + 2 * margin), (96, 138, 166))
    for cell, tile in enumerate(tiles):
        row, column = divmod(cell, columns)
        corner = (margin + column * size, margin + row * size)
        ground = {"H": "hole", "G": "goal"}.get(tile, f"ice {(row * 5 + column * 3) % 4}")
        picture.paste(sprites[ground], corner)
        sprite = None
        if cell == position:
            sprite = {"H": "in hole", "G": "on goal"}.get(tile, "player")
        elif tile == "S":
            sprite = "start"
        if sprite:
            picture.paste(sprites[sprite], corner, sprites[sprite])
    return encode_png(picture)


@functools.cache
def _sprites(size: int) -> dict[str, Image.Image]:
    sprites = read_sprites(__package__, "sprites.png", _SPRITES)
    if size == TILE:
        return sprites
    return {name: sprite.resize((size, size), Image.Resampling.LANCZOS) for name, sprite in sprites.items()}
