"""A walk over slippery ice to the goal, around the holes: Gymnasium's dynamics, RAGEN's observations.

A step is a table look-up. The tables of a map are computed once and shared by all sessions on it.
"""

from __future__ import annotations

import functools
import random
from typing import Literal

from pydantic import Field, field_validator, model_validator

from starpod.env_server import Environment, EnvironmentOptions, EnvironmentSpec, Limits, Outcome

from .expert import best_actions
from .lake import Lake, LakeSymbols, lake_of
from .maps import ACTIONS, distances_to_goal, draw_map
from .picture import TILE, draw

_BLOCKED = Outcome(effective=False)


class FrozenLakeOptions(EnvironmentOptions):
    """Options for the map, the slips, and the form of observations."""

    size: int = Field(default=4, ge=2, le=16, description="Rows and columns of a drawn map.")
    frozen_probability: float = Field(
        default=0.9,
        ge=0.5,
        le=1,
        description="Probability that a tile of a drawn map is ice and not a hole. RAGEN's paper: 0.8.",
    )
    success_rate: float = Field(
        default=0.8,
        gt=0,
        le=1,
        description="Probability that a move goes in the chosen direction. Otherwise it slips to one of the two sides "
        "at right angles. 1: no slips. RAGEN's paper and Gymnasium: 1/3.",
    )
    goal_reward: float = Field(default=1.0, description="Reward of reaching the goal.")
    map: tuple[str, ...] | None = Field(
        default=None,
        description="Rows of S (start), F (ice), H (hole) and G (goal), instead of a drawn map; a path must "
        "join one S and one G.",
    )
    observation: Literal["grid", "coord", "grid_coord", "local"] = Field(
        default="grid",
        description="grid: the board in symbols; coord: coordinates; grid_coord: both; local: a short line with "
        "positions and adjacent tiles.",
    )
    tile_pixels: int = Field(default=TILE, ge=8, le=TILE, description="Edge of a tile in a picture.")
    symbols: LakeSymbols = Field(
        default=LakeSymbols(),
        description="Characters for player, ice, hole, goal, player_in_hole, player_on_goal, edge.",
    )

    @field_validator("map")
    @classmethod
    def _walkable(cls, rows: tuple[str, ...] | None) -> tuple[str, ...] | None:
        if rows is None:
            return None
        if not 1 <= len(rows) <= 32 or not 1 <= len(rows[0]) <= 32:
            raise ValueError(f"the map has {len(rows)} rows; give it 1 to 32 rows of 1 to 32 tiles")
        for number, row in enumerate(rows):
            if len(row) != len(rows[0]):
                raise ValueError(f"row {number} has {len(row)} tiles, row 0 has {len(rows[0])}; make them equal")
            if unknown_tiles := set(row) - set("SFHG"):
                raise ValueError(f"row {number} has {min(unknown_tiles)!r}; use only S, F, H and G")
        tiles = "".join(rows)
        for tile, name in (("S", "start"), ("G", "goal")):
            if tiles.count(tile) != 1:
                raise ValueError(f"the map has {tiles.count(tile)} tiles {tile}; it needs one {name}")
        if distances_to_goal(rows)[tiles.index("S")] is None:
            raise ValueError("no path leads from S to G; take holes away between them")
        return rows

    @model_validator(mode="after")
    def _map_or_size(self) -> FrozenLakeOptions:
        if self.map and (unused_options := self.changed("frozen_probability", "size")):
            raise ValueError(f"{' and '.join(unused_options)} only affect drawn maps: leave them out, or leave out map")
        return self


class FrozenLake(Environment):
    """A frozen lake. An episode ends in a hole or at the goal.

    The seed determines the map, and the dynamics seed determines the slips.
    """

    spec = EnvironmentSpec(
        id="frozen_lake-v1",
        version="1.0.0",
        title="Frozen lake",
        actions=ACTIONS,
        observation_modes=("grid", "coord", "grid_coord", "local"),
        render_modes=("text", "png"),
        limits=Limits(max_turns=5, max_actions_per_turn=5, max_actions=10),
    )
    Options = FrozenLakeOptions
    options: FrozenLakeOptions

    map: tuple[str, ...]
    position: int
    """Row * columns + column."""
    _cached_lake: Lake | None = None

    def reset(self, rng: random.Random) -> None:
        options = self.options
        self.map = options.map or draw_map(rng, options.size, options.frozen_probability)
        self.position = self._shared_lake().start

    def step(self, action: str) -> Outcome:
        lake = self._cached_lake or self._shared_lake()
        position = self.position
        targets = lake.ways[action][position]
        if lake.slippery:
            draw = (self._dynamics or self.dynamics).random()
            target = targets[0] if draw < lake.before else targets[1] if draw < lake.straight else targets[2]
        else:
            target = targets[1]
        if target == position:
            return _BLOCKED
        self.position = target
        return lake.arrivals[target]

    def observe(self) -> str:
        lake = self._cached_lake or self._shared_lake()
        return lake.texts[self.position] or lake.describe(self.position)

    def state_key(self) -> bytes:
        lake = self._cached_lake or self._shared_lake()
        return lake.keys[self.position] or lake.key(self.position)

    def expert_action(self) -> str | None:
        lake = self._cached_lake or self._shared_lake()
        return best_actions(self.map, self.options.success_rate)[self.position] if lake.is_open(self.position) else None

    def score(self) -> float:
        distances = distances_to_goal(self.map)
        lake = self._cached_lake or self._shared_lake()
        distance, total = distances[self.position], distances[lake.start]
        return 0.0 if distance is None or total is None else max(0.0, 1 - distance / total)

    def instructions(self) -> str:
        return _instructions(self.options)

    def render(self, mode: str = "text") -> str | bytes:
        lake = self._cached_lake or self._shared_lake()
        if mode == "png":
            return draw(lake.tiles, lake.columns, self.position, self.options.tile_pixels)
        return lake.framed(self.position)

    def _shared_lake(self) -> Lake:
        options = self.options
        lake = self._cached_lake = lake_of(
            self.map, options.success_rate, options.goal_reward, options.observation, options.symbols
        )
        return lake


@functools.lru_cache(maxsize=256)
def _instructions(options: FrozenLakeOptions) -> str:
    symbols = options.symbols
    rows, columns = (len(options.map), len(options.map[0])) if options.map else (options.size, options.size)
    text = [
        f"You stand on a frozen lake of {rows} rows and {columns} columns. Walk over the ice to the goal, one tile per "
        "action, and keep out of the holes: falling into one ends the episode without a reward. Reaching the goal "
        f"earns {options.goal_reward:g}. The border of the lake holds you in place.",
        f"The actions are {', '.join(ACTIONS)}. Down leads to the next row, Right to the next column; both count "
        "from 0 at the top left.",
    ]
    if options.success_rate < 1:
        side = (1 - options.success_rate) / 2
        text.append(
            f"The ice is slippery: a move goes where you want with probability {options.success_rate:.3g}, and with "
            f"probability {side:.3g} each to one of the two sides at right angles to it."
        )
    match options.observation:
        case "coord":
            text.append("You are told where the start, the goal, the holes and you are, as (row, column).")
        case "grid_coord":
            text.append("You are told where everything is, as (row, column), and shown the board.")
        case "local":
            text.append(
                "You see one line: your symbol, your row and column; the goal's symbol, row and column; whether the "
                "goal lies Up or Down, and Left or Right (- for neither); then the tiles to your "
                f"{', '.join(ACTIONS)}, where {symbols.edge} is beyond the border."
            )
    if options.observation != "coord":
        text.append(
            f"Symbols: {symbols.player} you, {symbols.ice} ice, {symbols.hole} hole, {symbols.goal} goal, "
            f"{symbols.player_in_hole} you in a hole, {symbols.player_on_goal} you on the goal."
        )
    return "\n".join(text)
