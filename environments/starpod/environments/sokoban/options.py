"""Options of Sokoban, the symbols that show a room, and the parsing of layouts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationInfo, field_validator, model_validator

from starpod.env_server import EnvironmentOptions

from .room import Board, board_of
from .solver import Unsolvable, solve

Symbol = Annotated[str, Field(min_length=1, max_length=1)]


class Symbols(BaseModel):
    """The characters for the seven possible contents of a cell."""

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
        names: dict[str, str] = {}
        for name, symbol in self.legend():
            if symbol.isspace() or not symbol.isprintable():
                raise ValueError(f"the symbol of {name!r} is {symbol!r}: give one visible character")
            if symbol in names:
                raise ValueError(f"{names[symbol]!r} and {name!r} share the symbol {symbol!r}: give each its own")
            names[symbol] = name
        return self

    def legend(self) -> Iterator[tuple[str, str]]:
        """Yield pairs of meaning and symbol, such as ("box on target", "√")."""
        for name in type(self).model_fields:
            yield name.replace("_", " "), getattr(self, name)


VOCABULARIES = {
    "default": Symbols(),
    "letters": Symbols(wall="W", empty=".", target="G", box_on_target="C", box="B", player="A", player_on_target="@"),
}


class SokobanOptions(EnvironmentOptions):
    """Options of the room, of observations and of rewards."""

    rows: int = Field(6, ge=4, le=20, description="Height of the board in cells, its outer wall included.")
    columns: int = Field(6, ge=4, le=20, description="Width of the board in cells, its outer wall included.")
    boxes: int = Field(
        1, ge=1, le=8, description="Number of boxes and of targets: at most one for every four inner cells."
    )
    search_depth: int = Field(
        300,
        ge=3,
        le=1_000,
        description="Maximum depth, in moves, of the reverse play that makes a room. If it is small, boxes stay near "
        "their targets.",
    )
    min_solution: int | None = Field(
        None, ge=1, description="Keep only rooms whose shortest solution has at least this many moves."
    )
    max_solution: int | None = Field(
        None, ge=1, description="Keep only rooms whose shortest solution has at most this many moves."
    )
    layout: str | tuple[str, ...] | None = Field(
        None,
        description="Board to use instead of a drawn one: rows in the option's `symbols`, as a list or one text.",
    )
    observation: Literal["grid", "padded", "coord", "grid_coord", "local", "rgb"] = Field(
        "grid",
        description="grid: the board in symbols; padded: a blank on both sides of each; coord: coordinates; "
        "grid_coord: both; local: positions and adjacent cells, in few tokens; rgb: an image.",
    )
    symbols: Literal["default", "letters"] | Symbols = Field(
        "default",
        description="default: # _ O √ X P S; letters: W . G C B A @; or other characters for wall, empty, target, "
        "box_on_target, box, player, player_on_target.",
    )
    max_steps: int = Field(100, ge=1, le=100_000, description="Number of moves after which the episode is truncated.")
    step_reward: float = Field(-0.1, description="Reward of every move, including blocked ones.")
    box_on_reward: float = Field(1.0, description="Reward of pushing a box onto a target.")
    box_off_reward: float = Field(-1.0, description="Reward of pushing a box off a target.")
    solved_reward: float = Field(10.0, description="Additional reward of the push that solves the room.")

    @property
    def shape(self) -> tuple[int, int]:
        """Rows and columns of the board."""
        return (len(self.layout), len(self.layout[0])) if self.layout else (self.rows, self.columns)

    @property
    def vocabulary(self) -> Symbols:
        """The symbols that the options select."""
        return self.symbols if isinstance(self.symbols, Symbols) else VOCABULARIES[self.symbols]

    @field_validator("layout")
    @classmethod
    def _split(cls, value: str | tuple[str, ...] | None) -> tuple[str, ...] | None:
        return tuple(value.strip("\r\n").splitlines()) if isinstance(value, str) else value

    @field_validator("max_solution")
    @classmethod
    def _ordered(cls, value: int | None, info: ValidationInfo) -> int | None:
        min_solution = info.data.get("min_solution")
        if value is not None and min_solution is not None and value < min_solution:
            raise ValueError(f"max_solution {value} is below min_solution {min_solution}: swap them or leave one out")
        return value

    @model_validator(mode="after")
    def _check(self) -> SokobanOptions:
        if self.layout is not None:
            self._check_layout(tuple(self.layout))
            return self
        if max(self.rows, self.columns) < 5:
            raise ValueError("a 4x4 board has no room to push a box: make it at least 4x5")
        max_boxes = min(8, (self.rows - 2) * (self.columns - 2) // 4 or 1)
        if self.boxes > max_boxes:
            raise ValueError(
                f"{self.boxes} boxes do not fit a {self.rows}x{self.columns} board: "
                f"take at most {max_boxes}, or a larger board"
            )
        return self

    def _check_layout(self, layout: tuple[str, ...]) -> None:
        changed_names = self.changed("rows", "columns", "boxes")
        for name, size in (("rows", len(layout)), ("columns", len(layout[0]) if layout else 0)):
            if name in changed_names and getattr(self, name) != size:
                raise ValueError(
                    f"layout has {size} {name}, the option {name} says {getattr(self, name)}: leave it out"
                )
        for name in self.changed("min_solution", "max_solution"):
            raise ValueError(f"{name} chooses among generated rooms: leave it out if you give a layout")
        board, player, boxes = read_layout(layout, self.vocabulary)
        if "boxes" in changed_names and len(boxes) != self.boxes:
            raise ValueError(f"layout has {len(boxes)} boxes, the option boxes says {self.boxes}: leave it out")
        if boxes == board.targets:
            raise ValueError("every box of the layout is on a target already: move one off")
        if isinstance(solve(board, player, boxes), Unsolvable):
            raise ValueError("no sequence of moves solves the layout: give each box a way to a target")


def read_layout(layout: Sequence[str], symbols: Symbols) -> tuple[Board, int, frozenset[int]]:
    """Parse a layout into board, player and boxes. Raises ValueError with the first invalid cell."""
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
                legend = ", ".join(f"{symbol} {name}" for symbol, name in kinds.items())
                raise ValueError(f"row {row}, column {column} of the layout is {symbol!r}; the symbols are: {legend}")
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
