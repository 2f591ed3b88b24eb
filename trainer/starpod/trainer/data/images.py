"""Images in token streams: runs of ids below 0, which encode an image's hash and a position within it.

Code that compares, caches, cuts or batches ids therefore treats equal images as equal and different ones as different.
The pixels travel separately, by key. A vision model (models/vision.py) reads them when it embeds the ids.
"""

from __future__ import annotations

import functools
import hashlib
import io
import struct
import zlib
from collections.abc import Iterable, Mapping, Sequence

from PIL import Image, UnidentifiedImageError
from pydantic import Field, model_validator

from starpod.trainer.configuration.section import Section

MARK = "\ufffc"
"""Placeholder for an image in a text: Unicode's object replacement character."""

NOT_A_MARK = "\ufffd"
"""Replacement for MARK in the texts of environments."""

INDEX_BITS = 12
"""Number of low bits of an id that hold the position in its image. The next 48 bits are from the image's hash. An id is
the bitwise complement of these 60 bits."""

MOST_PIXELS = 1 << 24
"""Maximum number of pixels of an image: 4096 by 4096."""

_BROKEN = (OSError, ValueError, SyntaxError, EOFError, struct.error, zlib.error)
"""Exceptions that decoders raise for damaged files."""

Images = Mapping[int, bytes]
"""Mapping from an image's key, which its token ids contain, to a PNG file of what the model sees."""


class BadImage(Exception):
    """An image cannot be shown to a model. The message says why."""


def image_key(image: bytes) -> int:
    """Return 48 bits of the hash of the image's bytes."""
    return int.from_bytes(hashlib.sha256(image).digest()[:6])


def image_ids(image: bytes, count: int) -> list[int]:
    """Return the ids of an image that is read as `count` tokens."""
    return _ids_of(image_key(image), count)


def _ids_of(key: int, count: int) -> list[int]:
    return [~(key << INDEX_BITS | index) for index in range(count)]


def images_within(ids: Sequence[int], count: int) -> list[tuple[int, int]]:
    """Return the start and key of each image of `count` tokens among ids. Raises ValueError for an incomplete image."""
    images: list[tuple[int, int]] = []
    end = 0
    for index, id_ in enumerate(ids):
        if id_ >= 0 or index < end:
            continue
        key, end = ~id_ >> INDEX_BITS, index + count
        if list(ids[index:end]) != _ids_of(key, count):
            raise ValueError(f"ids hold an image that is not {count} tokens long, at {index}")
        images.append((index, key))
    return images


def by_key(images: Iterable[bytes]) -> dict[int, bytes]:
    """Return images by their keys, without empty images."""
    return {image_key(image): image for image in images if image}


class ImageConfig(Section):
    """Image input of a model built from scratch. Each patch is one token. With 0 rows, the model sees no images."""

    rows: int = Field(default=0, ge=0, le=64, description="Rows of patches; 0: no image input.")
    columns: int = Field(default=0, ge=0, le=64, description="Columns of patches.")
    pixels: int = Field(default=8, ge=1, le=64, description="Edge of a patch in pixels; images are scaled.")

    @model_validator(mode="after")
    def _both_or_none(self) -> ImageConfig:
        if (self.rows > 0) != (self.columns > 0):
            raise ValueError("model.tiny.image needs rows and columns: give both, or neither")
        return self

    @property
    def tokens(self) -> int:
        """Number of tokens of an image."""
        return self.rows * self.columns

    @property
    def mark(self) -> str:
        """The token that an image's ids replace."""
        return MARK

    def write(self, text: str) -> str:
        """Return a prompt with each mark replaced by the model's layout of an image."""
        return text

    def scaled(self, image: bytes) -> bytes:
        """Return a PNG of an image at the model's resolution. Scaling it again changes nothing. Raises BadImage."""
        return _scaled(image, self.columns * self.pixels, self.rows * self.pixels)


class PretrainedView(ImageConfig):
    """Image input of a pretrained model.

    token: the model's own image token. layout: that token with the tokens around it.
    """

    token: str
    layout: str

    @property
    def mark(self) -> str:
        return self.token

    def write(self, text: str) -> str:
        return text.replace(MARK, self.token).replace(self.token, self.layout)


@functools.lru_cache(maxsize=1024)
def _scaled(image: bytes, width: int, height: int) -> bytes:
    buffer = io.BytesIO()
    read_image(image).resize((width, height), Image.Resampling.BOX).save(buffer, format="PNG")
    return buffer.getvalue()


def read_image(image: bytes) -> Image.Image:
    """Return the RGB pixels of a PNG or JPEG file. Raises BadImage for other files and for too many pixels."""
    try:
        pixels = Image.open(io.BytesIO(image), formats=("PNG", "JPEG"))
        if pixels.width * pixels.height > MOST_PIXELS:
            raise BadImage(f"an image of {pixels.width} x {pixels.height} pixels is larger than {MOST_PIXELS} pixels")
        return pixels.convert("RGB")
    except (UnidentifiedImageError, Image.DecompressionBombError, *_BROKEN) as error:
        raise BadImage(f"{len(image)} bytes are not a PNG or JPEG file: {error}") from error
