"""Texts of Sudoku: the instructions, and the grid in the three forms of observations."""

from __future__ import annotations

import math
from collections.abc import Collection
from typing import NamedTuple

from .grid import Grid, candidates
from .options import SudokuOptions

LISTED_CELLS = 10
"""`with_feedback` lists candidates when at most this many cells are empty."""


class GridView(NamedTuple):
    """The current state of a grid, for display."""

    size: int
    puzzle: Grid
    grid: Grid
    marked: Collection[int]
    """Cells to mark as clashing."""
    feedback: str
    """Result of the last action."""
    steps: int
    """Number of actions taken."""

    def text(self, options: SudokuOptions) -> str:
        """Return the observation in the form that the options select."""
        match options.observation:
            case "simple":
                return self._simple()
            case "detailed":
                return self.detailed()
            case _:
                return self._with_feedback(options)

    def _rows(self, cells: list[str], gap: str, rule: int) -> str:
        """Arrange cells in lines, with bars and dashed lines between the boxes. A dashed line has `rule` dashes."""
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
        size, width = self.size, len(str(self.size))
        cells = [f"{digit or '.':>{width}}" for digit in self.grid]
        return self._rows(cells, " ", size * (width + 1) + math.isqrt(size) - 1)

    def detailed(self) -> str:
        """Return the grid with marks for initial and clashing digits, a legend, and the result of the last action."""
        size, width = self.size, len(str(self.size))
        cells = []
        for cell, digit in enumerate(self.grid):
            left, right = "**" if cell in self.marked else "[]" if self.puzzle[cell] else "  "
            cells.append(f"{left}{digit or '.':>{width}}{right}")
        banner = "=" * 50
        rows = self._rows(cells, "", size * (width + 2) + math.isqrt(size) - 1)
        lines = [banner, "SUDOKU PUZZLE", banner, rows, ""]
        lines.append("Legend: [N]=initial cell, N=user-placed, *N*=conflict, .=empty")
        if self.feedback:
            lines += ["", self.feedback]
        return "\n".join(lines)

    def _with_feedback(self, options: SudokuOptions) -> str:
        grid, size = self.grid, self.size
        lines = [self.detailed()]
        if self.marked:
            lines += ["", "⚠ CONFLICTS DETECTED:"]
            lines += [f"  - Cell {cell_name(cell, size)}: {grid[cell]}" for cell in sorted(self.marked)]
        empty_cells = [cell for cell, digit in enumerate(grid) if not digit]
        lists_numbers = options.show_valid_numbers and len(empty_cells) <= LISTED_CELLS
        if empty_cells and (lists_numbers or options.show_candidates):
            lines += ["", "💡 VALID NUMBERS FOR EMPTY CELLS:"]
            choices = ((cell, candidates(grid, size, cell)) for cell in empty_cells)
            lines += [f"  - {cell_name(cell, size)}: {numbers}" for cell, numbers in choices if numbers]
        initial, filled = len(grid) - self.puzzle.count(0), len(grid) - len(empty_cells)
        lines += ["", f"Progress: {filled}/{len(grid)} cells filled ({initial} initial, {filled - initial} placed)"]
        lines.append(f"Steps: {self.steps}/{options.steps_allowed}")
        return "\n".join(lines)


def cell_name(cell: int, size: int) -> str:
    """Return row and column of a cell, from 1, as a text."""
    return f"({cell // size + 1},{cell % size + 1})"


def instructions(options: SudokuOptions) -> str:
    """Return the rules, with a description of the observations."""
    size = options.width
    side = math.isqrt(size)
    if options.observation == "simple":
        legend = "Empty cells are dots."
    else:
        legend = "Given digits stand in [brackets] and cannot be changed, your own stand alone, empty cells are dots."
        if options.conflicts == "place" and options.show_conflicts:
            legend += " Digits that clash stand between *asterisks*."
    if options.conflicts == "refuse":
        clash = "A digit that clashes with its row, column or box is refused"
    else:
        clash = "A digit that clashes with its row, column or box is written down all the same, and has to be mended"
    return (
        f"Sudoku on a grid of {size} rows and {size} columns. Fill every empty cell so that each row, each column "
        f"and each {side}x{side} box holds every number from 1 to {size} exactly once. "
        f"{legend} Rows and columns are counted from 1 at the top left. Place one number at a time, written as "
        f"'place {size} at row 2 col 3', or in short as row, column, number: '2,3,{size}'. "
        f"{clash}; a number of your own may be overwritten. "
        # Limits of the episode may be lower. They are not mentioned here, because the caller sets them.
        f"After {options.steps_allowed} actions at the latest the puzzle counts as failed."
    )
