"""Maps: targets of moves, distances to the goal, and random maps that can be solved."""

from __future__ import annotations

import functools
import random
from collections import deque

ACTIONS = ("Left", "Down", "Right", "Up")
"""The actions in Gymnasium's order, which is circular: a slip goes to the previous or the next one."""

_STEPS = ((0, -1), (1, 0), (0, 1), (-1, 0))


@functools.lru_cache(maxsize=64)
def moves_on(rows: int, columns: int) -> dict[str, list[tuple[int, int, int]]]:
    """Return the three possible targets of a move, for each action and position.

    They are the targets after a slip to the previous action, without a slip, and after a slip to the next action. A
    move against the border stays in place.
    """

    def move(place: int, action: int) -> int:
        row, column = divmod(place, columns)
        down, right = _STEPS[action % 4]
        return min(max(row + down, 0), rows - 1) * columns + min(max(column + right, 0), columns - 1)

    return {
        name: [(move(cell, action - 1), move(cell, action), move(cell, action + 1)) for cell in range(rows * columns)]
        for action, name in enumerate(ACTIONS)
    }


@functools.lru_cache(maxsize=1024)
def distances_to_goal(rows: tuple[str, ...]) -> tuple[int | None, ...]:
    """Return the number of moves to the goal from each position without slips; None if there is no path."""
    tiles = "".join(rows)
    moves = moves_on(len(rows), len(rows[0]))
    distances: list[int | None] = [None] * len(tiles)
    goal = tiles.index("G")
    distances[goal] = 0
    queue = deque([(goal, 0)])
    while queue:
        cell, distance = queue.popleft()
        for action in ACTIONS:
            target = moves[action][cell][1]
            if distances[target] is None and tiles[target] != "H":
                distances[target] = distance + 1
                queue.append((target, distance + 1))
    return tuple(distances)


def draw_map(rng: random.Random, size: int, frozen_probability: float) -> tuple[str, ...]:
    """Draw independent tiles, a start and a goal. Repeat that until a path joins start and goal.

    Args:
        frozen_probability: probability of ice; the other tiles are holes.
    """
    while True:
        tiles = ["F" if rng.random() < frozen_probability else "H" for _ in range(size * size)]
        start, goal = rng.randrange(size * size), rng.randrange(size * size)
        tiles[start], tiles[goal] = "S", "G"
        text = "".join(tiles)
        if start != goal and _is_joined(text, size):
            return tuple([text[first : first + size] for first in range(0, size * size, size)])


_ICE = str.maketrans("SFGH", "1110")


def _is_joined(tiles: str, size: int) -> bool:
    """Return whether a path without holes joins start and goal. A set of tiles is a number with a bit for each."""
    ice = int(tiles.translate(_ICE), 2)
    not_last, not_first = _columns_but_one(size)
    last = len(tiles) - 1
    reached, goal = 1 << last - tiles.index("S"), 1 << last - tiles.index("G")
    while not reached & goal:
        before = reached
        sideways = reached << 1 & not_last | reached >> 1 & not_first
        reached |= (sideways | reached << size | reached >> size) & ice
        if reached == before:
            return False
    return True


@functools.lru_cache(maxsize=16)
def _columns_but_one(size: int) -> tuple[int, int]:
    """Return all tiles but those of the last column, and all but those of the first one."""
    return int(("1" * (size - 1) + "0") * size, 2), int(("0" + "1" * (size - 1)) * size, 2)
