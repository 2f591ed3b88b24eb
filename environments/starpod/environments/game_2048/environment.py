"""2048: slide the board so that equal tiles merge, until no move is left."""

from __future__ import annotations

import math
import random
from typing import Literal

from pydantic import Field, field_validator, model_validator

from starpod.env_server import Environment, EnvironmentOptions, EnvironmentSpec, Limits, Outcome, digest

from .board import ACTIONS, Board, add_tile, moves, rows_of, slide
from .expert import best_action
from .picture import draw


class Game2048Options(EnvironmentOptions):
    """Options for the board, the end of the game, rewards and observations."""

    size: int = Field(default=4, ge=2, le=8, description="Rows and columns of a board that starts with two tiles.")
    two_probability: float = Field(default=0.9, ge=0, le=1, description="Probability that a new tile is a 2, not a 4.")
    target: int = Field(default=2048, ge=8, description="Tile that makes the game a success: a power of two.")
    end: Literal["locked", "target"] = Field(
        default="locked", description="locked: the game ends if no move is possible; target: also with the target tile."
    )
    reward: Literal["log", "raw", "target"] = Field(
        default="log",
        description="Reward of a move. log: 0.1 x log2(1 + sum of the merged tiles); raw: that sum, and -0.1 for a "
        "move that moves nothing; target: 1 for the move that makes the target.",
    )
    board: tuple[tuple[int, ...], ...] | None = Field(
        default=None, description="Initial board: rows of tiles, 0 for an empty cell. A move must be possible."
    )
    observation: Literal["full", "grid"] = Field(
        default="full", description="full: the rows, the valid moves and the score; grid: only the rows."
    )

    @field_validator("target")
    @classmethod
    def _power_of_two(cls, target: int) -> int:
        if target & (target - 1):
            raise ValueError(f"{target} is no power of two, so no tile can be it; use 64 or 2048, say")
        return target

    @field_validator("board")
    @classmethod
    def _playable(cls, rows: tuple[tuple[int, ...], ...] | None) -> tuple[tuple[int, ...], ...] | None:
        if rows is None:
            return None
        size = len(rows)
        if not 2 <= size <= 8:
            raise ValueError(f"the board has {size} rows; give it 2 to 8")
        for number, row in enumerate(rows, 1):
            if len(row) != size:
                raise ValueError(f"row {number} has {len(row)} cells; make it {size}, like the number of rows")
            for tile in row:
                if tile and (not 2 <= tile <= 2**30 or tile & (tile - 1)):
                    raise ValueError(f"row {number} has a tile {tile}; use 0 and powers of two from 2 to 2^30")
        if not moves(tuple(tile for row in rows for tile in row), size):
            raise ValueError("nothing can move on this board; leave a cell empty or put equal tiles side by side")
        return rows

    @model_validator(mode="after")
    def _consistent(self) -> Game2048Options:
        if self.board and len(self.board) != self.size and self.changed("size"):
            raise ValueError(f"the board has {len(self.board)} rows and size says {self.size}; leave size out")
        max_tile = max((tile for row in self.board or () for tile in row), default=0)
        if max_tile >= self.target:
            raise ValueError(f"the board holds {max_tile} already; raise target above it")
        if self.target > 2 ** (self.width**2 + 1):
            raise ValueError(f"a board of {self.width} x {self.width} holds no tile {self.target}; lower target")
        return self

    @property
    def width(self) -> int:
        """Number of rows, which is also the number of columns."""
        return len(self.board) if self.board else self.size


class Game2048(Environment):
    """The game 2048. The seed determines the first two tiles, and the dynamics seed determines all later tiles."""

    spec = EnvironmentSpec(
        id="game_2048-v1",
        version="1.0.0",
        title="2048: merge equal tiles",
        actions=ACTIONS,
        observation_modes=("full", "grid"),
        render_modes=("text", "png"),
        limits=Limits(max_turns=1000, max_actions_per_turn=1, max_actions=1000),
    )
    Options = Game2048Options
    options: Game2048Options

    board: Board
    points: int
    """Sum of all merged tiles so far."""

    def reset(self, rng: random.Random) -> None:
        options = self.options
        if options.board is not None:
            self.board = tuple(tile for row in options.board for tile in row)
        else:
            self.board = (0,) * options.size**2
            for _ in range(2):
                self.board = add_tile(self.board, rng, options.two_probability)
        self.points = 0

    def step(self, action: str) -> Outcome:
        options = self.options
        new_board, points = slide(self.board, options.width, action)
        if new_board == self.board:
            reward = -0.1 if options.reward == "raw" else 0.0
            return Outcome(reward, success=self._reached() or None, valid=False, effective=False)
        had_reached = self._reached()
        self.board = add_tile(new_board, self.dynamics, options.two_probability)
        self.points += points
        has_reached = self._reached()
        is_over = self._over()
        match options.reward:
            case "raw":
                reward = float(points)
            case "log":
                reward = 0.1 * math.log2(points + 1)
            case "target":
                reward = float(has_reached and not had_reached)
        return Outcome(reward, terminated=is_over, success=has_reached if is_over else has_reached or None)

    def _reached(self) -> bool:
        return max(self.board) >= self.options.target

    def _over(self) -> bool:
        options = self.options
        return (options.end == "target" and self._reached()) or not moves(self.board, options.width)

    def valid_actions(self) -> list[str]:
        return moves(self.board, self.options.width)

    def observe(self) -> str:
        options = self.options
        rows = [f"Row {number}: {list(row)}" for number, row in enumerate(rows_of(self.board, options.width), 1)]
        if options.observation == "grid":
            return "\n".join(rows)
        open_moves = set(moves(self.board, options.width))
        names = ", ".join(f"{number}({name})" for number, name in enumerate(ACTIONS) if name in open_moves)
        return "\n".join(
            (
                f"Current {options.target} Grid:",
                *rows,
                "",
                f"Valid Actions: {names or 'None'}.",
                f"Goal: Merge same numbers to reach {options.target}.",
                f"Current Score: {self.points}",
                "What is your next move?",
            )
        )

    def state_key(self) -> bytes:
        return digest(repr(self.board))

    def expert_action(self) -> str | None:
        return None if self._over() else best_action(self.board, self.options.width, self.options.two_probability)

    def score(self) -> float:
        """Return log2 of the largest tile, divided by log2 of the target; at most 1."""
        return min(1.0, (max(self.board).bit_length() - 1) / (self.options.target.bit_length() - 1))

    def instructions(self) -> str:
        options = self.options
        text = (
            f"You play {options.target} on a board of {options.width} x {options.width} cells. The actions are "
            f"{', '.join(ACTIONS)}: all tiles slide that way as far as they can, and two equal tiles that meet become "
            "one tile of their sum. After each move a 2 or sometimes a 4 appears in an empty cell. A move that moves "
            f"no tile is invalid. Reach a tile of {options.target}; the game is "
        )
        return text + ("won then." if options.end == "target" else "over when no tile can move any more.")

    def render(self, mode: str = "text") -> str | bytes:
        options = self.options
        if mode == "png":
            return draw(self.board, options.width, self.points, options.target)
        width = max(4, len(str(max(self.board))))
        lines = (" ".join(f"{tile or '.':>{width}}" for tile in row) for row in rows_of(self.board, options.width))
        return "\n".join(lines)
