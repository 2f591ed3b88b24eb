"""Generates puzzles: a full grid, cleared cell by cell as long as one solution is left."""

from __future__ import annotations

import random

from .grid import Grid, peers
from .solver import SearchLimit, solutions

CLEARED = {"easy": 0.4, "medium": 0.5, "hard": 0.6}
"""Difficulty -> share of the cells that are cleared."""
FILL_NODES = 2_000
"""Steps of a search for a full grid before it starts over: luck decides, so a new start is cheaper than patience."""
CHECK_NODES = 300
"""Steps of a search for a second solution before a digit stays, because it could not be shown to be redundant."""
MAX_GRIDS = 200
"""Full grids that one reset tries to find and thin out. A handful is rare."""


def generate(rng: random.Random, size: int, difficulty: str) -> tuple[Grid, Grid]:
    """A puzzle with exactly one solution, and that solution. Draws from `rng` alone."""
    goal = int(size * size * CLEARED[difficulty])
    for _ in range(MAX_GRIDS):
        try:
            solution = next(solutions(bytes(size * size), size, FILL_NODES, rng))
        except SearchLimit:
            continue
        puzzle = list(solution)
        cleared = 0
        for cell in rng.sample(range(size * size), size * size):
            puzzle[cell] = 0
            if _has_other(puzzle, size, cell, solution[cell]):
                puzzle[cell] = solution[cell]
            else:
                cleared += 1
                if cleared == goal:
                    return bytes(puzzle), solution
    raise RuntimeError(f"none of {MAX_GRIDS} grids could be thinned out to a {difficulty} {size}x{size} puzzle")


def _has_other(puzzle: list[int], size: int, cell: int, digit: int) -> bool:
    """Whether some other digit in the cell also leads to a solution, or may: what takes too long counts as yes."""
    taken = {puzzle[peer] for peer in peers(size)[cell]}
    try:
        for other in range(1, size + 1):
            if other != digit and other not in taken:
                puzzle[cell] = other
                if next(solutions(puzzle, size, CHECK_NODES), None) is not None:
                    return True
    except SearchLimit:
        return True
    finally:
        puzzle[cell] = 0
    return False
