"""Images in token streams: runs of ids below 0, which name an image by its content and a place in it.

So whatever compares, caches, cuts or batches ids treats equal images as equal and others as different. The pixels
travel beside the ids, by key; a model that has eyes (models/vision.py) reads them where it embeds the ids.
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

from starpod.trainer.section import Section

MARK = "\ufffc"
"""Stands for an image in a text: Unicode's object replacement character."""

NOT_A_MARK = "\ufffd"
"""What a text shows where it holds that character itself."""

INDEX_BITS = 12
"""Of an id: the place in its image; above them 48 bits of the image's hash. An id is the complement of both."""

MOST_PIXELS = 1 << 24
"""Largest image that is read: 4096 by 4096."""

_BROKEN = (OSError, ValueError, SyntaxError, EOFError, struct.error, zlib.error)
"""What decoders of damaged files raise."""

Images = Mapping[int, bytes]
"""Images that ids name, by their keys: PNG files of what the model sees."""


class BadImage(Exception):
    """Not a picture that can be shown to a model. The message says why."""


def image_key(image: bytes) -> int:
    """48 bits of the hash of its bytes."""
    return int.from_bytes(hashlib.sha256(image).digest()[:6])


def image_ids(image: bytes, count: int) -> list[int]:
    """The ids of an image that is read as `count` tokens."""
    return _ids_of(image_key(image), count)


def _ids_of(key: int, count: int) -> list[int]:
    return [~(key << INDEX_BITS | index) for index in range(count)]


def images_within(ids: Sequence[int], count: int) -> list[tuple[int, int]]:
    """Where images of `count` tokens begin among ids, and their keys. Raises ValueError where one is not whole."""
    found: list[tuple[int, int]] = []
    end = 0
    for place, each in enumerate(ids):
        if each >= 0 or place < end:
            continue
        key, end = ~each >> INDEX_BITS, place + count
        if list(ids[place:end]) != _ids_of(key, count):
            raise ValueError(f"ids hold an image that is not {count} tokens long, at {place}")
        found.append((place, key))
    return found


def by_key(images: Iterable[bytes]) -> dict[int, bytes]:
    """Images by the keys that their ids hold; those that are empty are none."""
    return {image_key(image): image for image in images if image}


class ImageConfig(Section):
    """How a model built from scratch sees an image: cut into patches, a token each. It sees none with 0 rows."""

    rows: int = Field(default=0, ge=0, le=64, description="Patches from top to bottom; 0: the model sees no images.")
    columns: int = Field(default=0, ge=0, le=64, description="Patches from left to right.")
    pixels: int = Field(default=8, ge=1, le=64, description="Edge of a patch, to which images are scaled.")

    @model_validator(mode="after")
    def _both_or_none(self) -> ImageConfig:
        if (self.rows > 0) != (self.columns > 0):
            raise ValueError("model.tiny.image needs rows and columns: give both, or neither")
        return self

    @property
    def tokens(self) -> int:
        """Of an image."""
        return self.rows * self.columns

    @property
    def mark(self) -> str:
        """The token in whose place the ids of an image stand."""
        return MARK

    def write(self, text: str) -> str:
        """A prompt as the model knows it: with each mark in the layout that images have there."""
        return text

    def scaled(self, image: bytes) -> bytes:
        """A PNG of an image as the model sees it. Scaling it again changes nothing. Raises BadImage."""
        return _scaled(image, self.columns * self.pixels, self.rows * self.pixels)


class PretrainedView(ImageConfig):
    """How a pretrained model sees an image. token: its own mark. layout: that token and what stands around it."""

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
    """The RGB pixels of a PNG or JPEG file. Raises BadImage for others, and for one of too many pixels."""
    try:
        found = Image.open(io.BytesIO(image), formats=("PNG", "JPEG"))
        if found.width * found.height > MOST_PIXELS:
            raise BadImage(f"an image of {found.width} x {found.height} pixels is larger than {MOST_PIXELS} pixels")
        return found.convert("RGB")
    except (UnidentifiedImageError, Image.DecompressionBombError, *_BROKEN) as error:
        raise BadImage(f"{len(image)} bytes are no PNG or JPEG file: {error}") from error
