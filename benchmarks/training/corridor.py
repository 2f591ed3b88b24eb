"""A corridor of rooms that each require one right action, so that the exact credit of every turn is known.

starpod train benchmarks/training/jobs/corridor.yaml algorithm.advantage=mt_grpo
"""

from __future__ import annotations

import random

from pydantic import Field

from starpod.env_server import Environment, EnvironmentOptions, EnvironmentSpec, Limits, Outcome, digest

RIGHT = {"red": "Left", "blue": "Right", "green": "Up", "black": "Down", "white": "Left", "gold": "Up"}
"""The right action for each sign. A policy has to learn it."""


class CorridorOptions(EnvironmentOptions):
    rooms: int = Field(4, ge=1, le=16, description="Rooms, and turns of an episode.")
    locked: bool = Field(False, description="Ends at the first wrong action, and pays at the last room alone.")
    graded: bool = Field(False, description="Pays for every room passed, where it is locked, too.")


class Corridor(Environment):
    """A corridor whose rooms have a sign and take one action. A wrong action ends the episode only if it is locked."""

    spec = EnvironmentSpec(
        id="corridor-v1",
        version="1.0.0",
        title="A corridor of signs",
        actions=("Left", "Right", "Up", "Down"),
        limits=Limits(max_turns=16, max_actions_per_turn=1),
    )
    Options = CorridorOptions
    options: CorridorOptions

    def reset(self, rng: random.Random) -> None:
        self.signs = [rng.choice(sorted(RIGHT)) for _ in range(self.options.rooms)]
        self.passed: list[bool] = []

    def step(self, action: object) -> Outcome:
        self.passed.append(action == RIGHT[self.signs[len(self.passed)]])
        won, last = all(self.passed), len(self.passed) == len(self.signs)
        locked = self.options.locked
        is_over = last or (locked and not won)
        return Outcome(
            reward=float(won and last) if locked and not self.options.graded else self.passed[-1] / len(self.signs),
            terminated=is_over,
            success=won if is_over else None,
            criteria={f"room {room}": right for room, right in enumerate(self.passed, 1)},
        )

    def render(self, mode: str = "text") -> str:
        room = len(self.passed)
        return f"{room + 1} {self.signs[room]}" if room < len(self.signs) else "The end."

    def state_key(self) -> bytes:  # actions in earlier rooms do not affect later ones
        return digest(" ".join([str(len(self.passed)), *self.signs]))

    def score(self) -> float:
        return sum(self.passed) / len(self.signs)

    def expert_action(self) -> str:
        return RIGHT[self.signs[len(self.passed)]]


class DarkCorridor(Corridor):
    """A corridor whose signs are visible only after `Look`, which takes a turn. A policy may guess instead."""

    spec = EnvironmentSpec(
        id="dark_corridor-v1",
        version="1.0.0",
        title="A dark corridor of signs",
        actions=(*Corridor.spec.actions, "Look"),
        limits=Corridor.spec.limits,
    )

    def reset(self, rng: random.Random) -> None:
        super().reset(rng)
        self.lit = False

    def step(self, action: object) -> Outcome:
        self.lit = action == "Look"
        return Outcome() if self.lit else super().step(action)

    def render(self, mode: str = "text") -> str:
        text = super().render(mode)
        return text if self.lit or len(self.passed) == len(self.signs) else f"{len(self.passed) + 1} dark"

    def state_key(self) -> bytes:
        return digest(" ".join([str(self.lit), str(len(self.passed)), *self.signs]))

    def expert_action(self) -> str:
        return super().expert_action() if self.lit else "Look"
