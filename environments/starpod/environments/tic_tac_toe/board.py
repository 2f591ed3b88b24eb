"""The board as a text of nine cells, row by row: `X`, `O` or `.`; X moves first. Perfect play by search."""

from __future__ import annotations

import functools
import random

EMPTY = "." * 9
CELLS = tuple(str(number) for number in range(1, 10))
"""The actions: the cells, numbered from 1 at the top left."""
_LINES = ((0, 1, 2), (3, 4, 5), (6, 7, 8), (0, 3, 6), (1, 4, 7), (2, 5, 8), (0, 4, 8), (2, 4, 6))
_ORDER = (4, 0, 2, 6, 8, 1, 3, 5, 7)
"""The order in which the expert takes cells of equal worth: the centre, the corners, the edges."""


def to_move(board: str) -> str:
    """X or O, whoever's turn it is."""
    return "X" if board.count("X") == board.count("O") else "O"


def place(board: str, cell: int) -> str:
    """The board after whoever's turn it is has taken a free cell."""
    return board[:cell] + to_move(board) + board[cell + 1 :]


def free_cells(board: str) -> list[int]:
    return [cell for cell, mark in enumerate(board) if mark == "."]


@functools.cache
def winning_line(board: str) -> tuple[int, int, int] | None:
    """Three cells with the same mark."""
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
    """What perfect play comes to for whoever's turn it is: above 0 a win, and the more the sooner; 0 a draw; below 0 a
    loss, and the less the sooner."""
    if winning_line(board):
        return -(1 + board.count("."))
    return max((-value(place(board, cell)) for cell in free_cells(board)), default=0)


def best_cells(board: str) -> list[int]:
    """The cells that perfect play may take; none where the game is over."""
    if is_over(board):
        return []
    return [cell for cell in _ORDER if board[cell] == "." and -value(place(board, cell)) == value(board)]


def draw_opening(rng: random.Random, moves: int) -> str:
    """A board after so many random moves that end nothing."""
    board = EMPTY
    for _ in range(moves):
        board = rng.choice([after for cell in free_cells(board) if not is_over(after := place(board, cell))])
    return board
