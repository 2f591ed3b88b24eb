"""Generation of rooms by reverse play: boxes start on their targets and are pulled away, so each room is solvable."""

from __future__ import annotations

import math
import random

from starpod.env_server import OptionsError

from .options import SokobanOptions
from .room import MOVES, Board, board_of
from .solver import search

MAX_ROOMS = 2_000
"""Maximum number of rooms that one reset tries before it raises OptionsError."""
MAX_RESET_STATES = 2_500_000
"""Maximum number of states that the searches of one reset visit before it raises OptionsError. Reaching it takes about
ten seconds. For comparison, 2000 rooms of 6x6 take 100,000 states."""
MAX_REVERSE_STATES = 50_000
"""Maximum number of states of one reverse play. The published rooms need a few hundred. On large boards, the play ends
at this number of states. Its room is solvable nevertheless."""
TURN = 0.35
"""Probability that the random walk that carves a room turns at a step."""
CARVINGS = (
    ((0, -1), (0, 0), (0, 1)),
    ((-1, 0), (0, 0), (1, 0)),
    ((0, -1), (0, 0), (1, 0)),
    ((0, -1), (0, 0), (1, -1), (1, 0)),
    ((0, 0), (0, 1), (1, 0)),
)
"""Shapes that the random walk carves around a cell, as (row, column) offsets: bars, corners and a block."""


def generate(rng: random.Random, options: SokobanOptions) -> tuple[Board, int, frozenset[int]]:
    """Draw a solvable room.

    Returns:
        Board, player and boxes.

    Raises:
        OptionsError: no room within MAX_ROOMS and MAX_RESET_STATES had a solution of the required length.
    """
    rows, columns, boxes = options.rows, options.columns, options.boxes
    min_length, max_length = options.min_solution, options.max_solution
    rooms = states = 0
    while rooms < MAX_ROOMS and states < MAX_RESET_STATES:
        rooms += 1
        floor = _carve(rng, rows, columns)
        if len(floor) < 2 * boxes + 1:
            continue
        width = columns + 1
        cells = [row * width + column for row, column in sorted(floor)]
        player, *targets = rng.sample(cells, boxes + 1)
        text = ["#" * columns] * rows
        for cell in cells:
            row, column = divmod(cell, width)
            text[row] = text[row][:column] + ("O" if cell in targets else "_") + text[row][column + 1 :]
        board = Board("\n".join(text))
        result, state_count = _play_in_reverse(board, player, tuple(targets), options.search_depth)
        states += state_count
        if result is None:
            continue
        player, box_cells, displacement = result
        player = _move_player(rng, board, player, box_cells, displacement)
        if min_length or max_length:
            plan, state_count = search(board, player, box_cells)
            states += state_count
            if not isinstance(plan, list):
                continue
            if not (min_length or 0) <= len(plan) <= (max_length or math.inf):
                continue
        return board_of(board.text), player, box_cells
    raise OptionsError(
        f"none of {rooms} rooms had a solution of {min_length or 1} to "
        f"{max_length or 'any number of'} moves: widen min_solution and max_solution, "
        "or change rows, columns, boxes or search_depth"
    )


def _carve(rng: random.Random, rows: int, columns: int) -> set[tuple[int, int]]:
    """Carve floor cells (row, column) along a random walk inside the outer wall."""
    steps = tuple(MOVES.values())
    direction = rng.choice(steps)
    row, column = rng.randrange(1, rows - 1), rng.randrange(1, columns - 1)
    floor = set()
    for _ in range(int(1.7 * (rows + columns))):
        if rng.random() < TURN:
            direction = rng.choice(steps)
        row = min(max(row + direction[0], 1), rows - 2)
        column = min(max(column + direction[1], 1), columns - 2)
        for down, right in rng.choice(CARVINGS):
            if 0 < row + down < rows - 1 and 0 < column + right < columns - 1:
                floor.add((row + down, column + right))
    return floor


def _play_in_reverse(
    board: Board, player: int, targets: tuple[int, ...], search_depth: int
) -> tuple[tuple[int, frozenset[int], int] | None, int]:
    """Pull all boxes away from the targets, by depth-first search.

    The score of a state is the number of changes from one box to another, times the sum of the boxes' distances from
    their targets.

    Returns:
        The state with the highest score, as player, boxes and sum of distances (None if no state has every box off the
        targets), and the number of visited states.
    """
    floor = board.floor
    deltas = tuple(board.deltas.values())
    home = [board.coordinate(target) for target in targets]
    best, best_score = None, 0
    states: set[tuple[int, frozenset[int]]] = set()
    # Player, boxes in the order of their targets, index of the last pulled box, changes of box, remaining moves.
    stack = [(player, targets, -1, 0, search_depth - 2)]
    while stack and len(states) < MAX_REVERSE_STATES:
        player, boxes, last_box, changes, steps_left = stack.pop()
        key = (player, frozenset(boxes))
        if key in states:
            continue
        states.add(key)
        if changes and board.targets.isdisjoint(key[1]):
            distance = sum(
                abs(row - to_row) + abs(column - to_column)
                for (row, column), (to_row, to_column) in zip(map(board.coordinate, boxes), home, strict=True)
            )
            if changes * distance > best_score:
                best, best_score = (player, key[1], distance), changes * distance
        if steps_left <= 0:
            continue
        walks, pulls = [], []
        for delta in deltas:
            next_cell, previous_cell = player + delta, player - delta
            if next_cell not in floor or next_cell in key[1]:
                continue
            if previous_cell in key[1]:
                box = boxes.index(previous_cell)
                pulled_boxes = (*boxes[:box], player, *boxes[box + 1 :])
                pulls.append((next_cell, pulled_boxes, box, changes + (box != last_box), steps_left - 1))
                walks.append((next_cell, boxes, last_box, changes, steps_left - 1))
            else:
                pulls.append((next_cell, boxes, last_box, changes, steps_left - 1))
        stack += reversed(pulls + walks)
    return best, len(states)


def _move_player(rng: random.Random, board: Board, player: int, boxes: frozenset[int], displacement: int) -> int:
    """Move the player by up to three cells. Without this, every room would start with the player right behind a box."""
    path = {player}
    chance = 0.8 if displacement == 1 else 0.5
    while len(path) <= 3 and rng.random() < chance:
        neighbours = [player + delta for delta in board.deltas.values()]
        cells = [cell for cell in neighbours if cell in board.floor and cell not in boxes and cell not in path]
        if not cells:
            break
        player = rng.choice(cells)
        path.add(player)
        chance = 0.5
    return player
