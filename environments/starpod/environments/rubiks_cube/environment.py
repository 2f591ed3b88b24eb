"""The 2x2x2 Rubik's cube: turn the faces until each has one colour."""

from __future__ import annotations

import random
from typing import Literal

from pydantic import Field, field_validator, model_validator

from starpod.env_server import Environment, EnvironmentOptions, EnvironmentSpec, Limits, Outcome, digest

from .cube import ACTIONS, COLOURS, FACES, SOLVED, Cube, is_solved, turn
from .picture import draw
from .solver import MOST_TURNS, best_action, distance

_TITLES = {"U": "Up", "L": "Left", "F": "Front", "R": "Right", "B": "Back", "D": "Down"}


class RubiksCubeOptions(EnvironmentOptions):
    """Options for the scramble, the number of turns, and the form of observations."""

    scramble_depth: int = Field(
        default=1, ge=1, le=50, description="Number of random quarter turns; no turn undoes the previous one."
    )
    min_distance: int = Field(
        default=1, ge=1, le=11, description="Scramble again until the shortest solution has at least this many turns."
    )
    scramble: tuple[str, ...] | None = Field(
        default=None, description='Quarter turns to use instead of random ones, such as ["R", "U\'"].'
    )
    max_steps: int = Field(default=20, ge=1, le=10_000, description="Turns after which the episode is truncated.")
    observation: Literal["full", "net"] = Field(
        default="full", description="full: step number, named faces and actions; net: only the faces, one line each."
    )

    @field_validator("scramble")
    @classmethod
    def _known_turns(cls, scramble: tuple[str, ...] | None) -> tuple[str, ...] | None:
        for action in scramble or ():
            if action not in ACTIONS:
                raise ValueError(f"{action!r} is no quarter turn; use {', '.join(ACTIONS)}")
        if scramble is not None and (len(scramble) > 200 or is_solved(scrambled(scramble))):
            raise ValueError("a scramble is at most 200 turns that leave the cube unsolved; change it")
        return scramble

    @model_validator(mode="after")
    def _consistent(self) -> RubiksCubeOptions:
        if self.scramble and (unused_options := self.changed("scramble_depth", "min_distance")):
            raise ValueError(
                f"{' and '.join(unused_options)} only affect drawn scrambles: leave them out, or leave out scramble"
            )
        if self.min_distance > self.scramble_depth:
            raise ValueError(
                f"{self.scramble_depth} turns bring no cube {self.min_distance} turns away; raise scramble_depth"
            )
        if self.min_distance > 9 and self.scramble_depth < 2 * self.min_distance:
            raise ValueError(
                f"such cubes are rare among short scrambles; set scramble_depth to {2 * self.min_distance}"
            )
        return self


def scrambled(scramble: tuple[str, ...]) -> Cube:
    """Return a solved cube after these turns."""
    cube = SOLVED
    for action in scramble:
        cube = turn(cube, action)
    return cube


class RubiksCube(Environment):
    """A Rubik's cube. The seed determines the scramble; the transitions are deterministic."""

    spec = EnvironmentSpec(
        id="rubiks_cube-v1",
        version="1.0.0",
        title="Rubik's cube, 2 x 2 x 2",
        instructions=(
            "Turn the faces of a 2 x 2 x 2 Rubik's cube until each face has a single colour. The actions are "
            f"{', '.join(ACTIONS)}: a letter turns the up, down, left, right, front or back face a quarter clockwise, "
            "as seen from outside; with ' it turns counter-clockwise. Colours are W white, O orange, G green, R red, "
            "B blue and Y yellow. Each face is shown as two rows, as on an unfolded net with the front in the middle."
        ),
        actions=ACTIONS,
        observation_modes=("full", "net"),
        render_modes=("text", "png"),
        limits=Limits(max_turns=20, max_actions_per_turn=4, max_actions=20),
        slow_reset=True,
    )
    Options = RubiksCubeOptions
    options: RubiksCubeOptions

    cube: Cube
    steps: int

    def reset(self, rng: random.Random) -> None:
        options = self.options
        cube = scrambled(options.scramble or draw_scramble(rng, options.scramble_depth))
        while options.scramble is None and (
            is_solved(cube) or (options.min_distance > 1 and distance(cube) < options.min_distance)
        ):
            cube = scrambled(draw_scramble(rng, options.scramble_depth))
        self.cube = cube
        self.steps = 0

    def step(self, action: str) -> Outcome:
        self.cube = turn(self.cube, action)
        self.steps += 1
        if is_solved(self.cube):
            return Outcome(1.0, terminated=True, success=True)
        if self.steps >= self.options.max_steps:
            return Outcome(truncated=True, success=False)
        return Outcome()

    def observe(self) -> str:
        rows = [[COLOURS[colour] for colour in self.cube[start : start + 2]] for start in range(0, 24, 2)]
        if self.options.observation == "net":
            return "\n".join(
                f"{face}: {' '.join(rows[2 * number])} / {' '.join(rows[2 * number + 1])}"
                for number, face in enumerate(FACES)
            )
        lines = ["=== Rubik's Cube 2x2 State ===", f"Step: {self.steps}/{self.options.max_steps}", ""]
        for number, face in enumerate(FACES):
            upper, lower = (f"[{', '.join(row)}]" for row in rows[2 * number : 2 * number + 2])
            lines += [f"{_TITLES[face] + f' ({face}):':<10} {upper}", f" {lower}"]
        if is_solved(self.cube):
            end = ["=== Game Over: Cube Solved! ==="]
        elif self.steps >= self.options.max_steps:
            end = ["=== Game Over: Max steps reached. ==="]
        else:
            end = ["Available Actions:", ", ".join(ACTIONS), "", "What is your next move?"]
        return "\n".join([*lines, "", *end])

    def state_key(self) -> bytes:
        return digest(self.cube.hex())

    def expert_action(self) -> str | None:
        return best_action(self.cube) if self.steps < self.options.max_steps else None

    def score(self) -> float:
        """Return 1 - (turns of a shortest solution / 14); every cube can be solved in 14 turns."""
        return 1 - distance(self.cube) / MOST_TURNS

    def render(self, mode: str = "text") -> str | bytes:
        if mode == "png":
            return draw(self.cube, "solved" if is_solved(self.cube) else f"{self.steps} turns made")
        pairs = ["".join(COLOURS[colour] for colour in self.cube[start : start + 2]) for start in range(0, 24, 2)]
        face = {name: pairs[2 * number : 2 * number + 2] for number, name in enumerate(FACES)}
        middle = [" ".join(face[name][row] for name in "LFRB") for row in range(2)]
        return "\n".join([*(f"   {pair}" for pair in face["U"]), *middle, *(f"   {pair}" for pair in face["D"])])


def draw_scramble(rng: random.Random, depth: int) -> tuple[str, ...]:
    """Draw quarter turns uniformly, except for the turn that would undo the previous one."""
    turns: list[str] = []
    while len(turns) < depth:
        action = rng.choice(ACTIONS)
        if not turns or {action, turns[-1]} != {action[0], action[0] + "'"}:
            turns.append(action)
    return tuple(turns)
