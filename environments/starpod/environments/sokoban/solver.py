"""Search for a shortest solution of a room."""

from __future__ import annotations

from collections import deque

from .room import Board

MAX_SOLVER_STATES = 20_000
"""Maximum number of states that a search visits before it gives up: less than a tenth of a second."""


class Unsolvable:
    """The result of a search that visited all reachable states without finding a solution."""


Plan = list[tuple[int, frozenset[int], str]]
"""The moves of a solution, each with the player and the boxes before it."""


def solve(board: Board, player: int, boxes: frozenset[int]) -> Plan | Unsolvable | None:
    """Return a shortest solution, Unsolvable, or None if the search gave up."""
    return search(board, player, boxes)[0]


def search(board: Board, player: int, boxes: frozenset[int]) -> tuple[Plan | Unsolvable | None, int]:
    """Search for a shortest solution, breadth first. Return it as `solve` does, and the number of visited states.

    Boxes are never pushed to cells from which no target can be reached. Of all shortest solutions, the first in the
    order of MOVES is found. Each of its suffixes is therefore what a search from that state would find.
    """
    floor, targets, alive = board.floor, board.targets, board.pushes
    if not all(box in alive for box in boxes):
        return Unsolvable(), 0
    moves = tuple(board.deltas.items())
    start = (player, boxes)
    previous: dict[tuple[int, frozenset[int]], tuple[tuple[int, frozenset[int]], str] | None] = {start: None}
    queue = deque([start])
    while queue:
        state = queue.popleft()
        at, crates = state
        for name, delta in moves:
            ahead = at + delta
            if ahead not in floor:
                continue
            pushed = crates
            if ahead in crates:
                behind = ahead + delta
                if behind not in alive or behind in crates:
                    continue
                pushed = crates - {ahead} | {behind}
            following = (ahead, pushed)
            if following in previous:
                continue
            previous[following] = (state, name)
            if pushed == targets:
                plan = []
                step = previous[following]
                while step is not None:
                    (before, boxes_before), move = step
                    plan.append((before, boxes_before, move))
                    step = previous[step[0]]
                return plan[::-1], len(previous)
            queue.append(following)
        if len(previous) > MAX_SOLVER_STATES:
            return None, len(previous)
    return Unsolvable(), len(previous)
