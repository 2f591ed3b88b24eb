"""Environments whose time is known: one that stalls the whole server once, one that takes its time, one with bugs."""

import random
import time
from typing import ClassVar

from starpod.env_server import Concurrency, Environment, EnvironmentOptions, EnvironmentSpec, Outcome

STALL_SECONDS = 0.6


class Stalls(Environment):
    """Inline: the step with this number, of all steps of the server, sleeps and holds everything up."""

    spec = EnvironmentSpec(id="stalls-v1", version="1.0.0", title="It stalls once", actions=("go",))
    steps: ClassVar[int] = 0

    class Options(EnvironmentOptions):
        at: int = 60

    def reset(self, rng: random.Random) -> None: ...

    def step(self, action: str) -> Outcome:
        Stalls.steps += 1
        if Stalls.steps == self.options.at:
            time.sleep(STALL_SECONDS)
        return Outcome(effective=True)

    def render(self, mode: str = "text") -> str:
        return "going"


class Waits(Environment):
    """Class `thread`: each step sleeps."""

    spec = EnvironmentSpec(
        id="waits-v1", version="1.0.0", title="It waits", actions=("go",), concurrency=Concurrency.THREAD
    )

    class Options(EnvironmentOptions):
        milliseconds: float = 20.0

    def reset(self, rng: random.Random) -> None: ...

    def step(self, action: str) -> Outcome:
        time.sleep(self.options.milliseconds / 1e3)
        return Outcome(effective=True)

    def render(self, mode: str = "text") -> str:
        return "waiting"


class Breaks(Environment):
    """Every tenth step of an episode is a bug."""

    spec = EnvironmentSpec(id="breaks-v1", version="1.0.0", title="It breaks", actions=("go",))

    def reset(self, rng: random.Random) -> None:
        self.left = 10

    def step(self, action: str) -> Outcome:
        self.left -= 1
        if not self.left:
            raise RuntimeError("a bug on purpose")
        return Outcome(effective=True)

    def render(self, mode: str = "text") -> str:
        return f"{self.left} left"
