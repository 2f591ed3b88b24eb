"""Doors in a row, each with a sign and one right action. The horizon is long, as only the last door is rewarded.

starpod train benchmarks/training/jobs/doors.yaml
"""

from __future__ import annotations

import random

from pydantic import Field

from starpod.env_server import Environment, EnvironmentOptions, EnvironmentSpec, Limits, Outcome, digest

RIGHT = {"red": "Left", "blue": "Right", "green": "Up", "black": "Down", "white": "Left", "gold": "Up"}
"""The right action for each sign. A policy has to learn it."""


class DoorsOptions(EnvironmentOptions):
    fewest: int = Field(3, ge=1, le=32, description="Doors at least.")
    most: int = Field(8, ge=1, le=32, description="Doors at most.")
    note: bool = Field(False, description="The last sign is told at the beginning alone; the door itself is dark.")


class Doors(Environment):
    """A row of doors. Each opens for its right action and stays closed for any other."""

    spec = EnvironmentSpec(
        id="doors-v1",
        version="1.0.0",
        title="Doors in a row",
        actions=("Left", "Right", "Up", "Down"),
        limits=Limits(max_turns=12, max_actions_per_turn=1),
    )
    Options = DoorsOptions
    options: DoorsOptions

    def reset(self, rng: random.Random) -> None:
        count = rng.randint(self.options.fewest, max(self.options.fewest, self.options.most))
        self.signs = [rng.choice(sorted(RIGHT)) for _ in range(count)]
        self.begun = False

    def step(self, action: object) -> Outcome:
        self.begun = True
        if action == RIGHT[self.signs[0]]:
            self.signs.pop(0)
        is_over = not self.signs
        return Outcome(reward=float(is_over), terminated=is_over, success=True if is_over else None)

    def render(self, mode: str = "text") -> str:
        if not self.signs:
            return "The end."
        is_dark = self.options.note and len(self.signs) == 1
        text = f"{len(self.signs)} {'dark' if is_dark else self.signs[0]}"
        return f"{text} note {self.signs[-1]}" if self.options.note and not self.begun else text

    def state_key(self) -> bytes:
        return digest(" ".join(self.signs))

    def expert_action(self) -> str | None:
        return RIGHT[self.signs[0]] if self.signs else None
