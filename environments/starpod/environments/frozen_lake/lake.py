"""The tables of a map: targets of moves, outcomes of arriving, and observations."""

from __future__ import annotations

import functools

from pydantic import Field, model_validator

from starpod.env_server import EnvironmentOptions, Outcome, digest

from .maps import ACTIONS, moves_on

_MOVED = Outcome()
_FELL = Outcome(terminated=True, success=False)


class LakeSymbols(EnvironmentOptions):
    """The characters that show the board."""

    player: str = Field(default="P", description="The player on ice.")
    ice: str = Field(default="_", description="Ice, including the start.")
    hole: str = Field(default="O", description="A hole.")
    goal: str = Field(default="G", description="The goal.")
    player_in_hole: str = Field(default="X", description="The player in a hole.")
    player_on_goal: str = Field(default="√", description="The player on the goal.")
    edge: str = Field(default="#", description="Tiles beyond the border, in the observation `local`.")

    @model_validator(mode="after")
    def _distinct(self) -> LakeSymbols:
        things: dict[str, str] = {}
        for thing, symbol in self:
            if len(symbol) != 1 or not symbol.isprintable() or symbol.isspace():
                raise ValueError(f"{thing} is {symbol!r}; give it one visible character")
            if symbol in things:
                raise ValueError(f"{things[symbol]} and {thing} are both {symbol!r}; use different characters")
            things[symbol] = thing
        return self


class Lake:
    """The tables of a map. Observations and state keys are computed on first use.

    Attributes:
        ways: for each action and position, the three possible targets of a move: after a slip to the previous action
            in ACTIONS, without a slip, and after a slip to the next action.
        before, straight: thresholds for a uniform draw. Below `before`, the move goes to the first target; else, below
            `straight`, to the second target; else to the third.
    """

    def __init__(
        self,
        rows: tuple[str, ...],
        success_rate: float,
        goal_reward: float,
        observation: str,
        symbols: LakeSymbols,
    ) -> None:
        self.map = rows
        self.tiles = "".join(rows)
        self.columns = len(rows[0])
        self.start, self.goal = self.tiles.index("S"), self.tiles.index("G")
        self.observation, self.symbols = observation, symbols
        self.ways = moves_on(len(rows), self.columns)
        self.arrivals = [_FELL if tile == "H" else _MOVED for tile in self.tiles]
        self.arrivals[self.goal] = _arrival(goal_reward)
        self.slippery = success_rate < 1
        self.before = (1 - success_rate) / 2
        self.straight = self.before + success_rate
        self.texts: list[str | None] = [None] * len(self.tiles)
        self.keys: list[bytes | None] = [None] * len(self.tiles)
        self._board = self.tiles.translate(str.maketrans("SFHG", 2 * symbols.ice + symbols.hole + symbols.goal))

    def is_open(self, position: int) -> bool:
        """Return whether the episode continues at this position."""
        return self.tiles[position] in "SF"

    def describe(self, position: int) -> str:
        """Return the observation at this position."""
        match self.observation:
            case "grid":
                text = "\n".join(self.grid(position))
            case "coord":
                text = self._coordinates(position)
            case "grid_coord":
                grid = "\n".join(self.grid(position))
                text = f"Coordinates: \n{self._coordinates(position)}\nGrid Map: \n{grid}"
            case _:
                text = self._neighbourhood(position)
        self.texts[position] = text
        return text

    def key(self, position: int) -> bytes:
        """Return the state key at this position."""
        key = self.keys[position] = digest("\n".join((*self.map, str(position))))
        return key

    def grid(self, position: int) -> list[str]:
        """Return the rows of the board in symbols."""
        board = self._board[:position] + self._player(position) + self._board[position + 1 :]
        return [board[start : start + self.columns] for start in range(0, len(board), self.columns)]

    def framed(self, position: int) -> str:
        """Return the board for people: in symbols, widely spaced and with a frame."""
        rule = "─" * (2 * self.columns + 1)
        rows = (f"│ {' '.join(row)} │" for row in self.grid(position))
        return "\n".join((f"┌{rule}┐", *rows, f"└{rule}┘"))

    def _player(self, position: int) -> str:
        symbols = self.symbols
        return {"H": symbols.player_in_hole, "G": symbols.player_on_goal}.get(self.tiles[position], symbols.player)

    def _at(self, place: int) -> tuple[int, int]:
        return divmod(place, self.columns)

    def _coordinates(self, position: int) -> str:
        player = {"H": "Player in hole", "G": "Player on goal"}.get(self.tiles[position], "Player")
        lines = [
            f"Board size: {len(self.map)} rows x {self.columns} cols (zero-indexed).",
            f"Start: {self._at(self.start)}",
            f"Goal: {self._at(self.goal)}",
            f"{player}: {self._at(position)}",
        ]
        if holes := [str(self._at(cell)) for cell, tile in enumerate(self.tiles) if tile == "H"]:
            lines.append(f"Holes: {', '.join(holes)}")
        return "\n".join(lines)

    def _neighbourhood(self, position: int) -> str:
        (row, column), (goal_row, goal_column) = self._at(position), self._at(self.goal)
        vertical = "Down" if goal_row > row else "Up" if goal_row < row else "-"
        horizontal = "Right" if goal_column > column else "Left" if goal_column < column else "-"
        line: list[str | int] = [self._player(position), row, column]
        line += [self.symbols.goal, goal_row, goal_column, vertical, horizontal]
        for action in ACTIONS:
            target = self.ways[action][position][1]
            line.append(self.symbols.edge if target == position else self._board[target])
        return " ".join(map(str, line))


@functools.lru_cache(maxsize=64)
def _arrival(goal_reward: float) -> Outcome:
    return Outcome(reward=goal_reward, terminated=True, success=True)


@functools.lru_cache(maxsize=4096)
def lake_of(
    rows: tuple[str, ...], success_rate: float, goal_reward: float, observation: str, symbols: LakeSymbols
) -> Lake:
    """Return the tables of a map. All sessions on the map share them.

    Args:
        rows: rows of S (start), F (ice), H (hole) and G (goal).
        success_rate: probability that a move goes in the chosen direction, above 0 and up to 1.
        goal_reward: reward of reaching the goal.
        observation: form of observations, as in the option `observation`.
    """
    return Lake(rows, success_rate, goal_reward, observation, symbols)
