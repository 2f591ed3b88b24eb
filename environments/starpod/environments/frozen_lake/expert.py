"""The best action at each position of a map."""

from __future__ import annotations

import functools

import numpy as np

from .maps import ACTIONS, distances_to_goal, moves_on

_DISCOUNT = 0.9
"""The expert's: looks as far as the 10 actions of an episode. Closer to 1 it is safer, and too slow to arrive."""


@functools.lru_cache(maxsize=1024)
def best_actions(rows: tuple[str, ...], success_rate: float) -> tuple[str, ...]:
    """The best action at each position: likely to reach the goal, and sooner rather than later."""
    return _shortest_way(rows) if success_rate == 1 else _likeliest_way(rows, success_rate)


def _shortest_way(rows: tuple[str, ...]) -> tuple[str, ...]:
    """For each position the first action that leads nearer to the goal, for moves that never slip."""
    ways, distances = moves_on(len(rows), len(rows[0])), distances_to_goal(rows)
    far = len(distances)  # more than any distance

    def left(action: str, place: int) -> int:
        distance = distances[ways[action][place][1]]
        return far if distance is None else distance

    return tuple(min(ACTIONS, key=lambda action: left(action, place)) for place in range(far))


def _likeliest_way(rows: tuple[str, ...], success_rate: float) -> tuple[str, ...]:
    """The best actions for moves that may slip, by value iteration.

    Far from the goal values are tiny: errors are relative.
    """
    tiles = "".join(rows)
    ways = moves_on(len(rows), len(rows[0]))
    targets = np.array([ways[action] for action in ACTIONS])  # action x position x (before, straight, after)
    side = (1 - success_rate) / 2
    ended = np.array([tile in "HG" for tile in tiles])
    values = np.array([float(tile == "G") for tile in tiles])
    while True:
        reached = values[targets]
        # Spelled out, because a dot product may add up in another order on another machine.
        worth = _DISCOUNT * (side * reached[..., 0] + success_rate * reached[..., 1] + side * reached[..., 2])
        best = worth.max(axis=0)
        updated = np.where(ended, values, best)
        if (np.abs(updated - values) <= 1e-9 * updated).all():
            # Not the very best alone, so that equal actions tie and the first one wins.
            return tuple(ACTIONS[first] for first in (worth >= (1 - 1e-6) * best).argmax(axis=0))
        values = updated
