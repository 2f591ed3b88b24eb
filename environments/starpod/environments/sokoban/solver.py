"""Search for a shortest solution of a room."""

from __future__ import annotations

from collections import deque

from .room import Board

MAX_SOLVER_STATES = 20_000
"""Maximum number of states that a search visits before it gives up, after less than a tenth of a second."""


class Unsolvable:
    """The result of a search that visited all reachable states without finding a solution."""


Plan = list[tuple[int, frozenset[int], str]]
"""The moves of a solution, each with the player and the boxes before it."""


def solve(board: Board, player: int, boxes: frozenset[int]) -> Plan | Unsolvable | None:
    """Return a shortest solution, Unsolvable, or None if the search gave up. At least one box must be on no target."""
    return search(board, player, boxes)[0]


def search(board: Board, player: int, boxes: frozenset[int]) -> tuple[Plan | Unsolvable | None, int]:
    """Search for a shortest solution, breadth first. Return it as `solve` does, and the number of visited states.

    Boxes are never pushed to cells from which no target can be reached. Of all shortest solutions, the first in the
    order of MOVES is found. A new search from any state on the solution therefore finds the rest of the same solution.
    """
    floor, targets, live_cells = board.floor, board.targets, board.pushes
    if not all(box in live_cells for box in boxes):
        return Unsolvable(), 0
    moves = tuple(board.deltas.items())
    start = (player, boxes)
    parents: dict[tuple[int, frozenset[int]], tuple[tuple[int, frozenset[int]], str] | None] = {start: None}
    queue = deque([start])
    while queue:
        state = queue.popleft()
        cell, crates = state
        for name, delta in moves:
            next_cell = cell + delta
            if next_cell not in floor:
                continue
            new_crates = crates
            if next_cell in crates:
                far_cell = next_cell + delta
                if far_cell not in live_cells or far_cell in crates:
                    continue
                new_crates = crates - {next_cell} | {far_cell}
            next_state = (next_cell, new_crates)
            if next_state in parents:
                continue
            parents[next_state] = (state, name)
            if new_crates == targets:
                plan = []
                step = parents[next_state]
                while step is not None:
                    (player_before, boxes_before), move = step
                    plan.append((player_before, boxes_before, move))
                    step = parents[step[0]]
                return plan[::-1], len(parents)
            queue.append(next_state)
        if len(parents) > MAX_SOLVER_STATES:
            return None, len(parents)
    return Unsolvable(), len(parents)
