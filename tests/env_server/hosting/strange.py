"""Gymnasium environments as other packages might write them."""

from __future__ import annotations

import random
import sys
import threading
import time
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces


class Draws(gymnasium.Env[Any, Any]):
    """The base class. Its observation is a number that each of five steps draws again."""

    metadata = {"render_modes": ["ansi", "rgb_array"]}  # noqa: RUF012 - as Gymnasium has it
    observation_space: Any = spaces.Discrete(1000)
    action_space: Any = spaces.Discrete(2)

    def __init__(self, render_mode: str | None = None, highest: int = 1000, path: str = "", easy: bool = False) -> None:
        if not 1 <= highest <= 1000:
            raise ValueError(f"highest is {highest}; use 1 to 1000")
        self.render_mode, self.highest = render_mode, highest
        self.drawn = self.steps = 0

    def draw(self) -> int:
        return int(self.np_random.integers(self.highest))

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self.steps, self.drawn = 0, self.draw()
        return self.seen(), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self.steps += 1
        self.drawn = self.draw()
        return self.seen(), 1.0, self.steps >= 5, False, {"thing": object(), "mean": np.float32(0.5), "worst": np.inf}

    def seen(self) -> Any:
        return self.drawn

    def render(self) -> Any:
        if self.render_mode == "ansi":
            return f"\x1b[34;1m{self.drawn}\x1b[0m drawn"
        return np.full((20, 30, 3), self.drawn % 256, dtype=np.uint8)


class Unseeded(Draws):
    """Draws from a random stream that ignores the seed. A copy copies the stream."""

    def __init__(self, easy: bool = False, **arguments: Any) -> None:
        super().__init__(easy=easy, **arguments)
        self.own = random.Random()

    def draw(self) -> int:
        return self.own.randrange(1000)


class Uncopied(Draws):
    """Holds what cannot be copied."""

    def __init__(self, **arguments: Any) -> None:
        super().__init__(**arguments)
        self.lock = threading.Lock()


class Wild(Unseeded, Uncopied):
    """Neither repeats nor can be copied."""


class Pictures(Draws):
    """Shows a picture, a board and a sentence; takes a move and a word."""

    observation_space = spaces.Dict(
        {
            "view": spaces.Box(0, 255, (20, 30, 3), np.uint8),
            "board": spaces.Box(-np.inf, np.inf, (2, 2), np.float32),
            "say": spaces.Text(20),
        }
    )
    action_space = spaces.Dict({"move": spaces.MultiDiscrete([2, 3]), "word": spaces.Text(5, charset="ab")})

    def seen(self) -> Any:
        board = np.array([[self.drawn, 0.1], [np.inf, -1]], dtype=np.float32)
        view = np.full((20, 30, 3), self.drawn % 256, dtype=np.uint8)
        return {"view": view, "board": board, "say": f"drew {self.drawn}"}


class Late(gymnasium.Env[Any, Any]):
    observation_space: Any = spaces.Discrete(1000)
    action_space: Any = None
    max_steps = 1000

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self.action_space = spaces.Discrete(2)
        self.max_steps = 64 * int(self.np_random.integers(1, 3))
        return 0, {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        return 0, 0.0, False, False, {}


class Noisy(Draws):
    """Writes much, and cannot be made."""

    def __init__(self, **arguments: Any) -> None:
        print("Downloading a corpus ...")
        print("... failed", file=sys.stderr)
        raise OSError("there is no corpus")


class Busy(Draws):
    """Computes much before it can be made."""

    def __init__(self, **arguments: Any) -> None:
        super().__init__(**arguments)
        end = time.process_time() + 0.3
        while time.process_time() < end:
            pass


class Large(Draws):
    """Shows more numbers than can be read."""

    observation_space = spaces.Dict({"map": spaces.Box(0, 1, (84, 84), np.float32)})


for name, environment in (
    ("Draws", Draws),
    ("Unseeded", Unseeded),
    ("Uncopied", Uncopied),
    ("Late", Late),
    ("Wild", Wild),
    ("Pictures", Pictures),
    ("Noisy", Noisy),
    ("Busy", Busy),
    ("Large", Large),
):
    gymnasium.register(f"strange/{name}-v2", entry_point=environment)
