"""A grid: cells, their rows, columns and boxes, and the digits that clash there.

The size is always given: the length of a grid out of a forged snapshot could be any number.
"""

from __future__ import annotations

import functools
import math

Grid = bytes
"""Cells row by row, one byte each, 0 for an empty one."""


@functools.cache
def units(size: int) -> tuple[tuple[int, int, int], ...]:
    """Row, column and box of every cell, each from 0."""
    side = math.isqrt(size)
    return tuple((row, column, row // side * side + column // side) for row in range(size) for column in range(size))


@functools.cache
def peers(size: int) -> tuple[frozenset[int], ...]:
    """For every cell those that may not hold the same digit."""
    places = units(size)
    return tuple(
        frozenset(
            other
            for other, there in enumerate(places)
            if other != cell and any(a == b for a, b in zip(here, there, strict=True))
        )
        for cell, here in enumerate(places)
    )


def clashes(grid: Grid, size: int, cell: int, number: int) -> str:
    """The row, column and box that hold the number already, as a text; empty if none does."""
    side, here = math.isqrt(size), units(size)[cell]
    holding = [units(size)[peer] for peer in peers(size)[cell] if grid[peer] == number]
    labels = (f"row {here[0] + 1}", f"column {here[1] + 1}", f"box ({here[0] // side + 1},{here[1] // side + 1})")
    return ", ".join(labels[unit] for unit in range(3) if any(there[unit] == here[unit] for there in holding))


def candidates(grid: Grid, size: int, cell: int) -> list[int]:
    """The numbers that clash with nothing in a cell."""
    taken = {grid[peer] for peer in peers(size)[cell]}
    return [number for number in range(1, size + 1) if number not in taken]


def clashing(grid: Grid, size: int) -> set[int]:
    """Cells whose digit occurs again in their row, column or box."""
    return {
        cell for cell, near in enumerate(peers(size)) if grid[cell] and any(grid[peer] == grid[cell] for peer in near)
    }


def complete(grid: Grid, size: int) -> dict[str, bool]:
    """Of each row, column and box whether it holds every digit, by a name such as `row 1`."""
    digits: dict[str, set[int]] = {}
    for cell, (row, column, box) in enumerate(units(size)):
        for name in (f"row {row + 1}", f"column {column + 1}", f"box {box + 1}"):
            digits.setdefault(name, set()).add(grid[cell])
    return {name: held == set(range(1, size + 1)) for name, held in digits.items()}
