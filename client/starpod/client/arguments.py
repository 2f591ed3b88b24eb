"""Checks of callers' arguments, with errors that say what to write instead."""

from __future__ import annotations

import operator
from collections.abc import Mapping
from typing import Any, SupportsIndex

MAX_SEED = 2**64 - 1
MAX_COUNT = 2**32 - 1


def whole_number(name: str, value: SupportsIndex, minimum: int, maximum: int, hint: str) -> int:
    """Return the value as an int.

    Args:
        hint: end of the messages: what is valid, with an example.

    Raises:
        TypeError: the value is not an integer.
        ValueError: the value is not between `minimum` and `maximum`, inclusive.
    """
    try:
        number = operator.index(value)
    except TypeError:
        raise TypeError(f"{name}={value!r}: {hint}") from None
    if not minimum <= number <= maximum:
        raise ValueError(f"{name}={value!r}: {hint}")
    return number


def seed_number(name: str, seed: SupportsIndex | None) -> int | None:
    """Return the seed as an int from 0 to 2**64 - 1, or None if the server should draw it."""
    if seed is None or (type(seed) is int and 0 <= seed <= MAX_SEED):
        return seed
    return whole_number(name, seed, 0, MAX_SEED, f"a seed is a whole number from 0 to 2**64 - 1, e.g. {name}=1")


def group_size(name: str, count: SupportsIndex) -> int:
    """Check the number of sessions that a call makes, and return it as an int of at least 1."""
    return whole_number(name, count, 1, MAX_COUNT, f"write how many sessions to make, 1 or more, e.g. {name}=16")


def expect_exact(value: Any) -> None:
    """Raise ValueError for an integer that a double cannot represent, because numbers are sent as doubles."""
    if isinstance(value, int) and abs(value) >= 2**53:
        raise ValueError(
            f"{value} would be rounded, because options are sent as doubles; write it as text: {str(value)!r}"
        )
    for item in value.values() if isinstance(value, Mapping) else value if isinstance(value, list | tuple) else ():
        expect_exact(item)
