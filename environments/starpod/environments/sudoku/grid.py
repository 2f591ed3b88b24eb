"""Grids: rows, columns and boxes of cells, and clashes of digits.

All functions take the size as an argument, because the grid of a forged snapshot could have any length.
"""

from __future__ import annotations

import functools
import math

Grid = bytes
"""Cells row by row, one byte each; 0 is an empty cell."""


@functools.cache
def units(size: int) -> tuple[tuple[int, int, int], ...]:
    """Return the indices of every cell's row, column and box, each counted from 0."""
    side = math.isqrt(size)
    return tuple((row, column, row // side * side + column // side) for row in range(size) for column in range(size))


@functools.cache
def peers(size: int) -> tuple[frozenset[int], ...]:
    """Return for every cell the cells that must not contain the same digit."""
    places = units(size)
    return tuple(
        frozenset(
            peer
            for peer, peer_units in enumerate(places)
            if peer != cell and any(a == b for a, b in zip(cell_units, peer_units, strict=True))
        )
        for cell, cell_units in enumerate(places)
    )


def clashes(grid: Grid, size: int, cell: int, number: int) -> str:
    """Return which of the cell's row, column and box already contain the number, such as "row 1, box (1,1)".

    Args:
        cell: index of the cell. Its own digit does not count.
        number: the digit to place, from 1 to `size`.
    """
    side, cell_units = math.isqrt(size), units(size)[cell]
    equal = [units(size)[peer] for peer in peers(size)[cell] if grid[peer] == number]
    labels = (
        f"row {cell_units[0] + 1}",
        f"column {cell_units[1] + 1}",
        f"box ({cell_units[0] // side + 1},{cell_units[1] // side + 1})",
    )
    return ", ".join(labels[unit] for unit in range(3) if any(other[unit] == cell_units[unit] for other in equal))


def candidates(grid: Grid, size: int, cell: int) -> list[int]:
    """Return the numbers that can be placed in a cell without a clash.

    Args:
        cell: index of the cell. Its own digit does not count.
    """
    digits = {grid[peer] for peer in peers(size)[cell]}
    return [number for number in range(1, size + 1) if number not in digits]


def clashing(grid: Grid, size: int) -> set[int]:
    """Return the cells whose digit occurs again in their row, column or box."""
    return {
        cell for cell, others in enumerate(peers(size)) if grid[cell] and any(grid[o] == grid[cell] for o in others)
    }


def completed(puzzle: Grid, grid: Grid, size: int) -> dict[str, bool]:
    """Return whether each row, column and box that the puzzle leaves open has every digit, by names such as `row 1`."""
    initial = _complete(puzzle, size)
    return {name: is_filled for name, is_filled in _complete(grid, size).items() if not initial[name]}


def _complete(grid: Grid, size: int) -> dict[str, bool]:
    digits: dict[str, set[int]] = {}
    for cell, (row, column, box) in enumerate(units(size)):
        for name in (f"row {row + 1}", f"column {column + 1}", f"box {box + 1}"):
            digits.setdefault(name, set()).add(grid[cell])
    return {name: numbers == set(range(1, size + 1)) for name, numbers in digits.items()}


def unblocked(puzzle: Grid, grid: Grid, size: int, cell: int, number: int) -> list[int]:
    """Return the cells whose digit clashed only with `number`, which was just removed from `cell`.

    Args:
        puzzle: the given digits. Their cells are not returned.
        number: the removed digit; 0 means none.
    """
    if not number:
        return []
    rivals = [peer for peer in sorted(peers(size)[cell]) if grid[peer] == number]
    return [peer for peer in rivals if not puzzle[peer] and not clashes(grid, size, peer, number)]
