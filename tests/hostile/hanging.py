"""An environment of class `thread` whose steps and resets hang when they are told to."""

from __future__ import annotations

import random
import time

from starpod.env_server import Concurrency, Environment, EnvironmentOptions, EnvironmentSpec, Outcome


class Hanging(Environment):
    """`hang` waits for an hour."""

    spec = EnvironmentSpec(
        id="hanging-v1", version="1.0.0", title="It hangs", grammar="hang", concurrency=Concurrency.THREAD
    )

    class Options(EnvironmentOptions):
        hang: bool = False

    def reset(self, rng: random.Random) -> None:
        if self.options.hang:
            time.sleep(3600)

    def step(self, action: str) -> Outcome:
        if action == "hang":
            time.sleep(3600)
        return Outcome(reward=1.0)

    def render(self, mode: str = "text") -> str:
        return "still here"
