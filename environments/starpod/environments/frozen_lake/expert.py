"""The best action at each position of a map."""

from __future__ import annotations

import functools

import numpy as np

from .maps import ACTIONS, distances_to_goal, moves_on

_DISCOUNT = 0.9
"""Discount of the expert's value iteration. It fits an episode of 10 actions. With a discount closer to 1, the
expert would avoid all risk and arrive too late."""


@functools.lru_cache(maxsize=1024)
def best_actions(rows: tuple[str, ...], success_rate: float) -> tuple[str, ...]:
    """Return the action with the highest discounted probability of reaching the goal, for each position."""
    return _shortest_paths(rows) if success_rate == 1 else _iterate_values(rows, success_rate)


def _shortest_paths(rows: tuple[str, ...]) -> tuple[str, ...]:
    moves, distances = moves_on(len(rows), len(rows[0])), distances_to_goal(rows)
    far = len(distances)  # more than any distance

    def distance_after(action: str, position: int) -> int:
        distance = distances[moves[action][position][1]]
        return far if distance is None else distance

    return tuple(min(ACTIONS, key=lambda action: distance_after(action, position)) for position in range(far))


def _iterate_values(rows: tuple[str, ...], success_rate: float) -> tuple[str, ...]:
    """Return the best actions for moves that may slip, by value iteration.

    Convergence is tested with relative errors, because values far from the goal are tiny.
    """
    tiles = "".join(rows)
    moves = moves_on(len(rows), len(rows[0]))
    targets = np.array([moves[action] for action in ACTIONS])  # action x position x (before, straight, after)
    side = (1 - success_rate) / 2
    is_end = np.array([tile in "HG" for tile in tiles])
    values = np.array([float(tile == "G") for tile in tiles])
    while True:
        futures = values[targets]
        # Not a dot product: its order of summation, and so its rounding, differs between machines.
        worth = _DISCOUNT * (side * futures[..., 0] + success_rate * futures[..., 1] + side * futures[..., 2])
        best = worth.max(axis=0)
        updated = np.where(is_end, values, best)
        if (np.abs(updated - values) <= 1e-9 * updated).all():
            # The tolerance makes equally good actions tie in spite of rounding; the first one wins.
            return tuple(ACTIONS[index] for index in (worth >= (1 - 1e-6) * best).argmax(axis=0))
        values = updated
