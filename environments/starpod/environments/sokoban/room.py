"""The fixed part of a room: walls, floor and targets."""

from __future__ import annotations

import functools
from collections import deque

MOVES = {"Up": (-1, 0), "Down": (1, 0), "Left": (0, -1), "Right": (0, 1)}
"""Step of each action (rows, columns). `local` observations use this order, and the expert prefers earlier moves."""


class Board:
    """The fixed part of a room. Cells are indices into `text`.

    Attributes:
        text: the rows joined by line breaks, in the characters # (wall), _ (floor) and O (target).
        deltas: for each action, the number to add to a cell to get the neighbour in that direction.
        floor: cells without a wall, including targets.
        pushes: for each cell, the minimum number of pushes that bring a single box from there to a target. Cells from
            which no target can be reached are absent.
    """

    def __init__(self, text: str) -> None:
        self.text = text
        self.rows = text.count("\n") + 1
        self.columns = (len(text) + 1) // self.rows - 1
        self.deltas = {name: row * (self.columns + 1) + column for name, (row, column) in MOVES.items()}
        self.targets = frozenset(cell for cell, kind in enumerate(text) if kind == "O")
        self.floor = frozenset(cell for cell, kind in enumerate(text) if kind == "_") | self.targets
        self.pushes = self._count_pushes()

    def _count_pushes(self) -> dict[int, int]:
        pushes = dict.fromkeys(self.targets, 0)
        queue = deque(sorted(self.targets))
        while queue:
            cell = queue.popleft()
            for delta in self.deltas.values():
                # A player behind `source` can push the box from there to `cell`.
                source = cell - delta
                if source in self.floor and source - delta in self.floor and source not in pushes:
                    pushes[source] = pushes[cell] + 1
                    queue.append(source)
        return pushes

    def coordinate(self, cell: int) -> tuple[int, int]:
        """Return row and column, from 0."""
        return divmod(cell, self.columns + 1)


@functools.lru_cache(maxsize=1024)
def board_of(text: str) -> Board:
    """Return the board of a text. The members of a group and the copies of a fork share it."""
    return Board(text)
