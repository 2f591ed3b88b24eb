"""Loops over arrays, compiled on first use and kept on disk where there is a place for it."""

from __future__ import annotations

from collections.abc import Callable
from typing import ParamSpec, TypeVar

import numba

P = ParamSpec("P")
R = TypeVar("R")


def compiled(function: Callable[P, R]) -> Callable[P, R]:
    """The function as machine code that does not hold the GIL. It is compiled when it is first called with some types.

    Kept in __pycache__, or in the user's cache folder where that is read-only; with neither, every process compiles.
    """
    made: Callable[P, R]
    try:
        made = numba.njit(nogil=True, cache=True)(function)
    except RuntimeError:  # there is no folder to keep it in
        made = numba.njit(nogil=True)(function)
    return made
