"""Images in token streams: ids that name them by content, and what a model sees of them."""

import io
import struct
import zlib

import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from pydantic import ValidationError

from starpod.trainer.data.images import BadImage, ImageConfig, by_key, image_ids, image_key, images_within, read_image

VIEW = ImageConfig(rows=2, columns=3, pixels=4)


def png(colour: tuple[int, int, int], size: tuple[int, int] = (30, 20), form: str = "PNG") -> bytes:
    buffer = io.BytesIO()
    Image.new("RGB", size, colour).save(buffer, format=form)
    return buffer.getvalue()


@given(st.binary(min_size=1), st.binary(min_size=1), st.integers(1, 4096))
def test_ids_are_below_0_and_equal_for_equal_images_alone(one: bytes, other: bytes, count: int) -> None:
    ids = image_ids(one, count)
    assert len({*ids}) == count
    assert all(-(1 << 62) < each < 0 for each in ids)
    assert not {*ids} & {*image_ids(other, count)} or one == other
    assert by_key([one, b"", one]) == {image_key(one): one}


def test_images_are_found_among_ids_and_only_whole_ones() -> None:
    ids = [7, *image_ids(b"one", 3), *image_ids(b"one", 3), 8, *image_ids(b"other", 3)]
    one, other = image_key(b"one"), image_key(b"other")
    assert images_within(ids, 3) == [(1, one), (4, one), (8, other)]
    for broken in (ids[:-1], ids[2:], ids[:2] + ids[3:], [*ids[:3], 9, *ids[3:]], [*ids, ids[-1]]):
        with pytest.raises(ValueError, match="not 3 tokens long"):
            images_within(broken, 3)


@pytest.mark.parametrize("form", ["PNG", "JPEG"])
def test_an_image_is_scaled_to_its_patches_and_scaling_it_again_changes_nothing(form: str) -> None:
    seen = VIEW.scaled(png((200, 10, 90), form=form))
    assert read_image(seen).size == (12, 8)
    assert all(abs(a - b) < 3 for a, b in zip(read_image(seen).getpixel((5, 5)), (200, 10, 90), strict=True))  # type: ignore[arg-type]
    assert VIEW.scaled(seen) == seen


ENORMOUS = bytearray(png((1, 2, 3)))
"""A file that claims to hold 60,000 x 60,000 pixels."""
ENORMOUS[16:24] = struct.pack(">II", 60_000, 60_000)
ENORMOUS[29:33] = struct.pack(">I", zlib.crc32(ENORMOUS[12:29]))


@pytest.mark.parametrize("data", [b"", b"no image", png((0, 0, 0))[:40], png((1, 2, 3), (4097, 4096)), bytes(ENORMOUS)])
def test_what_is_no_image_or_too_large_is_refused(data: bytes) -> None:
    with pytest.raises(BadImage):
        VIEW.scaled(data)


@given(st.data())
def test_a_damaged_file_is_refused_or_read(data: st.DataObject) -> None:
    whole = bytearray(png((200, 10, 90), form=data.draw(st.sampled_from(["PNG", "JPEG"]))))
    for place in data.draw(st.lists(st.integers(0, len(whole) - 1), max_size=6)):
        whole[place] = data.draw(st.integers(0, 255))
    try:
        seen = VIEW.scaled(bytes(whole[: data.draw(st.integers(0, len(whole)))]))
    except BadImage:
        return
    assert read_image(seen).size == (12, 8)


def test_half_a_grid_is_refused() -> None:
    with pytest.raises(ValidationError, match="give both, or neither"):
        ImageConfig(rows=3)
