"""The rules on boards: slides, merges and valid moves."""

from __future__ import annotations

import functools
import random

ACTIONS = ("Up", "Right", "Down", "Left")
"""The actions, in the order of their numbers in the original game."""

Board = tuple[int, ...]
"""Tiles row by row; 0 is an empty cell."""


@functools.lru_cache(maxsize=2**16)
def slide_line(line: Board) -> tuple[Board, int]:
    """Slide a line to its start. Return the new line and the sum of merged tiles. Merged tiles do not merge again."""
    tiles: list[int] = []
    points = 0
    mergeable = False
    for tile in filter(None, line):
        if mergeable and tiles[-1] == tile:
            tiles[-1] += tile
            points += tiles[-1]
            mergeable = False
        else:
            tiles.append(tile)
            mergeable = True
    return (*tiles, *(0,) * (len(line) - len(tiles))), points


@functools.cache
def _lines(size: int) -> dict[str, tuple[tuple[int, ...], ...]]:
    """Return the lines for each action. A line is a list of cells that begins at the side to which tiles slide."""
    rows = tuple(tuple(range(row * size, (row + 1) * size)) for row in range(size))
    columns = tuple(zip(*rows, strict=True))
    return {
        "Up": columns,
        "Right": tuple(line[::-1] for line in rows),
        "Down": tuple(line[::-1] for line in columns),
        "Left": rows,
    }


def slide(board: Board, size: int, action: str) -> tuple[Board, int]:
    """Slide all tiles as one of ACTIONS says. Return the board, without a new tile, and the sum of the merged tiles."""
    cells = list(board)
    total = 0
    for line in _lines(size)[action]:
        new_line, points = slide_line(tuple(board[cell] for cell in line))
        total += points
        for cell, tile in zip(line, new_line, strict=True):
            cells[cell] = tile
    return tuple(cells), total


def moves(board: Board, size: int) -> list[str]:
    """Return the actions that move a tile."""
    return [action for action in ACTIONS if slide(board, size, action)[0] != board]


def add_tile(board: Board, rng: random.Random, two_probability: float) -> Board:
    """Add a tile in a random empty cell.

    Args:
        two_probability: probability of a 2; otherwise the tile is a 4.
    """
    empty_cells = [cell for cell, tile in enumerate(board) if not tile]
    cell = empty_cells[rng.randrange(len(empty_cells))]
    tile = 2 if rng.random() < two_probability else 4
    return (*board[:cell], tile, *board[cell + 1 :])


def rows_of(board: Board, size: int) -> list[Board]:
    """Return the board's rows, from the top."""
    return [board[start : start + size] for start in range(0, size * size, size)]
