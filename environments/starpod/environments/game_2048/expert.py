"""Expert of 2048: expectimax over a move, the tile that follows and another move.

Boards are judged line by line: empty cells and equal neighbours are good, tiles that do not rise or fall towards one
end are bad, the more so the larger they are.
"""

from __future__ import annotations

import functools
import itertools
import math

from .board import ACTIONS, Board, rows_of, slide

_CROWDED = 6
"""Empty cells from which on the tile that follows is not looked at: there is no danger yet, and it would take long."""


def best_action(board: Board, size: int, two_probability: float) -> str | None:
    """The move with the best expected judgement; None where nothing can move."""
    best: tuple[float, str] | None = None
    for action in ACTIONS:
        after, _ = slide(board, size, action)
        if after == board:
            continue
        worth = _expected(after, size, two_probability)
        if best is None or worth > best[0]:
            best = worth, action
    return best[1] if best else None


def _expected(board: Board, size: int, two_probability: float) -> float:
    """The judgement of a board to which a tile will be added, and which will be moved once more."""
    empty = [cell for cell, tile in enumerate(board) if not tile]
    if not empty or len(empty) > _CROWDED:
        return _judge(board, size)
    total = 0.0
    for cell in empty:
        for tile, probability in ((2, two_probability), (4, 1 - two_probability)):
            if probability:
                filled = (*board[:cell], tile, *board[cell + 1 :])
                total += probability * _after_best_move(filled, size)
    return total / len(empty)


def _after_best_move(board: Board, size: int) -> float:
    boards = {after for action in ACTIONS if (after := slide(board, size, action)[0]) != board}
    return max((_judge(after, size) for after in boards), default=-1e6)


def _judge(board: Board, size: int) -> float:
    rows = rows_of(board, size)
    return sum(map(_judge_line, rows)) + sum(map(_judge_line, zip(*rows, strict=True)))


@functools.lru_cache(maxsize=2**17)
def _judge_line(line: Board) -> float:
    ranks = [tile.bit_length() - 1 if tile else 0 for tile in line]
    merges = sum(a == b != 0 for a, b in itertools.pairwise(ranks))
    falls = sum(max(0, a**4 - b**4) for a, b in itertools.pairwise(ranks))
    rises = sum(max(0, b**4 - a**4) for a, b in itertools.pairwise(ranks))
    height = sum(math.pow(rank, 3.5) for rank in ranks)
    return 270 * ranks.count(0) + 700 * merges - 47 * min(falls, rises) - 11 * height
