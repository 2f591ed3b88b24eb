"""Options of Sudoku, and the parsing of explicit puzzles."""

from __future__ import annotations

import math
import re
from typing import Any, Literal

from pydantic import Field, ValidationInfo, field_validator, model_validator

from starpod.env_server import EnvironmentOptions

from .grid import Grid
from .solver import solve_given


class SudokuOptions(EnvironmentOptions):
    """Options for the puzzle, the form of observations, and the rewards."""

    size: Literal[4, 9, 16] = Field(9, description="Number of cells in a row, a column and a box.")
    difficulty: Literal["easy", "medium", "hard"] = Field(
        "easy", description="Share of the cells that start empty: 40 %, 50 % or 60 %."
    )
    puzzle: str | tuple[tuple[int, ...], ...] | None = Field(
        None,
        description="Puzzle to use instead of a generated one; it has one solution. Rows of numbers with 0 for an "
        "empty cell, or (4x4, 9x9) one text of digits with `.` or 0 for an empty cell.",
    )
    solution: str | tuple[tuple[int, ...], ...] | None = Field(
        None, description="The intended solution of a `puzzle` that has several."
    )
    observation: Literal["simple", "detailed", "with_feedback"] = Field(
        "with_feedback",
        description="simple: only the grid; detailed: with marks for initial cells, a legend and the result of the "
        "last action; with_feedback: also candidates, progress and steps.",
    )
    conflicts: Literal["refuse", "place"] = Field(
        "refuse",
        description="A digit that clashes with its row, column or box is not placed (refuse) or placed all the same "
        "(place).",
    )
    show_conflicts: bool = Field(True, description="Mark clashing digits, as `*N*`.")
    show_valid_numbers: bool = Field(
        True, description="List the valid numbers of all empty cells when at most 10 cells are empty."
    )
    show_candidates: bool = Field(False, description="List the valid numbers of all empty cells from the start.")
    max_steps: int | None = Field(
        None, ge=1, le=100_000, description="Actions after which the episode is truncated; by default one per cell."
    )
    criteria: bool = Field(
        False, description="Report which rows, columns and boxes are complete, except for initially complete ones."
    )
    correct_reward: float = Field(1.0, description="Reward of the right digit.")
    legal_reward: float = Field(0.5, description="Reward of a wrong digit that does not clash.")
    invalid_reward: float = Field(-0.1, description="Reward of a clash, an initial cell or a malformed action.")
    solved_reward: float = Field(10.0, description="Additional reward of the placement that completes the grid.")

    @field_validator("puzzle", "solution")
    @classmethod
    def _read(cls, value: Any, info: ValidationInfo) -> Any:
        return value if value is None else read_rows(value, str(info.field_name))

    @model_validator(mode="after")
    def _check(self) -> SudokuOptions:
        if self.puzzle is None:
            if self.solution is not None:
                raise ValueError("solution goes with a puzzle: give both or neither")
            return self
        assert not isinstance(self.puzzle, str)
        size = len(self.puzzle)
        if self.size != size and self.changed("size"):
            raise ValueError(f"puzzle has {size} rows, the option size says {self.size}: leave it out")
        if self.changed("difficulty"):
            raise ValueError("difficulty is for generated puzzles: leave it out if you give a puzzle")
        solve_given(_flat(self.puzzle), _flat(self.solution))
        return self

    @property
    def width(self) -> int:
        """Number of cells in a row."""
        return len(self.puzzle) if self.puzzle else self.size

    @property
    def steps_allowed(self) -> int:
        """Number of actions after which the episode is truncated."""
        return self.max_steps or self.width * self.width

    def given(self) -> tuple[Grid, Grid] | None:
        """Return the explicit puzzle and its solution, or None if a puzzle should be generated."""
        puzzle = _flat(self.puzzle)
        return (puzzle, solve_given(puzzle, _flat(self.solution))) if puzzle else None


def _flat(rows: str | tuple[tuple[int, ...], ...] | None) -> Grid:
    assert not isinstance(rows, str)
    return bytes(digit for row in rows or () for digit in row)


def read_rows(value: str | tuple[tuple[int, ...], ...], name: str) -> tuple[tuple[int, ...], ...]:
    """Parse a puzzle from rows or a text. Raises ValueError that mentions `name`, the name of the option."""
    if isinstance(value, str):
        cells = "".join(value.split())
        size = math.isqrt(len(cells))
        if size not in (4, 9) or size * size != len(cells) or not re.fullmatch(r"[0-9.]+", cells):
            raise ValueError(
                f"{name} is {len(cells)} characters: write the 16 or 81 cells as digits, with . or 0 for an empty one"
            )
        digits = [int(cell) if cell != "." else 0 for cell in cells]
        value = tuple(tuple(digits[start : start + size]) for start in range(0, size * size, size))
    size = len(value)
    if size not in (4, 9, 16):
        raise ValueError(f"{name} has {size} rows: make it 4, 9 or 16")
    for index, row in enumerate(value, 1):
        if len(row) != size:
            raise ValueError(f"row {index} of {name} has {len(row)} cells: make it {size}, like the number of rows")
        for digit in row:
            if not 0 <= digit <= size:
                raise ValueError(f"row {index} of {name} holds {digit}: use 0 for an empty cell, or 1 to {size}")
    return value
