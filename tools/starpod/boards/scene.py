"""Parser of Frozen Lake and Sokoban observations in any of their text formats (the option `observation`)."""

from __future__ import annotations

import functools
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

Cell = tuple[int, int]
"""Row and column, from 0 at the top left."""

STEPS: dict[str, Cell] = {"Up": (-1, 0), "Down": (1, 0), "Left": (0, -1), "Right": (0, 1)}

KINDS = frozenset({"goal", "hole", "wall", "box", "target"})
"""Kinds of things in a cell, besides the player. Kinds of the other game are in no cell."""

_LAKE = {
    "P": "player",
    "_": "ice",
    "O": "hole",
    "G": "goal",
    "X": "player hole",
    "√": "player goal",
    "#": "wall",
}
_ROOM = {
    "#": "wall",
    "_": "empty",
    "O": "target",
    "√": "box target",
    "X": "box",
    "P": "player",
    "S": "player target",
}
_MEANINGS = {
    "you": "player",
    "you in a hole": "player hole",
    "you on the goal": "player goal",
    "box on target": "box target",
    "player on target": "player target",
}
"""Kinds in a cell, keyed by the phrase that the instructions use for the cell if the phrase itself is not a kind."""

_LEGEND = re.compile(r"[Ss]ymbols: ")
_ENTRY = re.compile(r"(\S) ([a-z]+(?: [a-z]+)*)(?:, |\.)")
_BORDER = re.compile(r"where (\S) is beyond the border")
_PLACE = re.compile(r"\((\d+), (\d+)\)")
_SIZE = re.compile(r"Board size: (\d+) rows x (\d+) cols")


class CannotRead(ValueError):
    """Raised for an unknown environment or observation format. The message says what was expected."""


@dataclass(frozen=True, slots=True)
class Scene:
    """The part of a state that an observation shows. Cells outside the border of a frozen lake count as walls."""

    player: Cell
    places: Mapping[str, frozenset[Cell]]
    """Cells of each kind, for kinds whose cells are all known."""
    cells: Mapping[Cell, frozenset[str]]
    """Kinds in each known cell, without the player. An empty set is plain ice or floor."""
    towards: str
    """Kind of thing to which the player has to go: "goal" or "box"."""

    def holds(self, cell: Cell, kind: str) -> bool | None:
        """Return whether a cell contains a thing of this kind; None if the observation does not show it."""
        if kind in self.places:
            return cell in self.places[kind]
        return kind in self.cells[cell] if cell in self.cells else None

    def beside(self, direction: str, steps: int = 1) -> Cell:
        """Return the cell that is `steps` cells from the player in this direction."""
        return _step(self.player, direction, steps)

    def blocked(self, direction: str) -> bool | None:
        """Return whether a move in this direction would change nothing; None if the observation does not show it."""
        cell = self.beside(direction)
        if self.holds(cell, "wall"):
            return True
        if self.holds(cell, "box"):
            kinds = self.cells.get(self.beside(direction, 2))
            return None if kinds is None else bool(kinds & {"wall", "box"})
        return False if cell in self.cells else None

    def loose(self) -> frozenset[Cell]:
        """Return the cells of boxes that are on no target."""
        return self.places.get("box", frozenset()) - self.places.get("target", frozenset())


def family_of(environment: str) -> str:
    """Return "frozen_lake" or "sokoban" for an environment's id. Raises CannotRead for other environments."""
    family = environment.partition("-v")[0]
    if family not in ("frozen_lake", "sokoban"):
        raise CannotRead(f"reasoning is checked for frozen_lake and sokoban, not for {environment}")
    return family


@functools.lru_cache(maxsize=256)
def legend_of(family: str, instructions: str) -> dict[str, frozenset[str]]:
    """Return the kinds that each symbol stands for, from the instructions if they explain symbols, else by default."""
    default_legend = _LAKE if family == "frozen_lake" else _ROOM
    legend = dict(default_legend)
    match = _LEGEND.search(instructions)
    if match is not None:
        entries: dict[str, str] = {}
        entry = _ENTRY.match(instructions, match.end())
        while entry is not None:
            entries[entry[1]] = _MEANINGS.get(entry[2], entry[2])
            entry = _ENTRY.match(instructions, entry.end())
        border = _BORDER.search(instructions)
        wall = border[1] if border else "#"
        legend = ({wall: "wall"} if family == "frozen_lake" and wall not in entries else {}) | entries
    return {symbol: frozenset(kinds.split()) for symbol, kinds in legend.items()}


@functools.lru_cache(maxsize=4096)
def read_scene(environment: str, instructions: str, observation: str) -> Scene:
    """Parse an observation text in the format grid, coord, grid_coord or local.

    Args:
        environment: id of a frozen_lake or sokoban environment, such as "sokoban-v1".

    Raises:
        CannotRead: the environment or the format is unknown.
    """
    family = family_of(environment)
    legend = legend_of(family, instructions)
    try:
        if observation.startswith("Board size:"):
            return _read_coordinates(family, observation)
        if observation.startswith("Coordinates:"):
            return _read_grid(family, legend, observation.partition("Grid Map:")[2].split())
        lines = observation.splitlines()
        if lines and " " in lines[0]:
            return (_read_lake_line if family == "frozen_lake" else _read_room_lines)(legend, lines)
        return _read_grid(family, legend, lines)
    except (ValueError, KeyError, IndexError) as error:
        raise CannotRead(
            f"reasoning is checked against {family} observations grid, coord, grid_coord and local; this is not one of "
            f"them: {observation[:80]!r}"
        ) from error


def _read_grid(family: str, legend: Mapping[str, frozenset[str]], rows: Sequence[str]) -> Scene:
    cells = {(row, column): legend[symbol] for row, line in enumerate(rows) for column, symbol in enumerate(line)}
    (player,) = (cell for cell, kinds in cells.items() if "player" in kinds)
    if family == "frozen_lake":
        cells |= {cell: frozenset({"wall"}) for cell in _border(len(rows), len(rows[0]))}
    return _scene(family, player, cells)


def _read_coordinates(family: str, text: str) -> Scene:
    positions: dict[str, list[Cell]] = {}
    for line in text.splitlines()[1:]:
        name, _, places = line.partition(": ")
        positions[name] = [(int(row), int(column)) for row, column in _PLACE.findall(places)]
    (player,) = next(cells for name, cells in positions.items() if name.startswith("Player"))
    size = _SIZE.match(text)
    if size is None:
        raise ValueError("no size")
    rows, columns = int(size[1]), int(size[2])
    cells: dict[Cell, set[str]] = {}
    if family == "frozen_lake":
        cells = {(row, column): set() for row in range(rows) for column in range(columns)}
        cells |= {cell: {"wall"} for cell in _border(rows, columns)}
    cells.setdefault(player, set())
    names = {"Goal": "goal", "Holes": "hole", "Targets": "target", "Boxes": "box", "Boxes on target": "box"}
    for name, kind in names.items():
        for cell in positions.get(name, ()):
            cells.setdefault(cell, set()).add(kind)
    # Coordinates of a Sokoban room omit the walls: a cell that is not named is floor or wall.
    hidden_kinds = set() if family == "frozen_lake" else {"wall"}
    return _scene(family, player, {cell: frozenset(kinds) for cell, kinds in cells.items()}, hidden_kinds)


def _read_lake_line(legend: Mapping[str, frozenset[str]], lines: Sequence[str]) -> Scene:
    (line,) = lines
    symbol, row, column, _, goal_row, goal_column, _, _, *tiles = line.split()
    player = int(row), int(column)
    cells = {player: legend[symbol], (int(goal_row), int(goal_column)): frozenset({"goal"})}
    for direction, tile in zip(("Left", "Down", "Right", "Up"), tiles, strict=True):
        cells[_step(player, direction)] = legend[tile]
    return _scene("frozen_lake", player, cells, {"hole", "wall"})


def _read_room_lines(legend: Mapping[str, frozenset[str]], lines: Sequence[str]) -> Scene:
    cells: dict[Cell, frozenset[str]] = {}
    objects: dict[Cell, frozenset[str]] = {}
    player: Cell | None = None
    for line in lines:
        symbol, row, column, *fields = line.split()
        cell = int(row), int(column)
        if not fields:  # the line of a target does not say what is on the target
            objects[cell] = objects.get(cell, frozenset()) | legend[symbol]
            continue
        player = cell if player is None else player
        objects[cell] = legend[symbol]
        for direction, tile in zip(STEPS, fields[2:], strict=True):
            cells[_step(cell, direction)] = legend[tile]
    if player is None:
        raise ValueError("no player")
    return _scene("sokoban", player, cells | objects, {"wall"})


def _scene(
    family: str, player: Cell, kinds_by_cell: Mapping[Cell, frozenset[str]], hidden: Collection[str] = ()
) -> Scene:
    """Build a scene from the kinds shown in cells. hidden: kinds that may also be in cells that are not shown."""
    cells = {cell: kinds & KINDS for cell, kinds in kinds_by_cell.items()}
    places = {
        kind: frozenset(cell for cell, kinds in cells.items() if kind in kinds) for kind in KINDS if kind not in hidden
    }
    return Scene(player, places, cells, "goal" if family == "frozen_lake" else "box")


def _border(rows: int, columns: int) -> list[Cell]:
    """Return the cells around a board."""
    sides = [(row, column) for row in range(rows) for column in (-1, columns)]
    return sides + [(row, column) for row in (-1, rows) for column in range(columns)]


def _step(cell: Cell, direction: str, steps: int = 1) -> Cell:
    down, right = STEPS[direction]
    return cell[0] + steps * down, cell[1] + steps * right
