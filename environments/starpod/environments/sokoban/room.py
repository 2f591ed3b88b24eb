"""A room: the board that never changes, the symbols that show it, and layouts that are given as text."""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, model_validator

MOVES = {"Up": (-1, 0), "Down": (1, 0), "Left": (0, -1), "Right": (0, 1)}
"""Action -> step in rows and columns. The order is that of `local` observations and of the expert's preference."""

Symbol = Annotated[str, Field(min_length=1, max_length=1)]


class Symbols(BaseModel):
    """One character for each of the seven things that a cell can show."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    wall: Symbol = "#"
    empty: Symbol = "_"
    target: Symbol = "O"
    box_on_target: Symbol = "√"
    box: Symbol = "X"
    player: Symbol = "P"
    player_on_target: Symbol = "S"

    @model_validator(mode="after")
    def _check(self) -> Symbols:
        seen: dict[str, str] = {}
        for name, symbol in self.legend():
            if symbol.isspace() or not symbol.isprintable():
                raise ValueError(f"the symbol of {name!r} is {symbol!r}: give one visible character")
            if symbol in seen:
                raise ValueError(f"{seen[symbol]!r} and {name!r} share the symbol {symbol!r}: give each its own")
            seen[symbol] = name
        return self

    def legend(self) -> Iterator[tuple[str, str]]:
        """(meaning, symbol) pairs."""
        for name in type(self).model_fields:
            yield name.replace("_", " "), getattr(self, name)


VOCABULARIES = {
    "default": Symbols(),
    "letters": Symbols(wall="W", empty=".", target="G", box_on_target="C", box="B", player="A", player_on_target="@"),
}


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


def read_layout(layout: Sequence[str], symbols: Symbols) -> tuple[Board, int, frozenset[int]]:
    """Board, player and boxes of a layout. Raises ValueError that says which cell is wrong."""
    if not 3 <= len(layout) <= 64 or not 3 <= len(layout[0]) <= 64:
        raise ValueError("layout must have 3 to 64 rows of 3 to 64 cells")
    kinds = {symbol: name for name, symbol in symbols.legend()}
    players, boxes, text = [], set(), []
    for row, line in enumerate(layout):
        if len(line) != len(layout[0]):
            raise ValueError(
                f"row {row} of the layout has {len(line)} cells, row 0 has {len(layout[0])}: make them equal"
            )
        for column, symbol in enumerate(line):
            if symbol not in kinds:
                known = ", ".join(f"{symbol} {name}" for symbol, name in kinds.items())
                raise ValueError(f"row {row}, column {column} of the layout is {symbol!r}; the symbols are: {known}")
            kind = kinds[symbol]
            cell = row * (len(line) + 1) + column
            if kind.startswith("player"):
                players.append(cell)
            elif kind.startswith("box"):
                boxes.add(cell)
        text.append("".join(_background(kinds[symbol]) for symbol in line))
    board = board_of("\n".join(text))
    if len(players) != 1:
        raise ValueError(f"layout has {len(players)} players: give it exactly one")
    if not boxes or len(boxes) != len(board.targets):
        raise ValueError(
            f"layout has {len(boxes)} boxes and {len(board.targets)} targets: give it as many of each, >= 1"
        )
    return board, players[0], frozenset(boxes)


def _background(kind: str) -> str:
    return "#" if kind == "wall" else "O" if kind.endswith("target") else "_"
