"""Shortest solutions, by a table of all cubes near the solved one and a search that ends when it reaches the table.

In the normal orientation (`hold`), turns of three faces are sufficient, and no cube needs more than 14 of them.
"""

from __future__ import annotations

import functools

from .cube import ACTIONS, SOLVED, TURNS, Cube, hold, permute, turn

MOST_TURNS = 14
"""Maximum number of quarter turns of a shortest solution."""

_DEPTH = 7
_HELD_TURNS = tuple(TURNS[action] for action in ("U", "U'", "R", "R'", "F", "F'"))


@functools.cache
def _near_cubes() -> dict[Cube, int]:
    """Return the distances of all cubes at most 7 turns from the solved cube: about 45,000 of 3,674,160 cubes."""
    distances = {SOLVED: 0}
    edge = [SOLVED]
    for distance in range(1, _DEPTH + 1):
        edge = _neighbours(edge, distances)
        distances.update(dict.fromkeys(edge, distance))
    return distances


def _neighbours(edge: list[Cube], seen: dict[Cube, int]) -> list[Cube]:
    return list(
        {after: None for cube in edge for sources in _HELD_TURNS if (after := permute(cube, sources)) not in seen}
    )


@functools.lru_cache(maxsize=4096)
def distance(cube: Cube) -> int:
    """Return the number of quarter turns of a shortest solution. Raises ValueError if there is no solution."""
    near_cubes, edge = _near_cubes(), [hold(cube)]
    seen = {edge[0]: 0}
    for depth in range(MOST_TURNS - _DEPTH + 1):
        if distances := [near_cubes[state] for state in edge if state in near_cubes]:
            return depth + min(distances)
        edge = _neighbours(edge, seen)
        seen.update(dict.fromkeys(edge, 0))
    raise ValueError("no turns solve this cube")


def best_action(cube: Cube) -> str | None:
    """Return the first turn of a shortest solution, or None for a solved cube."""
    steps = distance(cube)
    return next((action for action in ACTIONS if distance(turn(cube, action)) < steps), None) if steps else None
