"""Shortest solutions: a table of all cubes near the solved one, and a search from the cube until it meets the table.

The turns of three faces suffice for a cube that is always held by the same corner (`hold`), and no such cube needs more
than 14 of them.
"""

from __future__ import annotations

import functools

from .cube import ACTIONS, SOLVED, TURNS, Cube, hold, permute, turn

MOST_TURNS = 14
"""Quarter turns that suffice for every cube."""

_DEPTH = 7
_HELD_TURNS = tuple(TURNS[action] for action in ("U", "U'", "R", "R'", "F", "F'"))


@functools.cache
def _near() -> dict[Cube, int]:
    """The quarter turns that each cube needs which needs at most 7 (some 45,000 of 3,674,160)."""
    near = {SOLVED: 0}
    edge = [SOLVED]
    for distance in range(1, _DEPTH + 1):
        edge = _neighbours(edge, near)
        near.update(dict.fromkeys(edge, distance))
    return near


def _neighbours(edge: list[Cube], seen: dict[Cube, int]) -> list[Cube]:
    return list(
        {after: None for cube in edge for sources in _HELD_TURNS if (after := permute(cube, sources)) not in seen}
    )


@functools.lru_cache(maxsize=4096)
def distance(cube: Cube) -> int:
    """The fewest quarter turns to a solved cube. Raises ValueError for one that no turns solve."""
    near, edge = _near(), [hold(cube)]
    seen = {edge[0]: 0}
    for before in range(MOST_TURNS - _DEPTH + 1):
        if met := [near[reached] for reached in edge if reached in near]:
            return before + min(met)
        edge = _neighbours(edge, seen)
        seen.update(dict.fromkeys(edge, 0))
    raise ValueError("no turns solve this cube")


def best_action(cube: Cube) -> str | None:
    """The first turn of a shortest solution; None for a solved cube."""
    left = distance(cube)
    return next((action for action in ACTIONS if distance(turn(cube, action)) < left), None) if left else None
