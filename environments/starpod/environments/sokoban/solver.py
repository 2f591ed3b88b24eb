"""Searches for a shortest solution of a room."""

from __future__ import annotations

from collections import deque

from .room import Board

MAX_SOLVER_STATES = 20_000
"""States that a forward search visits before it gives up: less than a tenth of a second."""


class Unsolvable:
    """The search saw every state there is, and none is solved."""


Plan = list[tuple[int, frozenset[int], str]]
"""Player, boxes and move, for every move of a solution."""


def solve(board: Board, player: int, boxes: frozenset[int]) -> Plan | Unsolvable | None:
    """A shortest solution; None where the search gives up."""
    return search(board, player, boxes)[0]


def search(board: Board, player: int, boxes: frozenset[int]) -> tuple[Plan | Unsolvable | None, int]:
    """A shortest solution, as `solve` gives it, and the number of states that the search visited.

    Breadth-first over player and boxes, never pushing a box to where no target can be reached. Of all shortest
    solutions it finds the first in the order of MOVES, so each of its suffixes is what a search from there would find.
    """
    floor, targets, alive = board.floor, board.targets, board.pushes
    if not all(box in alive for box in boxes):
        return Unsolvable(), 0
    moves = tuple(board.deltas.items())
    start = (player, boxes)
    came: dict[tuple[int, frozenset[int]], tuple[tuple[int, frozenset[int]], str] | None] = {start: None}
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
            if following in came:
                continue
            came[following] = (state, name)
            if pushed == targets:
                plan = []
                step = came[following]
                while step is not None:
                    (before, boxes_before), move = step
                    plan.append((before, boxes_before, move))
                    step = came[step[0]]
                return plan[::-1], len(came)
            queue.append(following)
        if len(came) > MAX_SOLVER_STATES:
            return None, len(came)
    return Unsolvable(), len(came)
