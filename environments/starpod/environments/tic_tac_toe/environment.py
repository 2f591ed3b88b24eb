"""Tic-tac-toe against the environment's opponent, or with the caller playing both sides."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Literal

from pydantic import Field

from starpod.env_server import INVALID, Environment, EnvironmentOptions, EnvironmentSpec, Limits, Outcome

from .board import CELLS, best_cells, draw_opening, free_cells, is_over, take, to_move, value, winning_line
from .picture import draw


class TicTacToeOptions(EnvironmentOptions):
    """Options for the opponent, the starting position, and the form of observations."""

    opponent: Literal["random", "expert", "none"] = Field(
        default="random",
        description="random: any free cell; expert: perfect play, one of the best moves; none: the caller plays both "
        "sides in turn, as the agents X and O.",
    )
    side: Literal["X", "O", "either"] = Field(
        default="either", description="The caller's side if there is an opponent; either: drawn. X moves first."
    )
    opening: int = Field(
        default=0,
        ge=0,
        le=4,
        description="Random moves before the game begins. One more is made if it is not the caller's turn then.",
    )
    observation: Literal["grid", "line"] = Field(
        default="grid", description="grid: three rows, free cells by their numbers; line: one line of marks."
    )


class TicTacToe(Environment):
    """Tic-tac-toe. The seed determines side and opening, and the dynamics seed determines the opponent's moves."""

    spec = EnvironmentSpec(
        id="tic_tac_toe-v1",
        version="1.0.0",
        title="Tic-tac-toe",
        actions=CELLS,
        observation_modes=("grid", "line"),
        render_modes=("text", "png"),
        limits=Limits(max_turns=9, max_actions_per_turn=1),
    )
    Options = TicTacToeOptions
    options: TicTacToeOptions

    def reset(self, rng: random.Random) -> None:
        self.board = draw_opening(rng, self.options.opening)
        self.side = ""
        if self.options.opponent != "none":
            self.side = rng.choice("XO") if self.options.side == "either" else self.options.side
            if to_move(self.board) != self.side:
                self.board = draw_opening(rng, self.options.opening + 1)
        self.first = to_move(self.board)
        self.worth = _sign(value(self.board))

    def step(self, action: str) -> Outcome:
        cell = CELLS.index(action)
        if self.board[cell] != ".":
            return INVALID
        self.board = take(self.board, cell)
        if winning_line(self.board):
            return self._end(1.0)
        if self.side and not is_over(self.board):
            self._move_opponent()
            if winning_line(self.board):
                return self._end(-1.0)
        return self._end(0.0) if is_over(self.board) else Outcome()

    def agent_id(self) -> str:
        return "" if self.side else to_move(self.board)

    def observe(self) -> str:
        board = self.board
        if self.options.observation == "line":
            return " ".join((self._player(), *board))
        cells = [number if mark == "." else mark for number, mark in zip(CELLS, board, strict=True)]
        rows = "\n".join(" ".join(cells[row : row + 3]) for row in (0, 3, 6))
        if line := winning_line(board):
            return f"{board[line[0]]} has three in a row.\n{rows}"
        return f"{f'You are {self._player()}.' if '.' in board else 'It is a draw.'}\n{rows}"

    def instructions(self) -> str:
        who = "You play against an opponent." if self.options.opponent != "none" else "X and O move in turn."
        form = "Free cells are shown by their numbers."
        if self.options.observation == "line":
            form = "You see one line: your mark, then the nine cells, row by row; a free one is a dot."
        return (
            f"Tic-tac-toe: get three of your marks in a row, a column or a diagonal. {who} X begins. An action is the "
            f"number of the cell that you take: 1 to 3 are the top row, 7 to 9 the bottom row. {form}"
        )

    def valid_actions(self) -> Sequence[str]:
        free_cells = [name for name, mark in zip(CELLS, self.board, strict=True) if mark == "."]
        return [] if is_over(self.board) else free_cells

    def state_key(self) -> bytes:
        return f"{self._player()}{self.board}{self.first}{self.worth}".encode()

    def expert_action(self) -> str | None:
        return next((CELLS[cell] for cell in best_cells(self.board)), None)

    def score(self) -> float:
        """Return 1 after success, 0.9 while perfect play leads to a result no worse than at the start, else 0."""
        return (1.0 if is_over(self.board) else 0.9) * self._keeps_result()

    def render(self, mode: str = "text") -> str | bytes:
        return draw(self.board) if mode == "png" else self.observe()

    def _player(self) -> str:
        return self.side or to_move(self.board)

    def _move_opponent(self) -> None:
        cells = best_cells(self.board) if self.options.opponent == "expert" else free_cells(self.board)
        self.board = take(self.board, self.dynamics.choice(cells))

    def _end(self, reward: float) -> Outcome:
        return Outcome(reward=reward, terminated=True, success=self._keeps_result())

    def _keeps_result(self) -> bool:
        """Return whether the result of perfect play (win, draw or loss) is no worse for the caller than at the start.

        If the caller plays both sides, the result must be equal, because a better result for one side is worse for the
        other.
        """
        result = _sign(value(self.board)) * (1 if to_move(self.board) == self.first else -1)
        return result == self.worth or bool(self.side and result > self.worth)


def _sign(worth: int) -> int:
    return (worth > 0) - (worth < 0)
