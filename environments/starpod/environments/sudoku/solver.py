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
        nodes: maximum number of placements.
        rng: shuffles the order in which digits are tried; None tries them in ascending order.

    Raises:
        SearchLimit: the search exceeded `nodes`.
    """
    search = _Search(size, nodes, rng)
    return search.completions() if search.enter(grid) else iter(())


class _Search:
    """A backtracking search in one grid.

    Attributes:
        used: bits of the digits in every row, column and box.
        filled: the cells.
        empty: the cells without a digit, in any order.
    """

    def __init__(self, size: int, nodes: int, rng: random.Random | None) -> None:
        self.size = size
        self.rng = rng
        self.budget = nodes
        self.slow_below = nodes - PATIENCE * size
        self.places = units(size)
        self.used = [[0] * size, [0] * size, [0] * size]
        self.filled: list[int] = []
        self.empty: list[int] = []

    def enter(self, grid: Sequence[int]) -> bool:
        """Take over the digits of a grid. Returns False if two of them clash."""
        self.filled = list(grid)
        self.empty = [cell for cell, digit in enumerate(grid) if not digit]
        for cell, digit in enumerate(grid):
            if digit:
                bit = 1 << (digit - 1)
                for unit, index in zip(self.used, self.places[cell], strict=True):
                    if unit[index] & bit:
                        return False
                    unit[index] |= bit
        return True

    def completions(self) -> Iterator[Grid]:
        if not self.empty:
            yield bytes(self.filled)
            return
        index, candidates = self._choose()
        if not candidates:
            return
        empty, filled = self.empty, self.filled
        cell = empty[index]
        empty[index] = empty[-1]
        empty.pop()
        rows, columns, boxes = self.used
        row, column, box = self.places[cell]
        digits = [digit for digit in range(1, self.size + 1) if candidates >> (digit - 1) & 1]
        if self.rng is not None:
            self.rng.shuffle(digits)
        for digit in digits:
            self.budget -= 1
            if self.budget < 0:
                raise SearchLimit
            bit = 1 << (digit - 1)
            rows[row] |= bit
            columns[column] |= bit
            boxes[box] |= bit
            filled[cell] = digit
            yield from self.completions()
            rows[row] ^= bit
            columns[column] ^= bit
            boxes[box] ^= bit
        filled[cell] = 0
        empty.append(cell)
        empty[index], empty[-1] = empty[-1], empty[index]

    def _choose(self) -> tuple[int, int]:
        """Return the index in `empty` of the cell to fill next, and the bits of its candidates; none: a dead end."""
        rows, columns, boxes = self.used
        all_digits = (1 << self.size) - 1
        min_count, best_index, candidates = self.size + 1, 0, 0
        frees = []
        for index, cell in enumerate(self.empty):
            row, column, box = self.places[cell]
            options = all_digits & ~(rows[row] | columns[column] | boxes[box])
            frees.append(options)
            count = options.bit_count()
            if count < min_count:
                min_count, best_index, candidates = count, index, options
                if count < 2:
                    return best_index, candidates
        if self.budget >= self.slow_below:
            return best_index, candidates
        lone_digits = _lone_digits(self.size, self.used, [self.places[cell] for cell in self.empty], frees)
        if lone_digits is None:
            return best_index, 0
        for index, cell in enumerate(self.empty):
            row, column, box = self.places[cell]
            if lone_digit := frees[index] & (lone_digits[0][row] | lone_digits[1][column] | lone_digits[2][box]):
                # If two digits have this cell as their only one, there is no completion.
                return index, 0 if lone_digit & (lone_digit - 1) else lone_digit
        return best_index, candidates


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
