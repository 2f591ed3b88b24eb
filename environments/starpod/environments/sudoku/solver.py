"""Search for the solutions of a grid."""

from __future__ import annotations

import functools
import math
import random
from collections.abc import Iterator, Sequence

from .grid import Grid, units

SOLVE_NODES = 10_000
"""Maximum number of steps of a search for the solution of an explicit puzzle, which take some tenths of a second."""
PATIENCE = 8
"""Number of steps per row after which a search also looks for digits with one possible cell, which is slow."""


class SearchLimit(Exception):
    """A search exceeded its maximum number of steps."""


def solutions(grid: Sequence[int], size: int, nodes: int, rng: random.Random | None = None) -> Iterator[Grid]:
    """Yield every completion of a grid, by backtracking on digits with one possible cell and cells with few candidates.

    Args:
        grid: the cells.
        size: number of cells in a row.
        nodes: maximum number of placements.
        rng: shuffles the order in which digits are tried; None tries them in ascending order.

    Raises:
        SearchLimit: the search exceeded `nodes`.
    """
    places = units(size)
    all_digits = (1 << size) - 1
    used_digits = [[0] * size, [0] * size, [0] * size]
    for cell, digit in enumerate(grid):
        if digit:
            bit = 1 << (digit - 1)
            for unit, index in zip(used_digits, places[cell], strict=True):
                if unit[index] & bit:
                    return
                unit[index] |= bit
    rows, columns, boxes = used_digits
    filled = list(grid)
    empty_cells = [cell for cell, digit in enumerate(grid) if not digit]
    budget = nodes

    def complete() -> Iterator[Grid]:
        nonlocal budget
        min_count, best_index, candidates = size + 1, -1, 0
        frees = []
        for index, cell in enumerate(empty_cells):
            row, column, box = places[cell]
            options = all_digits & ~(rows[row] | columns[column] | boxes[box])
            frees.append(options)
            count = options.bit_count()
            if count < min_count:
                min_count, best_index, candidates = count, index, options
                if count < 2:
                    break
        if best_index < 0:
            yield bytes(filled)
            return
        if min_count > 1 and nodes - budget > PATIENCE * size:
            lone_digits = _lone_digits(size, used_digits, [places[cell] for cell in empty_cells], frees)
            if lone_digits is None:
                return
            for index, cell in enumerate(empty_cells):
                row, column, box = places[cell]
                if lone_digit := frees[index] & (lone_digits[0][row] | lone_digits[1][column] | lone_digits[2][box]):
                    min_count, best_index, candidates = 1, index, lone_digit
                    break
        # If two digits have this cell as their only one, there is no completion, as for a cell without candidates.
        if not min_count or (min_count == 1 and candidates & (candidates - 1)):
            return
        cell = empty_cells[best_index]
        empty_cells[best_index] = empty_cells[-1]
        empty_cells.pop()
        row, column, box = places[cell]
        digits = [digit for digit in range(1, size + 1) if candidates >> (digit - 1) & 1]
        if rng is not None:
            rng.shuffle(digits)
        for digit in digits:
            budget -= 1
            if budget < 0:
                raise SearchLimit
            bit = 1 << (digit - 1)
            rows[row] |= bit
            columns[column] |= bit
            boxes[box] |= bit
            filled[cell] = digit
            yield from complete()
            rows[row] ^= bit
            columns[column] ^= bit
            boxes[box] ^= bit
        filled[cell] = 0
        empty_cells.append(cell)
        empty_cells[best_index], empty_cells[-1] = empty_cells[-1], empty_cells[best_index]

    yield from complete()


def _lone_digits(
    size: int, used: list[list[int]], places: list[tuple[int, int, int]], frees: list[int]
) -> list[list[int]] | None:
    """Return bits for the digits of every row, column and box that fit only one cell; None if a digit fits no cell."""
    once = [[0] * size, [0] * size, [0] * size]
    twice = [[0] * size, [0] * size, [0] * size]
    for place, free in zip(places, frees, strict=True):
        for unit in range(3):
            index = place[unit]
            twice[unit][index] |= once[unit][index] & free
            once[unit][index] |= free
    all_digits = (1 << size) - 1
    for unit in range(3):
        for index in range(size):
            if once[unit][index] | used[unit][index] != all_digits:
                return None
            once[unit][index] &= ~twice[unit][index]
    return once


@functools.lru_cache(maxsize=256)
def solve_given(puzzle: Grid, solution: Grid) -> Grid:
    """Return the solution of an explicit puzzle. Raises ValueError if there is none, or several.

    Args:
        puzzle: the puzzle.
        solution: the intended solution, which is checked. If it is empty, the puzzle must have exactly one solution.
    """
    size = math.isqrt(len(puzzle))
    if 0 not in puzzle:
        raise ValueError("puzzle has no empty cell: leave at least one to fill")
    if solution:
        if len(solution) != len(puzzle):
            raise ValueError("puzzle and solution differ in size")
        for cell, digit in enumerate(puzzle):
            if digit not in (0, solution[cell]):
                row, column = divmod(cell, size)
                raise ValueError(f"solution has {solution[cell]} at ({row + 1},{column + 1}), puzzle has {digit}")
        if 0 in solution or next(solutions(solution, size, 1), None) is None:
            raise ValueError("solution is no full grid without clashes")
        return solution
    search = solutions(puzzle, size, SOLVE_NODES)
    try:
        first, second = next(search, None), next(search, None)
    except SearchLimit:
        raise ValueError("puzzle is too open to be solved here: give more digits, or its solution") from None
    if first is None:
        raise ValueError("puzzle has no solution: a digit is wrong")
    if second is not None:
        raise ValueError("puzzle has more than one solution: give more digits, or say with `solution` which is meant")
    return first
