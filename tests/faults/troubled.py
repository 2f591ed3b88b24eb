"""Environments for servers in trouble: they want memory, come in versions, or wait.

STARPOD_TEST_VERSION: the version of `aging-v1` and `ageless-v1`, 1.0.0 if unset.
"""

import os
import random
import time
from typing import Any

from starpod.env_server import Concurrency, Environment, EnvironmentSpec, Limits, Outcome

VERSION = os.environ.get("STARPOD_TEST_VERSION", "1.0.0")
KIBIBYTE, MEBIBYTE = 2**10, 2**20


def specify(name: str, version: str = "1.0.0", **more: Any) -> EnvironmentSpec:
    return EnvironmentSpec(id=f"{name}-v1", version=version, title=name, **{"actions": ("go",), **more})


class Hungry(Environment):
    """Inline: "eat" takes 256 MiB for good, whoever asks; the rest is a walk."""

    spec = specify("hungry", actions=("go", "eat"))
    eaten: list[bytes] = []  # noqa: RUF012 - it leaks on purpose

    def reset(self, rng: random.Random) -> None:
        self.place = rng.random()

    def step(self, action: str) -> Outcome:
        if action == "eat":
            Hungry.eaten.append(os.urandom(1) * (256 * MEBIBYTE))
        self.place += self.dynamics.random()
        return Outcome(reward=1.0)

    def render(self, mode: str = "text") -> str:
        return f"at {self.place}"


class Aging(Environment):
    """Deterministic, and other versions play otherwise."""

    spec = specify("aging", VERSION, limits=Limits(max_turns=1000))

    def reset(self, rng: random.Random) -> None:
        self.place = rng.randrange(1000)

    def step(self, action: str) -> Outcome:
        self.place += 1
        return Outcome(reward=1.0)

    def render(self, mode: str = "text") -> str:
        return f"{VERSION} at {self.place}"


class Ageless(Aging):
    """A nondeterministic environment, which survives upgrades in snapshots that the next version restores."""

    spec = specify(
        "ageless",
        VERSION,
        limits=Limits(max_turns=1000),
        deterministic=False,
        restores=">=1.0.0,<1.0.1" if VERSION == "1.0.1" else "",
    )

    def step(self, action: str) -> Outcome:
        self.place += random.randrange(1, 100)
        return Outcome(reward=1.0)


class Leaky(Environment):
    """Each step keeps 64 KiB for good."""

    spec = specify("leaky")
    kept: list[bytes] = []  # noqa: RUF012 - it leaks on purpose

    def reset(self, rng: random.Random) -> None:
        self.turns = 0

    def step(self, action: str) -> Outcome:
        self.turns += 1
        Leaky.kept.append(b"x" * (64 * KIBIBYTE))
        return Outcome()

    def render(self, mode: str = "text") -> str:
        return str(self.turns)


class Endless(Leaky):
    """A step waits as many seconds as the action says, on a thread."""

    spec = specify("endless", actions=(), grammar="seconds", concurrency=Concurrency.THREAD)

    def step(self, action: str) -> Outcome:
        time.sleep(float(action))
        return Outcome()
