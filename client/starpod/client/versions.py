"""Semantic versions and version ranges such as `>=1.2.0,<2.0.0`."""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Iterable

_COMPARATORS: dict[str, Callable[[tuple[int, ...], tuple[int, ...]], bool]] = {
    "==": operator.eq,
    "!=": operator.ne,
    ">=": operator.ge,
    "<=": operator.le,
    ">": operator.gt,
    "<": operator.lt,
    "": operator.eq,
}
_TERM = re.compile(r"\s*(==|!=|>=|<=|>|<|)\s*(\d+(?:\.\d+){0,2})\s*")


def parse_version(version: str) -> tuple[int, ...]:
    """Return (major, minor, patch); missing parts are 0. Raises ValueError if the text is not a version."""
    if not re.fullmatch(r"\d+(\.\d+){0,2}", version):
        raise ValueError(f"{version!r} is not a version: write MAJOR.MINOR.PATCH.")
    numbers = [int(part) for part in version.split(".")]
    return tuple(numbers + [0] * (3 - len(numbers)))


def latest_name(name: str, environment_ids: Iterable[str]) -> str:
    """Return the id with the highest N among `name-vN`, or the name itself if there is no such id."""
    ids = {int(number): id_ for id_ in environment_ids if (number := id_.removeprefix(f"{name}-v")).isdecimal()}
    return ids[max(ids)] if ids else name


def satisfies(version: str, version_range: str) -> bool:
    """Return whether a version is in a range such as ">=1.2.0,<2.0.0"; every version is in the empty range.

    Raises:
        ValueError: the version or the range is malformed.
    """
    if not version_range.strip():
        return True
    numbers = parse_version(version)
    fits = True
    for term in version_range.split(","):
        match = _TERM.fullmatch(term)
        if match is None:
            raise ValueError(f"{version_range!r} is not a version range: write comparators such as >=1.2.0,<2.0.0.")
        fits &= _COMPARATORS[match[1]](numbers, parse_version(match[2]))
    return fits
