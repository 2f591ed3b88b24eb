"""Sudoku: fill the grid so that no row, column or box holds a digit twice. Every puzzle has exactly one solution."""

from __future__ import annotations

import hashlib
import math
import random
from typing import Any, Literal

from pydantic import Field, ValidationInfo, field_validator, model_validator

from starpod.env_server import Environment, EnvironmentOptions, EnvironmentSpec, Limits, Outcome

from .generation import generate
from .picture import draw, draw_html
from .reading import read_action, read_rows
from .solver import Grid, peers, solve_given, units

LISTED_CELLS = 10
"""`with_feedback` lists the candidates once so many cells are empty, or fewer."""


class SudokuOptions(EnvironmentOptions):
    """Which puzzle, how it is shown and what a placement pays."""

    size: Literal[4, 9, 16] = Field(9, description="Cells of a row, and of a column and a box.")
    difficulty: Literal["easy", "medium", "hard"] = Field(
        "easy", description="Share of the cells that start empty: 40 %, 50 % or 60 %."
    )
    puzzle: str | tuple[tuple[int, ...], ...] | None = Field(
        None,
        description="A puzzle of your own with one solution: rows of numbers, 0 for an empty cell, or (4x4, 9x9) one "
        "text of digits, `.` or 0 for an empty cell.",
    )
    solution: str | tuple[tuple[int, ...], ...] | None = Field(
        None, description="Which solution is meant, for a `puzzle` that has several."
    )
    observation: Literal["simple", "detailed", "with_feedback"] = Field(
        "with_feedback",
        description="The bare grid; with given cells marked, a legend and what the last placement did; with "
        "candidates, progress and steps too.",
    )
    conflicts: Literal["refuse", "place"] = Field(
        "refuse",
        description="What happens to a digit that clashes with its row, column or box: refuse leaves the cell "
        "as it was, place writes it down.",
    )
    show_conflicts: bool = Field(True, description="Mark clashing digits, as `*N*`.")
    show_valid_numbers: bool = Field(
        True, description="Name the valid numbers of all empty cells once at most 10 are left."
    )
    show_candidates: bool = Field(False, description="List the valid numbers of all empty cells from the start.")
    max_steps: int | None = Field(
        None, ge=1, le=100_000, description="Actions after which the episode is truncated; by default one per cell."
    )
    correct_reward: float = Field(1.0, description="Paid for the right digit.")
    legal_reward: float = Field(0.5, description="Paid for a digit that clashes with nothing but is not the right one.")
    invalid_reward: float = Field(
        -0.1, description="Paid for a clash, a given cell or an action that is not understood."
    )
    solved_reward: float = Field(10.0, description="Paid on top for the placement that completes the grid.")

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
        fields = type(self).model_fields
        if self.size not in (size, fields["size"].default):
            raise ValueError(f"puzzle has {size} rows, the option size says {self.size}: leave it out")
        if self.difficulty != fields["difficulty"].default:
            raise ValueError("difficulty is for generated puzzles: leave it out where there is a puzzle")
        solve_given(_flat(self.puzzle), _flat(self.solution))
        return self

    @property
    def width(self) -> int:
        """Cells of a row."""
        return len(self.puzzle) if self.puzzle else self.size

    @property
    def steps_allowed(self) -> int:
        """Actions after which the episode is cut."""
        return self.max_steps or self.width * self.width

    def given(self) -> tuple[Grid, Grid] | None:
        """The explicit puzzle and its solution; None where one is to be generated."""
        puzzle = _flat(self.puzzle)
        return (puzzle, solve_given(puzzle, _flat(self.solution))) if puzzle else None


def _flat(rows: str | tuple[tuple[int, ...], ...] | None) -> Grid:
    assert not isinstance(rows, str)
    return bytes(digit for row in rows or () for digit in row)


class Sudoku(Environment):
    """Sudoku of 4x4, 9x9 or 16x16 cells with the published action texts, formats and rewards."""

    spec = EnvironmentSpec(
        id="sudoku-v1",
        version="1.0.0",
        title="Sudoku: complete the grid",
        grammar="place N at row R col C | place N at (R,C) | place N at R,C | N at R,C | (R,C,N) | R,C,N",
        observation_modes=("simple", "detailed", "with_feedback"),
        render_modes=("text", "html", "png"),
        limits=Limits(max_turns=256, max_actions_per_turn=5),
        slow_reset=True,
    )
    Options = SudokuOptions

    options: SudokuOptions

    def reset(self, rng: random.Random) -> None:
        options = self.options
        self.puzzle, self.solution = options.given() or generate(rng, options.size, options.difficulty)
        self.size = options.width
        self.grid = self.puzzle
        self.paid: dict[int, float] = {}
        self.steps = 0
        self.feedback = ""

    def step(self, action: Any) -> Outcome:
        self.steps += 1
        late = self.steps >= self.options.steps_allowed
        try:
            row, column, number = read_action(action if isinstance(action, str) else "", self.size)
        except ValueError as error:
            return self._refuse(f"Invalid action format: {error}", {"error": str(error)}, late)
        cell = (row - 1) * self.size + column - 1
        if self.puzzle[cell]:
            message = f"Cannot modify initial cell at ({row},{column})"
            return self._refuse(message, {"error": "Cannot modify initial cells"}, late)
        if self.grid[cell] == number:
            message = f"({row},{column}) holds {number} already"
            return self._refuse(message, {"error": message}, late)
        clashes = self._clashes(cell, number)
        if clashes and self.options.conflicts == "refuse":
            valid = self._candidates(cell) if not self.grid[cell] else []
            message = f"Invalid placement: {number} conflicts with {clashes}"
            if valid:
                message += f"\n   Valid numbers for ({row},{column}): {valid}"
            info = {"error": f"Number {number} conflicts with {clashes}", "valid_numbers": valid}
            return self._refuse(message, info, late)
        return self._place(cell, number, clashes, late)

    def _refuse(self, message: str, info: dict[str, Any], late: bool) -> Outcome:
        self.feedback = f"❌ {message}"
        return Outcome(
            reward=self.options.invalid_reward,
            truncated=late,
            success=False if late else None,
            valid=False,
            effective=False,
            info=info,
        )

    def _place(self, cell: int, number: int, clashes: str, late: bool) -> Outcome:
        before = self.grid[cell]
        self.grid = self.grid[:cell] + bytes([number]) + self.grid[cell + 1 :]
        correct = number == self.solution[cell] and not clashes
        place = f"Placed {number} at ({cell // self.size + 1},{cell % self.size + 1})"
        if clashes:
            reward = self.options.invalid_reward
            self.feedback = f"⚠ {place} - conflicts with {clashes}"
        else:
            reward = self._pay(cell)
            self.feedback = f"✓ Correct! {place}" if correct else f"⚠ {place} - Valid but not optimal"
        reward += sum(self._pay(peer) for peer in self._freed(cell, before))
        solved = self._solved()
        if solved:
            reward += self.options.solved_reward
            self.feedback += "\n🎉 Congratulations! Puzzle solved!"
        empty = self.grid.count(0)
        return Outcome(
            reward=reward,
            terminated=solved,
            truncated=late and not solved,
            success=True if solved else False if late else None,
            info={
                "correct_placement": correct,
                "steps_remaining": self.options.steps_allowed - self.steps,
                "cells_filled": len(self.grid) - empty,
                "cells_remaining": empty,
            },
        )

    def _pay(self, cell: int) -> float:
        """The reward of a digit that clashes with nothing: overwriting a cell pays for the best it ever held, once."""
        correct = self.grid[cell] == self.solution[cell]
        worth = self.options.correct_reward if correct else self.options.legal_reward
        paid = self.paid.get(cell)
        self.paid[cell] = worth if paid is None else max(worth, paid)
        return worth if paid is None else max(worth - paid, 0.0)

    def _freed(self, cell: int, number: int) -> list[int]:
        """Cells whose own digit clashed with nothing but the number that has just left this cell."""
        if not number:
            return []
        same = [peer for peer in sorted(peers(self.size)[cell]) if self.grid[peer] == number]
        return [peer for peer in same if not self.puzzle[peer] and not self._clashes(peer, number)]

    def observe(self) -> str:
        match self.options.observation:
            case "simple":
                return self._simple()
            case "detailed":
                return self._detailed()
            case _:
                return self._with_feedback()

    def render(self, mode: str = "text") -> str | bytes:
        match mode:
            case "png":
                return draw(self.puzzle, self.grid, self.size, self._marked())
            case "html":
                return draw_html(self.puzzle, self.grid, self.size, self._marked())
            case _:
                return self._detailed()

    def instructions(self) -> str:
        options = self.options
        size = options.width
        side = math.isqrt(size)
        if options.observation == "simple":
            shown = "Empty cells are dots."
        else:
            shown = (
                "Given digits stand in [brackets] and cannot be changed, your own stand alone, empty cells are dots."
            )
            if options.conflicts == "place" and options.show_conflicts:
                shown += " Digits that clash stand between *asterisks*."
        if options.conflicts == "refuse":
            clash = "A digit that clashes with its row, column or box is refused"
        else:
            clash = (
                "A digit that clashes with its row, column or box is written down all the same, and has to be mended"
            )
        return (
            f"Sudoku on a grid of {size} rows and {size} columns. Fill every empty cell so that each row, each column "
            f"and each {side}x{side} box holds every number from 1 to {size} exactly once. "
            f"{shown} Rows and columns are counted from 1 at the top left. Place one number at a time, written as "
            f"'place {size} at row 2 col 3', or in short as row, column, number: '2,3,{size}'. "
            f"{clash}; a number of your own may be overwritten. "
            # The limits of the episode may be narrower; whoever set them tells them.
            f"After {options.steps_allowed} actions at the latest the puzzle counts as failed."
        )

    def valid_actions(self) -> list[str]:
        """Every placement that is not refused, in the longest form."""
        return [
            self._write(cell, number)
            for cell, given in enumerate(self.puzzle)
            if not given
            for number in (range(1, self.size + 1) if self.options.conflicts == "place" else self._candidates(cell))
            if number != self.grid[cell]
        ]

    def state_key(self) -> bytes:
        return hashlib.blake2b(self.puzzle + self.grid, digest_size=16).digest()

    def score(self) -> float:
        """Share of the cells to fill that hold the right digit; 1 for any complete grid without clashes."""
        if self._solved():
            return 1.0
        open_cells = [cell for cell, digit in enumerate(self.puzzle) if not digit]
        right = sum(self.grid[cell] == self.solution[cell] for cell in open_cells)
        return min(right, len(open_cells) - 1) / len(open_cells)

    def expert_action(self) -> str | None:
        """The right digit for the first cell that can take it, wrong digits first; None where there is none.

        Where wrong digits block each other, one of them makes way for a third digit.
        """
        if self._solved():
            return None
        wrong = [cell for cell, digit in enumerate(self.grid) if digit and digit != self.solution[cell]]
        todo = wrong + [cell for cell, digit in enumerate(self.grid) if not digit]
        free_for_all = self.options.conflicts == "place"
        for cell in todo:
            if free_for_all or not self._clashes(cell, self.solution[cell]):
                return self._write(cell, self.solution[cell])
        for cell in todo:
            blockers = [peer for peer in peers(self.size)[cell] if self.grid[peer] == self.solution[cell]]
            if len(blockers) == 1:
                for number in self._candidates(blockers[0]):
                    if number != self.grid[blockers[0]]:
                        return self._write(blockers[0], number)
        return None

    def _write(self, cell: int, number: int) -> str:
        return f"place {number} at row {cell // self.size + 1} col {cell % self.size + 1}"

    # --- the rules ---------------------------------------------------------------------------------------------------

    def _clashes(self, cell: int, number: int) -> str:
        """The row, column and box that hold the number already, as a text; empty if none does."""
        names = ("row", "column", "box")
        here = units(self.size)[cell]
        side = math.isqrt(self.size)
        found = set()
        for peer in peers(self.size)[cell]:
            if self.grid[peer] == number:
                there = units(self.size)[peer]
                found |= {name for name, a, b in zip(names, here, there, strict=True) if a == b}
        labels = {
            "row": f"row {here[0] + 1}",
            "column": f"column {here[1] + 1}",
            "box": f"box ({here[0] // side + 1},{here[1] // side + 1})",
        }
        return ", ".join(labels[name] for name in names if name in found)

    def _candidates(self, cell: int) -> list[int]:
        taken = {self.grid[peer] for peer in peers(self.size)[cell]}
        return [number for number in range(1, self.size + 1) if number not in taken]

    def _clashing(self) -> set[int]:
        """Cells whose digit occurs again in their row, column or box."""
        grid = self.grid
        return {
            cell
            for cell, near in enumerate(peers(self.size))
            if grid[cell] and any(grid[peer] == grid[cell] for peer in near)
        }

    def _solved(self) -> bool:
        return 0 not in self.grid and (self.grid == self.solution or not self._clashing())

    # --- what it looks like ------------------------------------------------------------------------------------------

    def _marked(self) -> set[int]:
        possible = self.options.conflicts == "place" and self.options.show_conflicts
        return self._clashing() if possible else set()

    def _rows(self, cells: list[str], gap: str, rule: int) -> str:
        """Lays cells out with rulers between the boxes; a ruler below a band is `rule` dashes."""
        size, side = self.size, math.isqrt(self.size)
        lines = []
        for row in range(size):
            line = cells[row * size : (row + 1) * size]
            groups = [gap.join(line[start : start + side]) for start in range(0, size, side)]
            lines.append((gap + "| ").join(groups).rstrip())
            if row % side == side - 1 and row < size - 1:
                lines.append("-" * rule)
        return "\n".join(lines)

    def _simple(self) -> str:
        size, side, width = self.size, math.isqrt(self.size), len(str(self.size))
        cells = [f"{digit or '.':>{width}}" for digit in self.grid]
        return self._rows(cells, " ", size * (width + 1) + side - 1)

    def _detailed(self) -> str:
        size, side, width = self.size, math.isqrt(self.size), len(str(self.size))
        marked = self._marked()
        cells = []
        for cell, digit in enumerate(self.grid):
            left, right = "**" if cell in marked else "[]" if self.puzzle[cell] else "  "
            cells.append(f"{left}{digit or '.':>{width}}{right}")
        banner = "=" * 50
        lines = [banner, "SUDOKU PUZZLE", banner, self._rows(cells, "", size * (width + 2) + side - 1), ""]
        lines.append("Legend: [N]=initial cell, N=user-placed, *N*=conflict, .=empty")
        if self.feedback:
            lines += ["", self.feedback]
        return "\n".join(lines)

    def _with_feedback(self) -> str:
        options, cells = self.options, len(self.grid)
        lines = [self._detailed()]
        if marked := sorted(self._marked()):
            lines += ["", "⚠ CONFLICTS DETECTED:"]
            lines += [
                f"  - Cell ({cell // self.size + 1},{cell % self.size + 1}): {self.grid[cell]}" for cell in marked
            ]
        empty = [cell for cell, digit in enumerate(self.grid) if not digit]
        few = options.show_valid_numbers and len(empty) <= LISTED_CELLS
        if empty and (few or options.show_candidates):
            lines += ["", "💡 VALID NUMBERS FOR EMPTY CELLS:"]
            for cell in empty:
                if candidates := self._candidates(cell):
                    row, column = divmod(cell, self.size)
                    lines.append(f"  - ({row + 1},{column + 1}): {candidates}")
        given = cells - self.puzzle.count(0)
        filled = cells - len(empty)
        lines += ["", f"Progress: {filled}/{cells} cells filled ({given} initial, {filled - given} placed)"]
        lines.append(f"Steps: {self.steps}/{self.options.steps_allowed}")
        return "\n".join(lines)
