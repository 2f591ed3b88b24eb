"""A custom environment in one file: find a hidden number in few guesses.

starpod serve examples/custom_environment.py
starpod play 127.0.0.1:50051 guess --option highest=1000
"""

import hashlib
import random

from pydantic import Field

from starpod.env_server import INVALID, Environment, EnvironmentOptions, EnvironmentSpec, Limits, Outcome


class GuessOptions(EnvironmentOptions):
    highest: int = Field(100, ge=2, le=1_000_000, description="The number lies between 1 and this.")


class Guess(Environment):
    spec = EnvironmentSpec(
        id="guess-v1",
        version="1.0.0",
        title="Guess the number",
        grammar="a whole number, e.g. 42",
        limits=Limits(max_turns=20),
    )
    Options = GuessOptions
    options: GuessOptions

    def reset(self, rng: random.Random) -> None:
        self.number = rng.randint(1, self.options.highest)
        self.low, self.high = 1, self.options.highest

    def step(self, action: object) -> Outcome:
        if not (isinstance(action, str) and action.strip().isdecimal()):
            return INVALID
        guess = int(action)
        useful = self.low <= guess <= self.high
        if guess <= self.number:
            self.low = max(self.low, guess + (guess < self.number))
        if guess >= self.number:
            self.high = min(self.high, guess - (guess > self.number))
        solved = guess == self.number
        return Outcome(reward=float(solved), terminated=solved, success=solved or None, effective=useful)

    def render(self, mode: str = "text") -> str:
        return f"The number lies between {self.low} and {self.high}."

    def state_key(self) -> bytes:  # the default digests the observation, which is not the whole state here
        return hashlib.blake2b(f"{self.low} {self.number} {self.high}".encode(), digest_size=16).digest()

    def instructions(self) -> str:
        return f"Find the hidden number between 1 and {self.options.highest}."

    def expert_action(self) -> str:
        return str((self.low + self.high) // 2)
