"""Semantic versions and the comparators that choose among them."""

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
    """(major, minor, patch); parts that are not written are 0. Raises ValueError."""
    if not re.fullmatch(r"\d+(\.\d+){0,2}", version):
        raise ValueError(f"{version!r} is not a version: write MAJOR.MINOR.PATCH.")
    numbers = [int(part) for part in version.split(".")]
    return tuple(numbers + [0] * (3 - len(numbers)))


def latest_name(name: str, environment_ids: Iterable[str]) -> str:
    """The id that a name without its `-vN` stands for: the highest of the family. The name itself if there is none."""
    ids = {int(number): each for each in environment_ids if (number := each.removeprefix(f"{name}-v")).isdecimal()}
    return ids[max(ids)] if ids else name


def satisfies(version: str, wanted: str) -> bool:
    """Whether the version fits comparators such as ">=1.2.0,<2.0.0". Empty: every version does. Raises ValueError."""
    if not wanted.strip():
        return True
    present = parse_version(version)
    fits = True
    for term in wanted.split(","):
        match = _TERM.fullmatch(term)
        if match is None:
            raise ValueError(f"{wanted!r} is not a version range: write comparators such as >=1.2.0,<2.0.0.")
        fits &= _COMPARATORS[match[1]](present, parse_version(match[2]))
    return fits
