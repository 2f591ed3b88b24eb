"""The part of a room that never changes: moves, walls, floor and targets."""

from __future__ import annotations

import functools
from collections import deque

MOVES = {"Up": (-1, 0), "Down": (1, 0), "Left": (0, -1), "Right": (0, 1)}
"""Action -> step in rows and columns. The order is that of `local` observations and of the expert's preference."""


class Board:
    """The fixed part of a room. A cell is its index into `text`, so neighbours are `deltas` away.

    text: the rows joined by line breaks, in the characters # (wall), _ (floor) and O (target).
    floor: cells without a wall, targets included. What lies outside the text is never in it.
    pushes: cell -> how many pushes a lone box there needs to its nearest target; cells without a way are absent.
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
                # The box came from `source`, pushed by a player who stood behind it.
                source = cell - delta
                if source in self.floor and source - delta in self.floor and source not in pushes:
                    pushes[source] = pushes[cell] + 1
                    queue.append(source)
        return pushes

    def coordinate(self, cell: int) -> tuple[int, int]:
        """Row and column, from 0."""
        return divmod(cell, self.columns + 1)


@functools.lru_cache(maxsize=1024)
def board_of(text: str) -> Board:
    """The board of a text. The members of a group and the copies of a fork share it."""
    return Board(text)
