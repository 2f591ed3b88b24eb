"""What the environments' pictures share: an image as PNG bytes, and the font."""

from __future__ import annotations

import functools
import io

from PIL import Image, ImageDraw, ImageFont


def png(image: Image.Image) -> bytes:
    """The image as the bytes of a PNG file. The same picture gives the same bytes."""
    buffer = io.BytesIO()
    image.save(buffer, format="PNG", compress_level=6)
    return buffer.getvalue()


@functools.cache
def font(size: int) -> ImageFont.FreeTypeFont | ImageFont.ImageFont:
    """Pillow's built-in font at `size` pixels: no file of the system's, so that pictures look alike everywhere."""
    return ImageFont.load_default(size)


def fit_text(
    draw: ImageDraw.ImageDraw,
    centre: tuple[float, float],
    text: str,
    width: float,
    size: int,
    fill: tuple[int, int, int],
) -> None:
    """Writes one line around a point, `size` pixels high or as much smaller as the width in pixels asks."""
    while size > 8 and font(size).getlength(text) > width:
        size -= 1
    draw.text(centre, text, fill=fill, font=font(size), anchor="mm")
