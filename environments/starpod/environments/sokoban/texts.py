"""Texts of Sokoban: the instructions, and the board in symbols, as coordinates or cell by cell."""

from __future__ import annotations

import functools
from collections.abc import Collection
from typing import NamedTuple

from .options import SokobanOptions, Symbols
from .room import MOVES, Board


class RoomView(NamedTuple):
    """The current state of a room, with the symbols that show it."""

    board: Board
    player: int
    boxes: frozenset[int]
    symbols: Symbols

    def text(self, mode: str) -> str:
        """Return the observation in a mode, such as "grid"."""
        match mode:
            case "grid":
                return self.grid()
            case "padded":
                return "\n".join("".join(f" {symbol} " for symbol in row) for row in self.grid().split("\n"))
            case "coord":
                return self._coordinates()
            case "grid_coord":
                return f"Coordinates: \n{self._coordinates()}\nGrid Map: \n{self.grid()}"
            case _:
                return self._local()

    def grid(self) -> str:
        """Return the rows of the board, with one symbol per cell."""
        board, player, boxes, symbols = self
        targets = board.targets
        cells = list(_translated(board.text, symbols.wall, symbols.empty, symbols.target))
        for box in boxes:
            cells[box] = symbols.box_on_target if box in targets else symbols.box
        cells[player] = symbols.player_on_target if player in targets else symbols.player
        return "".join(cells)

    def _symbol(self, cell: int) -> str:
        board, symbols = self.board, self.symbols
        on_target = cell in board.targets
        if cell == self.player:
            return symbols.player_on_target if on_target else symbols.player
        if cell in self.boxes:
            return symbols.box_on_target if on_target else symbols.box
        if cell not in board.floor:
            return symbols.wall
        return symbols.target if on_target else symbols.empty

    def _coordinates(self) -> str:
        board = self.board
        lines = [f"Board size: {board.rows} rows x {board.columns} cols (zero-indexed)."]
        groups: dict[str, Collection[int]] = {
            "Targets": board.targets,
            "Boxes": self.boxes - board.targets,
            "Boxes on target": self.boxes & board.targets,
            "Player on target" if self.player in board.targets else "Player": (self.player,),
        }
        for name, cells in groups.items():
            if cells:
                lines.append(f"{name}: {', '.join(str(board.coordinate(cell)) for cell in sorted(cells))}")
        return "\n".join(lines)

    def _local(self) -> str:
        targets = self.board.targets
        lines = [self._local_line(self.player, self.boxes - targets)]
        lines += [self._local_line(box, () if box in targets else targets - self.boxes) for box in sorted(self.boxes)]
        lines += ["{} {} {}".format(self.symbols.target, *self.board.coordinate(cell)) for cell in sorted(targets)]
        return "\n".join(lines)

    def _local_line(self, cell: int, goals: Collection[int]) -> str:
        """Return a line with symbol, row, column, the directions to the nearest goal, and the adjacent cells."""
        board = self.board
        row, column = board.coordinate(cell)
        offsets = [(there - row, across - column) for there, across in map(board.coordinate, sorted(goals))]
        down, right = min(offsets, key=lambda offset: abs(offset[0]) + abs(offset[1]), default=(0, 0))
        way = f"{'Up' if down < 0 else 'Down' if down else '-'} {'Left' if right < 0 else 'Right' if right else '-'}"
        neighbours = " ".join(self._symbol(cell + delta) for delta in board.deltas.values())
        return f"{self._symbol(cell)} {row} {column} {way} {neighbours}"


@functools.lru_cache(maxsize=1024)
def _translated(room: str, wall: str, empty: str, target: str) -> str:
    return room.translate({ord("#"): wall, ord("_"): empty, ord("O"): target})


def instructions(options: SokobanOptions) -> str:
    """Return the rules, with a description of the observations."""
    rows, columns = options.shape
    return (
        f"Sokoban on a board of {rows} rows and {columns} columns. Push every box onto a target in as few moves as "
        f"you can. {_legend(options)} Each move takes you one cell Up, Down, Left or Right. Moving against a box "
        "pushes it one cell on, if the cell behind it is free. Boxes cannot be pulled; a box with a wall or a box "
        "behind it does not move, and one in a corner is stuck there."
    )


def _legend(options: SokobanOptions) -> str:
    legend = ", ".join(f"{symbol} {name}" for name, symbol in options.vocabulary.legend())
    match options.observation:
        case "grid" | "padded":
            return f"The board is shown row by row in these symbols: {legend}."
        case "coord":
            return (
                "You are told where targets, boxes and player are, as (row, column) counted from (0, 0) at the top "
                "left. Boxes that stand on a target have a line of their own. Walls are not listed."
            )
        case "grid_coord":
            return (
                "You are told where targets, boxes and player are, as (row, column) counted from (0, 0) at the top "
                f"left, and see the board row by row in these symbols: {legend}."
            )
        case "local":
            return (
                "The first line is about the player: your symbol, your row and column counted from 0 at the top left, "
                "whether the nearest box without a target lies Up or Down and Left or Right of you (- for neither), "
                f"and the cells {', '.join(MOVES)} of you. A line for each box follows in the same manner, with the "
                f"way to the nearest free target, and a line with row and column for each target. Symbols: {legend}."
            )
        case _:
            return (
                "The board is shown as a picture: bricks are walls, red rings are targets, crates are boxes, and a "
                "green crate stands on a target."
            )
