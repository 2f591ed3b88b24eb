"""Conversion of Gymnasium's values to text and JSON: elements of spaces, coloured text, info."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from gymnasium import Space
from gymnasium.spaces import Box, Dict, Discrete, MultiBinary, MultiDiscrete, Text, Tuple
from PIL import Image as Pillow

from starpod.env_server.authoring.drawing import encode_png
from starpod.v1.values import Image

MOST_NUMBERS = 256
"""Maximum number of elements of a Box that is written as numbers."""
_SMALLEST_PICTURE = 16
_COLOURS = ("gray", "red", "green", "yellow", "blue", "magenta", "cyan", "white")
_ESCAPE = re.compile(r"\x1b\[([0-9;]*)m")

Reader = Callable[[Any], Any]
"""Function that converts a JSON value to an element of a space. Raises ValueError."""
Writer = Callable[[Any, list[Image]], Any]
"""Function that converts an element to a JSON value. A picture is appended to the list and replaced by its number
there, counted from 1."""


class UnsupportedSpace(Exception):
    """A space that cannot be converted. The message says which and why."""


def is_picture(space: Space[Any]) -> bool:
    """Return whether a space is a uint8 Box of height x width x 3, and not just a small board of three layers."""
    return (
        isinstance(space, Box)
        and space.dtype == np.uint8
        and len(space.shape) == 3
        and space.shape[2] == 3
        and min(space.shape[:2]) >= _SMALLEST_PICTURE
    )


def reader(space: Space[Any], where: str = "the action space") -> Reader:
    """Return a function that reads actions of a space. Raises UnsupportedSpace."""
    match space:
        case Discrete():
            return lambda value: _element(space, value) if type(value) is int else _refuse(value)
        case MultiDiscrete() | MultiBinary():
            return lambda value: _element(space, _whole(value))
        case Text():
            return lambda value: _element(space, value) if isinstance(value, str) else _refuse(value)
        case Tuple():
            readers = [reader(subspace, f"{where}[{index}]") for index, subspace in enumerate(space.spaces)]

            def read_list(value: Any) -> Any:
                if not isinstance(value, list) or len(value) != len(readers):
                    _refuse(value)
                return tuple(read(element) for read, element in zip(readers, value, strict=True))

            return read_list
        case Dict():
            named_readers = {name: reader(subspace, f"{where}[{name!r}]") for name, subspace in space.spaces.items()}

            def read_object(value: Any) -> Any:
                if not isinstance(value, dict) or value.keys() != named_readers.keys():
                    _refuse(value)
                return {name: read(value[name]) for name, read in named_readers.items()}

            return read_object
    raise UnsupportedSpace(
        f"{where} is {space}; actions are Discrete, MultiDiscrete, MultiBinary, Text, Tuple or Dict of them"
    )


def writer(space: Space[Any], where: str = "the observation space") -> Writer:
    """Return a function that writes elements of a space. Raises UnsupportedSpace."""
    match space:
        case Discrete():
            return lambda value, _: int(value)
        case MultiDiscrete() | MultiBinary():
            return lambda value, _: np.asarray(value).tolist()
        case _ if _of_text(space):
            return lambda value, _: str(value)
        case Box() if is_picture(space):
            return _draw
        case Box():
            if math.prod(space.shape) > MOST_NUMBERS:
                raise UnsupportedSpace(
                    f"{where} is a Box of shape {space.shape} and {space.dtype}; up to {MOST_NUMBERS} numbers are "
                    "written as text, and height x width x 3 of uint8 as a picture"
                )
            return lambda value, _: _numbers(np.asarray(value))
        case Tuple():
            writers = [writer(subspace, f"{where}[{index}]") for index, subspace in enumerate(space.spaces)]
            return lambda value, drawn: [write(element, drawn) for write, element in zip(writers, value, strict=True)]
        case Dict():
            named_writers = {name: writer(subspace, f"{where}[{name!r}]") for name, subspace in space.spaces.items()}
            return lambda value, drawn: {name: write(value[name], drawn) for name, write in named_writers.items()}
    raise UnsupportedSpace(f"{where} is {space}; observations are numbers, Text, Box, Tuple or Dict of them")


def words(space: Space[Any]) -> str:
    """Describe the elements of a space, for people and prompts."""
    match space:
        case Discrete():
            return f"a whole number from {space.start} to {space.start + space.n - 1}"
        case MultiDiscrete() if space.nvec.ndim == 1:
            ranges = zip(space.start, space.start + space.nvec - 1, strict=True)
            return "a JSON list of whole numbers: " + ", ".join(f"{low} to {high}" for low, high in ranges)
        case Box() if is_picture(space):
            return f"a picture of {space.shape[0]} x {space.shape[1]} pixels"
        case MultiBinary() if len(space.shape) == 1:
            return f"a JSON list of {space.shape[0]} zeros and ones"
        case Text():
            return f"text of {space.min_length} to {space.max_length} characters"
        case Tuple():
            return "a JSON list of " + ", ".join(f"({n}) {words(member)}" for n, member in enumerate(space.spaces, 1))
        case Dict():
            members = ", ".join(f"{json.dumps(name)}: {words(member)}" for name, member in space.spaces.items())
            return f"a JSON object {{{members}}}"
    if _of_text(space):
        return "text"
    shape = " x ".join(map(str, space.shape or ()))
    return f"nested JSON lists of {shape} numbers" if len(space.shape or ()) > 1 else f"a JSON list of {shape} numbers"


def _of_text(space: Space[Any]) -> bool:
    """Return whether a space holds text: Gymnasium's Text, or another package's space without a numeric type."""
    return isinstance(space, Text) or (space.dtype is not None and space.dtype.kind == "U")


def _element(space: Space[Any], value: Any) -> Any:
    """Return the value in the type of the space's own samples."""
    try:
        element = value if isinstance(space, Text) else np.asarray(value, dtype=space.dtype)[()]
    except (OverflowError, TypeError, ValueError) as error:
        raise ValueError(str(error)) from error
    return element if space.contains(element) else _refuse(value)


def _whole(value: Any) -> Any:
    """Check nested lists of whole numbers. A float or bool in them would silently be converted to an integer."""
    if isinstance(value, list):
        return [_whole(item) for item in value]
    return value if type(value) is int else _refuse(value)


def _refuse(value: Any) -> Any:
    raise ValueError(f"{str(value)[:80]!r} is not an element of the space")


def _numbers(array: np.ndarray[Any, Any]) -> Any:
    """Return nested lists, with floats as short as their type permits, and infinities and NaN as text."""
    if array.dtype.kind != "f":
        return array.tolist()
    if array.ndim:
        return [_numbers(item) for item in array]
    number = float(str(array[()]))
    return number if math.isfinite(number) else str(number)


def _draw(array: Any, images: list[Image]) -> Any:
    images.append(Image(encode_png(Pillow.fromarray(np.ascontiguousarray(array)))))
    return len(images)


def plain_colours(text: str) -> str:
    """Return terminal colours as tags, such as `<red>S</red>`, because an environment's colours carry information."""
    tag = ""

    def replace(match: re.Match[str]) -> str:
        nonlocal tag
        code = next((int(c) % 10 for c in match[1].split(";") if c.isdigit() and 30 <= int(c) <= 47), None)
        before, tag = tag, "" if code is None or code > 7 else _COLOURS[code]
        return (f"</{before}>" if before else "") + (f"<{tag}>" if tag else "")

    return _ESCAPE.sub(replace, text).strip("\n")


def plain_info(info: Mapping[str, Any]) -> dict[str, Any]:
    """Return the entries of an info dictionary that can be sent."""
    return {str(name): entry for name, value in info.items() if (entry := _plain(value)) is not None}


def _plain(value: Any) -> Any:
    match value:
        case bool() | str() | None:
            return value
        case int() | float():
            return value if math.isfinite(value) else str(value)
        case np.generic() | np.ndarray():
            return _plain(value.tolist()) if value.dtype.kind in "biuf" else None
        case Mapping():
            return plain_info(value)
        case list() | tuple():
            return [_plain(item) for item in value]
    return None
