"""Environments that wait, crash, hang, raise and come in versions: what a server must cope with."""

from __future__ import annotations

import ctypes
import dataclasses
import os
import random
import threading
import time
from typing import Any, ClassVar

import numpy as np
from pydantic import Field

from starpod.env_server import (
    JSON,
    Busy,
    Concurrency,
    Environment,
    EnvironmentOptions,
    EnvironmentSpec,
    Limits,
    OptionsError,
    Outcome,
    Unavailable,
)


class Walk(Environment):
    """Inline and stochastic: a step adds luck; `info` and friends on demand."""

    spec = EnvironmentSpec(
        id="walk-v1",
        version="1.1.0",
        title="A drunken walk",
        actions=("Left", "Right", "stop", "report", "bug", "nan"),
        restores=">=1.0.0,<1.1.0",
        render_modes=("text", "html"),
    )

    class Options(EnvironmentOptions):
        start: int = Field(default=0, ge=-10, le=10, description="Where it starts.")

    def reset(self, rng: random.Random) -> None:
        self.start = self.options.start + rng.randrange(1000)
        self.place = float(self.start)

    def step(self, action: str) -> Outcome:
        if action == "bug":
            raise RuntimeError("a bug on purpose")
        if action == "nan":
            return Outcome(reward=float("nan"))
        if action == "stop":
            return Outcome(reward=1.0, terminated=True, success=True)
        if action == "report":
            info = {"place": self.place, "list": [1, {"two": np.float32(2)}], "none": None}
            return Outcome(reward=0.5, reward_parts={"a": 0.25, "b": 0.25}, criteria={"reported": True}, info=info)
        self.place += self.dynamics.random() * (-1 if action == "Left" else 1)
        return Outcome(effective=action != "Left")

    def render(self, mode: str = "text") -> str:
        return f"<b>{self.place}</b>" if mode == "html" else f"at {self.place}"

    def score(self) -> float:
        return 0.5


class OldWalk(Walk):
    """An earlier version, live beside the newer one."""

    spec = EnvironmentSpec(id="walk-v1", version="1.0.0", title="A drunken walk", actions=("Left", "Right", "stop"))


class Waiting(Environment):
    """Class `thread`: the action says how many milliseconds a step takes."""

    spec = EnvironmentSpec(
        id="waiting-v1",
        version="1.0.0",
        title="It waits",
        grammar="milliseconds",
        concurrency=Concurrency.THREAD,
        limits=Limits(max_turns=50),
    )

    def reset(self, rng: random.Random) -> None:
        self.done: list[str] = []

    def step(self, action: str) -> Outcome:
        time.sleep(int(action) / 1000)
        self.done.append(action)
        return Outcome(reward=1.0)

    def render(self, mode: str = "text") -> str:
        return ",".join(self.done)


class Fragile(Environment):
    """Class `process`: dies in every way."""

    spec = EnvironmentSpec(
        id="fragile-v1",
        version="1.0.0",
        title="Handle with care",
        actions=("fine", "exit", "segfault", "hang", "raise", "pid"),
        concurrency=Concurrency.PROCESS,
        step_timeout=1.5,
    )

    def reset(self, rng: random.Random) -> None:
        self.level = rng.random()

    def step(self, action: str) -> Outcome:
        match action:
            case "exit":
                os._exit(7)
            case "segfault":
                ctypes.string_at(0)
            case "hang":
                time.sleep(3600)
            case "raise":
                raise KeyError("lost")
            case "pid":
                return Outcome(info={"pid": os.getpid()})
        self.level += self.dynamics.random()
        return Outcome(reward=self.level)

    def render(self, mode: str = "text") -> str:
        return f"level {self.level}"


class Searched(Environment):
    """Its start takes a while to find, so resets run on a thread."""

    spec = EnvironmentSpec(
        id="searched-v1",
        version="1.0.0",
        title="Found",
        actions=("draw",),
        slow_reset=True,
        limits=Limits(max_actions=3),
    )

    class Options(EnvironmentOptions):
        findable: bool = True

    def reset(self, rng: random.Random) -> None:
        time.sleep(0.05)
        if not self.options.findable:
            raise OptionsError("nothing can be found; set findable")
        self.found = rng.random()
        self.luck: list[float] = []

    def step(self, action: str) -> Outcome:
        self.luck.append(self.dynamics.random())
        return Outcome()

    def render(self, mode: str = "text") -> str:
        return f"{self.found} {self.luck}"


class Crowded(Environment):
    """Its pictures come from a pool that is `taken` for so many more tries, or `closed`.

    Its starts are numbered by the seed.
    """

    spec = EnvironmentSpec(
        id="crowded-v1",
        version="1.0.0",
        title="A queue for pictures",
        actions=("go", "wait"),
        render_modes=("text", "png"),
        limits=Limits(max_turns=3),
        slow_render=True,
    )
    taken: ClassVar[int] = 0
    closed: ClassVar[bool] = False
    drawn_on: ClassVar[set[str]] = set()

    def reset(self, rng: random.Random) -> None:
        self.place = self.seed * 100

    def step(self, action: str) -> Outcome:
        if action == "wait":
            self.queue()
        self.place += 1
        return Outcome(reward=1.0)

    def render(self, mode: str = "text") -> str | bytes:
        if mode == "text":
            return f"{self.place} of start {self.seed}"
        Crowded.drawn_on.add(threading.current_thread().name)
        if Crowded.closed:
            raise Unavailable("no brush: install one")
        self.queue()
        return str(self.place).encode()

    def queue(self) -> None:
        if Crowded.taken:
            Crowded.taken -= 1
            raise Busy("everybody draws", retry_after=0.25)


class CrowdedThread(Crowded):
    """The same where steps run on a thread."""

    spec = dataclasses.replace(Crowded.spec, id="crowded_thread-v1", concurrency=Concurrency.THREAD)


class CrowdedProcess(Crowded):
    """The same in a process of its own, which the first picture finds taken."""

    spec = dataclasses.replace(Crowded.spec, id="crowded_process-v1", concurrency=Concurrency.PROCESS)

    @classmethod
    def prepare(cls) -> None:
        Crowded.taken = 1


class Anything(Environment):
    """Takes and shows every kind of action and part."""

    spec = EnvironmentSpec(id="anything-v1", version="1.0.0", title="An echo", grammar="anything")

    def reset(self, rng: random.Random) -> None:
        self.shown: Any = "nothing yet"

    def step(self, action: Any) -> Outcome:
        self.shown = action
        return Outcome()

    def observe(self) -> Any:
        if isinstance(self.shown, str):
            return self.shown
        if isinstance(self.shown, np.ndarray | JSON):
            return [self.shown]
        return [JSON({"name": self.shown.name, "arguments": dict(self.shown.arguments)})]

    def render(self, mode: str = "text") -> str:
        return str(self.shown)

    def state_key(self) -> bytes:
        return b"same"


ALL = (Walk, OldWalk, Waiting, Fragile, Searched, Crowded, CrowdedThread, CrowdedProcess, Anything)
