"""A walk over slippery ice to the goal, around the holes: Gymnasium's dynamics, RAGEN's observations.

A step is a table look-up. What follows from a map alone is worked out once and shared by all sessions on that map.
"""

from __future__ import annotations

import functools
import hashlib
import random
from collections import deque
from typing import Literal

import numpy as np
from PIL import Image, ImageDraw
from pydantic import Field, field_validator, model_validator

from starpod.env_server.drawing import png
from starpod.env_server.environment import Environment, EnvironmentOptions, EnvironmentSpec, Limits, Outcome

ACTIONS = ("Left", "Down", "Right", "Up")
"""In a circle, so that a slip goes to the action before or after. The order is Gymnasium's."""

_STEPS = ((0, -1), (1, 0), (0, 1), (-1, 0))
_DISCOUNT = 0.9
"""The expert's: looks as far as the 10 actions of an episode. Closer to 1 it is safer, and too slow to arrive."""

_MOVED = Outcome()
_BLOCKED = Outcome(effective=False)
_FELL = Outcome(terminated=True, success=False)


class FrozenLakeSymbols(EnvironmentOptions):
    """One character for each thing on the board."""

    player: str = Field(default="P", description="The player on ice.")
    ice: str = Field(default="_", description="Ice, the start included.")
    hole: str = Field(default="O", description="A hole.")
    goal: str = Field(default="G", description="The goal.")
    player_in_hole: str = Field(default="X", description="The player in a hole.")
    player_on_goal: str = Field(default="√", description="The player on the goal.")
    edge: str = Field(default="#", description="Beyond the board; only the observation `local` shows it.")

    @model_validator(mode="after")
    def _distinct(self) -> FrozenLakeSymbols:
        seen: dict[str, str] = {}
        for thing, symbol in self:
            if len(symbol) != 1 or not symbol.isprintable() or symbol.isspace():
                raise ValueError(f"{thing} is {symbol!r}; give it one visible character")
            if symbol in seen:
                raise ValueError(f"{seen[symbol]} and {thing} are both {symbol!r}; give each a character of its own")
            seen[symbol] = thing
        return self


class FrozenLakeOptions(EnvironmentOptions):
    """The lake, how slippery it is and how it is shown."""

    size: int = Field(default=4, ge=2, le=16, description="Rows and columns of a drawn map.")
    frozen_probability: float = Field(
        default=0.9,
        ge=0.5,
        le=1,
        description="How likely each tile of a drawn map is ice; else it is a hole. RAGEN also used 0.8.",
    )
    success_rate: float = Field(
        default=0.8,
        gt=0,
        le=1,
        description="How likely a move goes where it was meant to; else it slips to one of the two sides at right "
        "angles, each as likely. 1: never slips. Gymnasium's own default is 1/3.",
    )
    goal_reward: float = Field(default=1.0, description="Paid for reaching the goal.")
    map: tuple[str, ...] | None = Field(
        default=None, description="Rows of S (start), F (ice), H (hole) and G (goal), instead of a drawn map."
    )
    observation: Literal["grid", "coord", "grid_coord", "local"] = Field(
        default="grid",
        description="grid: the board in symbols; coord: coordinates; grid_coord: both; local: one short line with "
        "where the player and the goal are and what the four neighbouring tiles hold.",
    )
    symbols: FrozenLakeSymbols = Field(default=FrozenLakeSymbols(), description="The characters that stand for things.")

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
            if strange := set(row) - set("SFHG"):
                raise ValueError(f"row {number} has {min(strange)!r}; use only S, F, H and G")
        tiles = "".join(rows)
        for tile, name in (("S", "start"), ("G", "goal")):
            if tiles.count(tile) != 1:
                raise ValueError(f"the map has {tiles.count(tile)} tiles {tile}; it needs one {name}")
        if _distances(rows)[tiles.index("S")] is None:
            raise ValueError("no path leads from S to G; take holes away between them")
        return rows

    @model_validator(mode="after")
    def _map_or_size(self) -> FrozenLakeOptions:
        fields = type(self).model_fields
        idle = [name for name in ("frozen_probability", "size") if getattr(self, name) != fields[name].default]
        if self.map and idle:
            raise ValueError(f"{' and '.join(idle)} only shape drawn maps; leave out that or map")
        return self


class FrozenLake(Environment):
    """The seed fixes the map, the dynamics seed the slips. A hole or the goal ends the episode."""

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
    """Row times columns plus column."""
    _cached_lake: Lake | None = None

    def reset(self, rng: random.Random) -> None:
        options = self.options
        self.map = options.map or _draw_map(rng, options.size, options.frozen_probability)
        self.position = self._share_lake().start

    def step(self, action: str) -> Outcome:
        lake = self._cached_lake or self._share_lake()
        here = self.position
        ways = lake.ways[action][here]
        if lake.slippery:
            draw = (self._dynamics or self.dynamics).random()
            there = ways[0] if draw < lake.before else ways[1] if draw < lake.straight else ways[2]
        else:
            there = ways[1]
        if there == here:
            return _BLOCKED
        self.position = there
        return lake.arrivals[there]

    def observe(self) -> str:
        lake = self._cached_lake or self._share_lake()
        return lake.texts[self.position] or lake.describe(self.position)

    def state_key(self) -> bytes:
        lake = self._cached_lake or self._share_lake()
        return lake.keys[self.position] or lake.digest(self.position)

    def expert_action(self) -> str | None:
        lake = self._cached_lake or self._share_lake()
        return _policy(self.map, self.options.success_rate)[self.position] if lake.is_open(self.position) else None

    def score(self) -> float:
        distances = _distances(self.map)
        lake = self._cached_lake or self._share_lake()
        left, whole = distances[self.position], distances[lake.start]
        return 0.0 if left is None or whole is None else max(0.0, 1 - left / whole)

    def instructions(self) -> str:
        return _instructions(self.options)

    def render(self, mode: str = "text") -> str | bytes:
        lake = self._cached_lake or self._share_lake()
        return png(_draw(lake, self.position)) if mode == "png" else lake.framed(self.position)

    def _share_lake(self) -> Lake:
        options = self.options
        lake = self._cached_lake = _lake(
            self.map, options.success_rate, options.goal_reward, options.observation, options.symbols
        )
        return lake


# --- the lake ----------------------------------------------------------------------------------------------------


class Lake:
    """A map with all that follows from it. Observations and keys are filled in as they are asked for.

    ways: action -> position -> where a move goes: slipped to the action before, straight, slipped to the action after.
    before, straight: the slip draw below which each of the first two happens.
    """

    def __init__(
        self,
        rows: tuple[str, ...],
        success_rate: float,
        goal_reward: float,
        observation: str,
        symbols: FrozenLakeSymbols,
    ) -> None:
        self.map = rows
        self.tiles = "".join(rows)
        self.columns = len(rows[0])
        self.start, self.goal = self.tiles.index("S"), self.tiles.index("G")
        self.observation, self.symbols = observation, symbols
        self.ways = _ways(len(rows), self.columns)
        arrived = Outcome(reward=goal_reward, terminated=True, success=True)
        self.arrivals = [{"H": _FELL, "G": arrived}.get(tile, _MOVED) for tile in self.tiles]
        self.slippery = success_rate < 1
        self.before = (1 - success_rate) / 2
        self.straight = self.before + success_rate
        self.texts: list[str | None] = [None] * len(self.tiles)
        self.keys: list[bytes | None] = [None] * len(self.tiles)

    def is_open(self, position: int) -> bool:
        """Whether the episode goes on at this position."""
        return self.tiles[position] in "SF"

    def describe(self, position: int) -> str:
        """The observation at this position."""
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

    def digest(self, position: int) -> bytes:
        """The state key at this position."""
        state = "\n".join((*self.map, str(position)))
        key = self.keys[position] = hashlib.blake2b(state.encode(), digest_size=16).digest()
        return key

    def grid(self, position: int) -> list[str]:
        """The rows of the board in symbols."""
        cells = [self._cell(place) for place in range(len(self.tiles))]
        cells[position] = self._player(position)
        return ["".join(cells[first : first + self.columns]) for first in range(0, len(cells), self.columns)]

    def framed(self, position: int) -> str:
        """The board in symbols, set wide and framed, for people."""
        rule = "─" * (2 * self.columns + 1)
        rows = (f"│ {' '.join(row)} │" for row in self.grid(position))
        return "\n".join((f"┌{rule}┐", *rows, f"└{rule}┘"))

    def _cell(self, place: int) -> str:
        symbols = self.symbols
        return {"H": symbols.hole, "G": symbols.goal}.get(self.tiles[place], symbols.ice)

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
        if holes := [str(self._at(place)) for place, tile in enumerate(self.tiles) if tile == "H"]:
            lines.append(f"Holes: {', '.join(holes)}")
        return "\n".join(lines)

    def _neighbourhood(self, position: int) -> str:
        (row, column), (goal_row, goal_column) = self._at(position), self._at(self.goal)
        vertical = "Down" if goal_row > row else "Up" if goal_row < row else "-"
        horizontal = "Right" if goal_column > column else "Left" if goal_column < column else "-"
        line: list[str | int] = [self._player(position), row, column]
        line += [self.symbols.goal, goal_row, goal_column, vertical, horizontal]
        for action in ACTIONS:
            there = self.ways[action][position][1]
            line.append(self.symbols.edge if there == position else self._cell(there))
        return " ".join(map(str, line))


_lake = functools.lru_cache(maxsize=4096)(Lake)


@functools.lru_cache(maxsize=64)
def _ways(rows: int, columns: int) -> dict[str, list[tuple[int, int, int]]]:
    """Where moves lead on a board of this shape: its border holds the player in place."""

    def move(place: int, action: int) -> int:
        row, column = divmod(place, columns)
        down, right = _STEPS[action % 4]
        return min(max(row + down, 0), rows - 1) * columns + min(max(column + right, 0), columns - 1)

    return {
        name: [(move(at, action - 1), move(at, action), move(at, action + 1)) for at in range(rows * columns)]
        for action, name in enumerate(ACTIONS)
    }


@functools.lru_cache(maxsize=1024)
def _distances(rows: tuple[str, ...]) -> tuple[int | None, ...]:
    """Moves to the goal from each position without a slip; None for holes and for ice that holes cut off."""
    tiles = "".join(rows)
    ways = _ways(len(rows), len(rows[0]))
    distances: list[int | None] = [None] * len(tiles)
    goal = tiles.index("G")
    distances[goal] = 0
    queue = deque([(goal, 0)])
    while queue:
        place, distance = queue.popleft()
        for action in ACTIONS:
            there = ways[action][place][1]
            if distances[there] is None and tiles[there] != "H":
                distances[there] = distance + 1
                queue.append((there, distance + 1))
    return tuple(distances)


def _draw_map(rng: random.Random, size: int, frozen_probability: float) -> tuple[str, ...]:
    """Independent tiles, then a start and a goal anywhere; again until they differ and a path joins them."""
    while True:
        tiles = ["F" if rng.random() < frozen_probability else "H" for _ in range(size * size)]
        start, goal = rng.randrange(size * size), rng.randrange(size * size)
        tiles[start], tiles[goal] = "S", "G"
        rows = tuple("".join(tiles[first : first + size]) for first in range(0, size * size, size))
        if start != goal and _distances.__wrapped__(rows)[start] is not None:
            return rows


@functools.lru_cache(maxsize=1024)
def _policy(rows: tuple[str, ...], success_rate: float) -> tuple[str, ...]:
    """The best action at each position: likely to reach the goal, and sooner rather than later."""
    return _shortest_way(rows) if success_rate == 1 else _likeliest_way(rows, success_rate)


def _shortest_way(rows: tuple[str, ...]) -> tuple[str, ...]:
    """For each position the first action that leads nearer to the goal, for moves that never slip."""
    ways, distances = _ways(len(rows), len(rows[0])), _distances(rows)
    far = len(distances)  # more than any distance

    def left(action: str, place: int) -> int:
        distance = distances[ways[action][place][1]]
        return far if distance is None else distance

    return tuple(min(ACTIONS, key=lambda action: left(action, place)) for place in range(far))


def _likeliest_way(rows: tuple[str, ...], success_rate: float) -> tuple[str, ...]:
    """The same for moves that may slip, by value iteration. Far from the goal values are tiny: errors are relative."""
    tiles = "".join(rows)
    ways = _ways(len(rows), len(rows[0]))
    targets = np.array([ways[action] for action in ACTIONS])  # action x position x (before, straight, after)
    side = (1 - success_rate) / 2
    ended = np.array([tile in "HG" for tile in tiles])
    values = np.array([float(tile == "G") for tile in tiles])
    while True:
        reached = values[targets]
        # Spelled out, because a dot product may add up in another order on another machine.
        worth = _DISCOUNT * (side * reached[..., 0] + success_rate * reached[..., 1] + side * reached[..., 2])
        best = worth.max(axis=0)
        updated = np.where(ended, values, best)
        if (np.abs(updated - values) <= 1e-9 * updated).all():
            # Not the very best alone, so that equal actions tie and the first one wins.
            return tuple(ACTIONS[first] for first in (worth >= (1 - 1e-6) * best).argmax(axis=0))
        values = updated


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


# --- the picture -------------------------------------------------------------------------------------------------

_INK = (30, 41, 66)


def _draw(lake: Lake, position: int) -> Image.Image:
    """A picture of the lake, 64 pixels a tile, fewer on large boards."""
    cell = max(16, min(64, 768 // max(len(lake.map), lake.columns)))
    margin = cell // 4
    size = (lake.columns * cell + 2 * margin, len(lake.map) * cell + 2 * margin)
    picture = Image.new("RGB", size, (96, 138, 166))
    for place, tile in enumerate(lake.tiles):
        row, column = divmod(place, lake.columns)
        at = (margin + column * cell, margin + row * cell)
        kind = f"ice {(row * 5 + column * 3) % 4}" if tile in "SF" else tile
        picture.paste(_tile(kind, cell), at)
        if tile == "S" and place != position:
            picture.paste(_tile("start", cell), at, _tile("start", cell))
        if place == position:
            player = _tile({"H": "splash", "G": "cheer"}.get(tile, "player"), cell)
            picture.paste(player, at, player)
    return picture


@functools.lru_cache(maxsize=64)
def _tile(kind: str, cell: int) -> Image.Image:
    """One tile or figure, drawn large on a grid of 100 x 100 and reduced."""
    scale = 4 * cell / 100
    canvas = Image.new("RGBA", (4 * cell, 4 * cell))
    draw = ImageDraw.Draw(canvas)

    def scaled(*points: float) -> list[float]:
        return [scale * point for point in points]

    def ellipse(left: float, top: float, right: float, bottom: float, fill: tuple[int, ...]) -> None:
        draw.ellipse(scaled(left, top, right, bottom), fill=fill)

    def line(*points: float, fill: tuple[int, ...], width: float) -> None:
        draw.line(scaled(*points), fill=fill, width=max(1, round(scale * width)), joint="curve")

    def ground() -> None:
        draw.rectangle((0, 0, canvas.width, canvas.height), fill=(150, 190, 214))
        draw.rounded_rectangle(scaled(1.5, 1.5, 98.5, 98.5), scale * 7, fill=(206, 232, 244))
        draw.rounded_rectangle(scaled(4, 4, 96, 96), scale * 6, fill=(221, 241, 249))

    def penguin(x: float, y: float) -> None:
        ellipse(x + 24, y + 84, x + 76, y + 96, (120, 164, 190, 130))
        draw.polygon(scaled(x + 30, y + 50, x + 14, y + 72, x + 32, y + 76), fill=_INK)
        draw.polygon(scaled(x + 70, y + 50, x + 86, y + 72, x + 68, y + 76), fill=_INK)
        ellipse(x + 27, y + 14, x + 73, y + 90, _INK)
        ellipse(x + 34, y + 42, x + 66, y + 87, (250, 250, 246))
        face(x, y)
        ellipse(x + 30, y + 84, x + 48, y + 93, (242, 156, 56))
        ellipse(x + 52, y + 84, x + 70, y + 93, (242, 156, 56))
        draw.rounded_rectangle(scaled(x + 29, y + 45, x + 71, y + 53), scale * 4, fill=(214, 60, 74))
        draw.polygon(scaled(x + 60, y + 51, x + 69, y + 51, x + 71, y + 68, x + 62, y + 68), fill=(190, 44, 60))

    def face(x: float, y: float) -> None:
        ellipse(x + 33, y + 22, x + 51, y + 44, (250, 250, 246))
        ellipse(x + 49, y + 22, x + 67, y + 44, (250, 250, 246))
        ellipse(x + 41, y + 28, x + 47, y + 36, _INK)
        ellipse(x + 53, y + 28, x + 59, y + 36, _INK)
        draw.polygon(scaled(x + 44, y + 38, x + 56, y + 38, x + 50, y + 46), fill=(242, 156, 56))

    def present(x: float, y: float, size: float) -> None:
        def part(left: float, top: float, right: float, bottom: float, fill: tuple[int, ...]) -> None:
            corners = (x + size * left, y + size * top, x + size * right, y + size * bottom)
            draw.rounded_rectangle(scaled(*corners), scale * size * 3, fill=fill)

        ribbon = (250, 206, 88)
        ellipse(x - size * 4, y + size * 52, x + size * 64, y + size * 66, (120, 164, 190, 130))
        part(4, 20, 56, 60, (46, 140, 104))
        part(0, 12, 60, 26, (58, 166, 124))
        part(24, 12, 36, 60, ribbon)
        for side in (-1, 1):
            left, right = sorted((x + size * 30, x + size * (30 + side * 22)))
            thickness = max(1, round(scale * size * 5))
            draw.ellipse(scaled(left, y - size * 4, right, y + size * 14), outline=ribbon, width=thickness)

    match kind:
        case "H":
            ground()
            ellipse(9, 15, 91, 91, (170, 206, 224))
            ellipse(11, 19, 89, 89, (58, 110, 148))
            ellipse(14, 25, 86, 88, (30, 66, 104))
            ellipse(24, 38, 76, 84, (20, 46, 80))
            line(28, 34, 40, 30, 50, 29, fill=(118, 168, 198), width=3)
        case "G":
            ground()
            present(20, 26, 1)
        case "start":
            for step in range(4):
                x, y = 30 + 13 * step, 66 - 13 * step
                ellipse(x - 5 + 5 * (step % 2), y - 4, x + 4 + 5 * (step % 2), y + 9, (150, 190, 212, 255))
        case "player":
            penguin(0, 0)
        case "cheer":
            ground()
            for x, y in ((14, 18), (78, 14), (88, 34), (10, 58)):
                line(x - 6, y, x + 6, y, fill=(250, 186, 60), width=3)
                line(x, y - 6, x, y + 6, fill=(250, 186, 60), width=3)
            penguin(-9, -2)
            present(54, 50, 0.68)
        case "splash":
            ellipse(26, 24, 74, 92, (140, 192, 222))
            ellipse(28, 26, 72, 90, _INK)
            face(0, 12)
            draw.chord(scaled(14, 25, 86, 88), 22, 158, fill=(30, 66, 104))
            ellipse(18, 62, 82, 78, (140, 192, 222))
            ellipse(21, 65, 79, 80, (30, 66, 104))
            for x, y in ((18, 46), (82, 44), (24, 26), (76, 24), (50, 10)):
                ellipse(x - 3, y - 5, x + 3, y + 4, (140, 192, 222))
        case _:
            ground()
            marks = (
                ((20, 40, 42, 18), (30, 46, 44, 32)),
                ((58, 78, 82, 54), (54, 66, 64, 56)),
                ((22, 80, 40, 62), (64, 34, 80, 18)),
                ((60, 30, 74, 16), (66, 40, 86, 20)),
            )[int(kind[-1])]
            for mark in marks:
                line(*mark, fill=(246, 252, 255), width=4)
    return canvas.resize((cell, cell), Image.Resampling.LANCZOS)
