"""Environments of class `thread`: one whose steps hang on request, and one with a large state."""

from __future__ import annotations

import random
import time

from starpod.env_server import Concurrency, Environment, EnvironmentSpec, Outcome


class Hanging(Environment):
    """`hang` waits for an hour."""

    spec = EnvironmentSpec(
        id="hanging-v1", version="1.0.0", title="It hangs", grammar="hang", concurrency=Concurrency.THREAD
    )

    def reset(self, rng: random.Random) -> None:
        pass

    def step(self, action: str) -> Outcome:
        if action == "hang":
            time.sleep(3600)
        return Outcome(reward=1.0)

    def render(self, mode: str = "text") -> str:
        return "still here"


class Heavy(Environment):
    """An environment whose snapshots are almost as large as a message may be."""

    spec = EnvironmentSpec(id="heavy-v1", version="1.0.0", title="A large state", actions=("stay",))

    def reset(self, rng: random.Random) -> None:
        self.ballast = bytes(15 * 2**20)

    def step(self, action: str) -> Outcome:
        return Outcome()

    def render(self, mode: str = "text") -> str:
        return str(len(self.ballast))
