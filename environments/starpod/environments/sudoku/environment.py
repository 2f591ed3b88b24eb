"""Sudoku: fill the grid so that no row, column or box contains a digit twice. Every puzzle has exactly one solution."""

from __future__ import annotations

import hashlib
import random
from typing import Any

from starpod.env_server import Environment, EnvironmentSpec, Limits, Outcome

from .expert import expert_placement
from .generation import generate
from .grid import candidates, clashes, clashing, completed, unblocked
from .options import SudokuOptions
from .picture import draw, draw_html
from .reading import read_action, write_action
from .texts import GridView, cell_name, instructions


class Sudoku(Environment):
    """Sudoku of 4x4, 9x9 or 16x16 cells with the published action texts, formats and rewards."""

    spec = EnvironmentSpec(
        id="sudoku-v1",
        version="1.1.0",
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
        self.grid = self.puzzle
        self.paid: dict[int, float] = {}
        self.steps = 0
        self.feedback = ""

    @property
    def size(self) -> int:
        """Number of cells in a row. It is not part of the state, so that a forged snapshot cannot change it."""
        return self.options.width

    def step(self, action: Any) -> Outcome:
        self.steps += 1
        is_late = self.steps >= self.options.steps_allowed
        try:
            row, column, number = read_action(action if isinstance(action, str) else "", self.size)
        except ValueError as error:
            return self._refuse(f"Invalid action format: {error}", {"error": str(error)}, is_late)
        cell = (row - 1) * self.size + column - 1
        if self.puzzle[cell]:
            message = f"Cannot modify initial cell at ({row},{column})"
            return self._refuse(message, {"error": "Cannot modify initial cells"}, is_late)
        if self.grid[cell] == number:
            message = f"({row},{column}) holds {number} already"
            return self._refuse(message, {"error": message}, is_late)
        conflicts = clashes(self.grid, self.size, cell, number)
        if conflicts and self.options.conflicts == "refuse":
            digits = candidates(self.grid, self.size, cell) if not self.grid[cell] else []
            message = f"Invalid placement: {number} conflicts with {conflicts}"
            if digits:
                message += f"\n   Valid numbers for ({row},{column}): {digits}"
            info = {"error": f"Number {number} conflicts with {conflicts}", "valid_numbers": digits}
            return self._refuse(message, info, is_late)
        return self._place(cell, number, conflicts, is_late)

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

    def _place(self, cell: int, number: int, conflicts: str, late: bool) -> Outcome:
        old_number = self.grid[cell]
        self.grid = self.grid[:cell] + bytes([number]) + self.grid[cell + 1 :]
        is_correct = number == self.solution[cell] and not conflicts
        message = f"Placed {number} at {cell_name(cell, self.size)}"
        if conflicts:
            reward = self.options.invalid_reward
            self.feedback = f"⚠ {message} - conflicts with {conflicts}"
        else:
            reward = self._pay(cell)
            self.feedback = f"✓ Correct! {message}" if is_correct else f"⚠ {message} - Valid but not optimal"
        reward += sum(self._pay(peer) for peer in unblocked(self.puzzle, self.grid, self.size, cell, old_number))
        is_solved = self._solved()
        if is_solved:
            reward += self.options.solved_reward
            self.feedback += "\n🎉 Congratulations! Puzzle solved!"
        empty_count = self.grid.count(0)
        return Outcome(
            reward=reward,
            terminated=is_solved,
            truncated=late and not is_solved,
            success=True if is_solved else False if late else None,
            criteria=completed(self.puzzle, self.grid, self.size) if self.options.criteria else None,
            info={
                "correct_placement": is_correct,
                "steps_remaining": self.options.steps_allowed - self.steps,
                "cells_filled": len(self.grid) - empty_count,
                "cells_remaining": empty_count,
            },
        )

    def _pay(self, cell: int) -> float:
        """Return the reward for a digit without clashes, minus what its cell has paid before, but at least 0."""
        is_correct = self.grid[cell] == self.solution[cell]
        reward = self.options.correct_reward if is_correct else self.options.legal_reward
        old_reward = self.paid.get(cell)
        self.paid[cell] = reward if old_reward is None else max(reward, old_reward)
        return reward if old_reward is None else max(reward - old_reward, 0.0)

    def observe(self) -> str:
        return self._view().text(self.options)

    def render(self, mode: str = "text") -> str | bytes:
        view = self._view()
        match mode:
            case "png":
                return draw(self.puzzle, self.grid, self.size, view.marked)
            case "html":
                return draw_html(self.puzzle, self.grid, self.size, view.marked)
            case _:
                return view.detailed()

    def _view(self) -> GridView:
        is_marked = self.options.conflicts == "place" and self.options.show_conflicts
        cells = clashing(self.grid, self.size) if is_marked else ()
        return GridView(self.size, self.puzzle, self.grid, cells, self.feedback, self.steps)

    def instructions(self) -> str:
        return instructions(self.options)

    def valid_actions(self) -> list[str]:
        """Return every placement that is not refused, written in the longest of the accepted forms."""
        return [
            write_action(cell, number, self.size)
            for cell, digit in enumerate(self.puzzle)
            if not digit
            for number in (
                range(1, self.size + 1) if self.options.conflicts == "place" else candidates(self.grid, self.size, cell)
            )
            if number != self.grid[cell]
        ]

    def state_key(self) -> bytes:
        return hashlib.blake2b(self.puzzle + self.grid, digest_size=16).digest()

    def score(self) -> float:
        """Return the share of cells to fill that have the right digit; 1 for any complete grid without clashes."""
        if self._solved():
            return 1.0
        open_cells = [cell for cell, digit in enumerate(self.puzzle) if not digit]
        right = sum(self.grid[cell] == self.solution[cell] for cell in open_cells)
        return min(right, len(open_cells) - 1) / len(open_cells)

    def expert_action(self) -> str | None:
        if self._solved():
            return None
        free_for_all = self.options.conflicts == "place"
        placement = expert_placement(self.grid, self.solution, self.size, free_for_all=free_for_all)
        return placement and write_action(*placement, self.size)

    def _solved(self) -> bool:
        return 0 not in self.grid and (self.grid == self.solution or not clashing(self.grid, self.size))
