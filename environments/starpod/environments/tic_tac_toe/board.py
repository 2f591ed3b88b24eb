"""The rules on boards, and perfect play by search. A board is a str of nine cells, row by row: `X`, `O` or `.`."""

from __future__ import annotations

import functools
import random

EMPTY = "." * 9
CELLS = tuple(str(number) for number in range(1, 10))
"""The actions: the cells, numbered from 1 at the top left."""
_LINES = ((0, 1, 2), (3, 4, 5), (6, 7, 8), (0, 3, 6), (1, 4, 7), (2, 5, 8), (0, 4, 8), (2, 4, 6))
_ORDER = (4, 0, 2, 6, 8, 1, 3, 5, 7)
"""The expert's preference among cells of equal value: the centre, the corners, the edges."""


def to_move(board: str) -> str:
    """Return the player whose turn it is, X or O. X moves first."""
    return "X" if board.count("X") == board.count("O") else "O"


def take(board: str, cell: int) -> str:
    """Return the board after the player whose turn it is has taken a cell."""
    return board[:cell] + to_move(board) + board[cell + 1 :]


def free_cells(board: str) -> list[int]:
    return [cell for cell, mark in enumerate(board) if mark == "."]


@functools.cache
def winning_line(board: str) -> tuple[int, int, int] | None:
    """Return three cells in a row with the same mark, or None."""
    return next(
        (
            line
            for line in _LINES
            if len({board[cell] for cell in line} - {"."}) == 1 and all(board[cell] != "." for cell in line)
        ),
        None,
    )


def is_over(board: str) -> bool:
    return winning_line(board) is not None or "." not in board


@functools.cache
def value(board: str) -> int:
    """Return the value of perfect play for the player whose turn it is.

    A win is positive, a draw is 0 and a loss is negative. Wins and losses that come sooner have a larger magnitude.
    """
    if winning_line(board):
        return -(1 + board.count("."))
    return max((-value(take(board, cell)) for cell in free_cells(board)), default=0)


def best_cells(board: str) -> list[int]:
    """Return the cells with the highest value, in the order of preference; none if the game is over."""
    if is_over(board):
        return []
    return [cell for cell in _ORDER if board[cell] == "." and -value(take(board, cell)) == value(board)]


def draw_opening(rng: random.Random, moves: int) -> str:
    """Return a board after that number of random moves, none of which ends the game."""
    board = EMPTY
    for _ in range(moves):
        board = rng.choice([after for cell in free_cells(board) if not is_over(after := take(board, cell))])
    return board
