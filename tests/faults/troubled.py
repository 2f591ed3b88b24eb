"""Environments for servers in trouble: they want memory, come in versions, or wait.

STARPOD_TEST_VERSION: the version of `aging-v1` and `ageless-v1`, 1.0.0 if unset.
"""

import os
import random
import time

from starpod.env_server import Concurrency, Environment, EnvironmentSpec, Limits, Outcome

VERSION = os.environ.get("STARPOD_TEST_VERSION", "1.0.0")
KIBIBYTE, MEBIBYTE = 2**10, 2**20


class Hungry(Environment):
    """Inline: "eat" takes 256 MiB for good, whoever asks; the rest is a walk."""

    spec = EnvironmentSpec(id="hungry-v1", version="1.0.0", title="Never full", actions=("go", "eat"))
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


class HungryProcess(Hungry):
    """The same in a process of its own."""

    spec = EnvironmentSpec(
        id="hungry_process-v1",
        version="1.0.0",
        title="Never full, alone",
        actions=("go", "eat"),
        concurrency=Concurrency.PROCESS,
    )


class Aging(Environment):
    """Deterministic, and other versions play otherwise."""

    spec = EnvironmentSpec(
        id="aging-v1", version=VERSION, title="It ages", actions=("go",), limits=Limits(max_turns=1000)
    )

    def reset(self, rng: random.Random) -> None:
        self.place = rng.randrange(1000)

    def step(self, action: str) -> Outcome:
        self.place += 1
        return Outcome(reward=1.0)

    def render(self, mode: str = "text") -> str:
        return f"{VERSION} at {self.place}"


class Ageless(Aging):
    """Not deterministic: it lives on in snapshots, which the next version takes."""

    spec = EnvironmentSpec(
        id="ageless-v1",
        version=VERSION,
        title="It lives on",
        actions=("go",),
        limits=Limits(max_turns=1000),
        deterministic=False,
        restores=">=1.0.0,<1.0.1" if VERSION == "1.0.1" else "",
    )

    def step(self, action: str) -> Outcome:
        self.place += random.randrange(1, 100)
        return Outcome(reward=1.0)


class Endless(Environment):
    """A step waits as many seconds as the action says, on a thread."""

    spec = EnvironmentSpec(
        id="endless-v1", version="1.0.0", title="It waits", grammar="seconds", concurrency=Concurrency.THREAD
    )

    def reset(self, rng: random.Random) -> None:
        self.turns = 0

    def step(self, action: str) -> Outcome:
        time.sleep(float(action))
        self.turns += 1
        return Outcome()

    def render(self, mode: str = "text") -> str:
        return str(self.turns)


class Leaky(Environment):
    """Each step keeps 64 KiB for good."""

    spec = EnvironmentSpec(id="leaky-v1", version="1.0.0", title="It never forgets", actions=("go",))
    kept: list[bytes] = []  # noqa: RUF012 - it leaks on purpose

    def reset(self, rng: random.Random) -> None:
        self.turns = 0

    def step(self, action: str) -> Outcome:
        self.turns += 1
        Leaky.kept.append(b"x" * (64 * KIBIBYTE))
        return Outcome()

    def render(self, mode: str = "text") -> str:
        return str(self.turns)
