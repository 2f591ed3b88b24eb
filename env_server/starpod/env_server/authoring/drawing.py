"""Drawing for `render("png")`: a canvas with anti-aliasing, sprites from a file, and images as PNG bytes.

The same drawing gives the same bytes on every machine, because the font is Pillow's own.
"""

from __future__ import annotations

import functools
import io
from collections.abc import Sequence
from importlib import resources

from PIL import Image, ImageDraw, ImageFont

Colour = str | tuple[int, int, int]
"""`#rrggbb`, or red, green and blue from 0 to 255."""

_SMALLEST_TEXT = 8


class Canvas:
    """A picture of `width` x `height` pixels to draw on. All coordinates are pixels of the finished picture.

    For smooth edges, it is drawn `smoothing` times larger and reduced at the end. Straight lines need no smoothing (1).
    """

    def __init__(self, width: int, height: int, background: Colour, *, smoothing: int = 3) -> None:
        self.width = width
        self.height = height
        self._scale = smoothing
        self._image = Image.new("RGB", (width * smoothing, height * smoothing), background)
        self._draw = ImageDraw.Draw(self._image)

    def box(self, left: float, top: float, right: float, bottom: float, fill: Colour, *, radius: float = 0) -> None:
        """Fill a rectangle.

        Args:
            left: x of the left edge, in pixels of the finished picture, as all lengths. 0 is the left border.
            top: y of the upper edge; 0 is the upper border.
            radius: Radius of the corners; 0 for sharp ones.
        """
        self._draw.rounded_rectangle(self._scaled(left, top, right, bottom), radius * self._scale, fill)

    def ellipse(self, left: float, top: float, right: float, bottom: float, fill: Colour) -> None:
        """Fill the ellipse that touches the four sides of a rectangle, which has the units of `box`."""
        self._draw.ellipse(self._scaled(left, top, right, bottom), fill)

    def polygon(self, *points: float, fill: Colour) -> None:
        """Fill a polygon whose corners are given as x, y, x, y, ..."""
        self._draw.polygon(self._scaled(*points), fill)

    def line(self, *points: float, fill: Colour, width: int) -> None:
        """Draw a line through points, given as x, y, x, y, ..."""
        self._draw.line(self._scaled(*points), fill, width * self._scale)

    def text(
        self,
        x: float,
        y: float,
        text: str,
        fill: Colour,
        *,
        size: int,
        width: float | None = None,
        bold: bool = False,
        left: bool = False,
    ) -> None:
        """Write one line centred on a point, or to its right if `left`.

        Args:
            y: vertical position of the middle.
            size: font size in pixels. It is reduced until the line fits `width`.
            width: maximum width in pixels; None means no maximum.
            left: whether the text begins at `x`.
        """
        size *= self._scale
        while width is not None and size > _SMALLEST_TEXT and _font(size).getlength(text) > width * self._scale:
            size -= 1
        centre = (x * self._scale, y * self._scale)
        self._draw.text(
            centre, text, fill, _font(size), "lm" if left else "mm", stroke_width=self._scale if bold else 0
        )

    def png(self) -> bytes:
        """Return the finished picture as the bytes of a PNG file."""
        return encode_png(self._image.reduce(self._scale))

    def _scaled(self, *numbers: float) -> list[float]:
        return [number * self._scale for number in numbers]


@functools.cache
def _font(size: int) -> ImageFont.FreeTypeFont | ImageFont.ImageFont:
    return ImageFont.load_default(size)


def read_sprites(package: str, file: str, names: Sequence[str]) -> dict[str, Image.Image]:
    """Return the square pictures of a PNG file by name.

    Args:
        package: Package that contains the file, such as "starpod.environments.sokoban".
        file: Name of a PNG file with the pictures side by side; its height is the size of each.
        names: Names of the pictures, from left to right.
    """
    strip = Image.open(io.BytesIO(resources.files(package).joinpath(file).read_bytes()))
    size = strip.height
    return {name: strip.crop((index * size, 0, (index + 1) * size, size)) for index, name in enumerate(names)}


def encode_png(image: Image.Image) -> bytes:
    """Return the image as the bytes of a PNG file. Equal images give equal bytes."""
    buffer = io.BytesIO()
    image.save(buffer, format="PNG", compress_level=6)
    return buffer.getvalue()
