"""Expert for 2048: expectimax over a move, the new tile and another move.

The heuristic adds scores of lines. Empty cells and equal neighbours score high; lines whose tiles are not sorted score
low, especially with large tiles.
"""

from __future__ import annotations

import functools
import itertools
import math

from .board import ACTIONS, Board, rows_of, slide

_CROWDED = 6
"""With more empty cells than this, the search ignores the new tile, because it is slow and there is no danger yet."""


def best_action(board: Board, size: int, two_probability: float) -> str | None:
    """Return the move with the highest expected score, or None if no tile can move.

    Args:
        two_probability: probability that a new tile is a 2, not a 4.
    """
    best: tuple[float, str] | None = None
    for action in ACTIONS:
        new_board, _ = slide(board, size, action)
        if new_board == board:
            continue
        score = _expected_score(new_board, size, two_probability)
        if best is None or score > best[0]:
            best = score, action
    return best[1] if best else None


def _expected_score(board: Board, size: int, two_probability: float) -> float:
    empty_cells = [cell for cell, tile in enumerate(board) if not tile]
    if not empty_cells or len(empty_cells) > _CROWDED:
        return _score(board, size)
    total = 0.0
    for cell in empty_cells:
        for tile, probability in ((2, two_probability), (4, 1 - two_probability)):
            if probability:
                new_board = (*board[:cell], tile, *board[cell + 1 :])
                total += probability * _best_score_after_move(new_board, size)
    return total / len(empty_cells)


def _best_score_after_move(board: Board, size: int) -> float:
    boards = {new_board for action in ACTIONS if (new_board := slide(board, size, action)[0]) != board}
    return max((_score(new_board, size) for new_board in boards), default=-1e6)


def _score(board: Board, size: int) -> float:
    rows = rows_of(board, size)
    return sum(map(_score_line, rows)) + sum(map(_score_line, zip(*rows, strict=True)))


@functools.lru_cache(maxsize=2**17)
def _score_line(line: Board) -> float:
    ranks = [tile.bit_length() - 1 if tile else 0 for tile in line]
    merges = sum(a == b != 0 for a, b in itertools.pairwise(ranks))
    falls = sum(max(0, a**4 - b**4) for a, b in itertools.pairwise(ranks))
    rises = sum(max(0, b**4 - a**4) for a, b in itertools.pairwise(ranks))
    height = sum(math.pow(rank, 3.5) for rank in ranks)
    return 270 * ranks.count(0) + 700 * merges - 47 * min(falls, rises) - 11 * height
