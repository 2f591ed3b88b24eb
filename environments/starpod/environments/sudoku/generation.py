"""Generation of puzzles: a full grid, whose cells are cleared as long as the solution stays unique."""

from __future__ import annotations

import random

from .grid import Grid, peers
from .solver import SearchLimit, solutions

CLEARED = {"easy": 0.4, "medium": 0.5, "hard": 0.6}
"""Share of the cells that are cleared, for each difficulty."""
FILL_NODES = 2_000
"""Maximum number of steps of a search for a full grid. Some random starts take long, so restarting is faster."""
CHECK_NODES = 300
"""Maximum number of steps of a search for a second solution. If it is exceeded, the digit is not cleared."""
MAX_GRIDS = 200
"""Maximum number of full grids that one reset tries. It rarely needs more than a few."""


def generate(rng: random.Random, size: int, difficulty: str) -> tuple[Grid, Grid]:
    """Draw a puzzle with exactly one solution. Returns the puzzle and its solution.

    Args:
        size: number of rows, of columns and of digits: a square number.
        difficulty: name in CLEARED, which says how many cells are empty.
    """
    goal = int(size * size * CLEARED[difficulty])
    for _ in range(MAX_GRIDS):
        try:
            solution = next(solutions(bytes(size * size), size, FILL_NODES, rng))
        except SearchLimit:
            continue
        puzzle = list(solution)
        cleared_count = 0
        for cell in rng.sample(range(size * size), size * size):
            puzzle[cell] = 0
            if _has_other(puzzle, size, cell, solution[cell]):
                puzzle[cell] = solution[cell]
            else:
                cleared_count += 1
                if cleared_count == goal:
                    return bytes(puzzle), solution
    raise RuntimeError(f"none of {MAX_GRIDS} grids could be thinned out to a {difficulty} {size}x{size} puzzle")


def _has_other(puzzle: list[int], size: int, cell: int, digit: int) -> bool:
    """Return whether another digit in the cell also leads to a solution, or whether the search takes too long."""
    digits = {puzzle[peer] for peer in peers(size)[cell]}
    try:
        for candidate in range(1, size + 1):
            if candidate != digit and candidate not in digits:
                puzzle[cell] = candidate
                if next(solutions(puzzle, size, CHECK_NODES), None) is not None:
                    return True
    except SearchLimit:
        return True
    finally:
        puzzle[cell] = 0
    return False
