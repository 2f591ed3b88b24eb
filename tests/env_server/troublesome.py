"""Environments that wait, crash, hang, raise and come in versions: what a server must cope with."""

import ctypes
import dataclasses
import os
import random
import threading
import time
from typing import Any, ClassVar, Literal, Self

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
    MachineLost,
    OptionsError,
    Outcome,
    ToolCall,
    Unavailable,
)
from starpod.env_server.episodes.state import StateError


def specify(name: str, title: str, *, version: str = "1.0.0", **more: Any) -> EnvironmentSpec:
    return EnvironmentSpec(id=f"{name}-v1", version=version, title=title, **more)


def elsewhere(base: type[Environment], concurrency: Concurrency) -> type[Environment]:
    """Return the same environment in another class of concurrency, which is part of its id."""
    name, where = base.spec.id.removesuffix("-v1"), concurrency.value
    spec = dataclasses.replace(base.spec, id=f"{name}_{where}-v1", concurrency=concurrency)
    return type(f"{base.__name__}{where.title()}", (base,), {"spec": spec, "__module__": __name__})


class Walk(Environment):
    """An inline, stochastic environment: a step adds a random number. It cannot describe a start at 10."""

    spec = specify(
        "walk",
        "A drunken walk",
        version="1.1.0",
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
            info = {"place": self.place, "list": [1, {"two": np.float32(2)}], "none": None, "id": 2**53 + 1}
            return Outcome(reward=0.5, reward_parts={"a": 0.25, "b": 0.25}, criteria={"reported": True}, info=info)
        self.place += self.dynamics.random() * (-1 if action == "Left" else 1)
        return Outcome(effective=action != "Left")

    def instructions(self) -> str:
        if self.options.start == 10:
            raise RuntimeError("speechless on purpose")
        return f"Walk from {self.options.start}."

    def render(self, mode: str = "text") -> str:
        return f"<b>{self.place}</b>" if mode == "html" else f"at {self.place}"

    def score(self) -> float:
        return 0.5


class OldWalk(Walk):
    """An earlier version, hosted together with the newer one."""

    spec = specify("walk", "A drunken walk", actions=("Left", "Right", "stop"))


class Waiting(Environment):
    """Class `thread`: the action says how many milliseconds a step takes, or `gate`: until that is `opened`."""

    spec = specify(
        "waiting",
        "It waits",
        grammar="milliseconds | gate",
        concurrency=Concurrency.THREAD,
        limits=Limits(max_turns=50),
    )
    entered: ClassVar[threading.Event] = threading.Event()
    opened: ClassVar[threading.Event] = threading.Event()

    def reset(self, rng: random.Random) -> None:
        self.done: list[str] = []

    def step(self, action: str) -> Outcome:
        if action == "gate":
            Waiting.entered.set()
            assert Waiting.opened.wait(60)
        else:
            time.sleep(int(action) / 1000)
        self.done.append(action)
        return Outcome(reward=1.0)

    def render(self, mode: str = "text") -> str:
        return ",".join(self.done)


class Fragile(Environment):
    """Class `process`: dies in every way, or has a state or a text that is more than may leave a process."""

    spec = specify(
        "fragile",
        "Handle with care",
        actions=("fine", "exit", "segfault", "hang", "raise", "pid", "grow", "talk"),
        concurrency=Concurrency.PROCESS,
    )

    def reset(self, rng: random.Random) -> None:
        self.level = rng.random()
        self.ballast, self.talks = b"", False

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
            case "grow":
                self.ballast = bytes(2**26)
            case "talk":
                self.talks = True
        self.level += self.dynamics.random()
        return Outcome(reward=self.level)

    def render(self, mode: str = "text") -> str:
        return "x" * 2**26 if self.talks else f"level {self.level}"


class Uncopied(Environment):
    """Class `process`: a copy dies when it is `made` or `shown`, or hangs."""

    spec = specify("uncopied", "Only one can live", actions=("fine",), concurrency=Concurrency.PROCESS)

    class Options(EnvironmentOptions):
        dies: Literal["made", "hung", "shown"] = "made"

    def reset(self, rng: random.Random) -> None:
        self.is_copy = False

    def set_state(self, state: dict[str, Any]) -> None:
        if self.options.dies == "made":
            os._exit(3)
        if self.options.dies == "hung":
            time.sleep(3600)
        self.is_copy = True

    def step(self, action: str) -> Outcome:
        return Outcome(reward=1.0)

    def render(self, mode: str = "text") -> str:
        if self.is_copy:
            os._exit(4)
        return "alive"


class Searched(Environment):
    """An environment whose start takes long to find, so that resets run on a thread."""

    spec = specify("searched", "Found", actions=("draw",), slow_reset=True, limits=Limits(max_actions=3))

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


class SearchedAlone(Searched):
    """The same, and no copy of a start is possible."""

    spec = dataclasses.replace(Searched.spec, id="searched_alone-v1", fork=False, snapshot=False)

    def copy(self) -> Self:
        raise AssertionError("nobody copies it, since its spec says so")


class Crowded(Environment):
    """An environment whose pictures come from a pool that is `taken` for the next tries, or `closed`.

    Its starts are numbered by the seed.
    """

    spec = specify(
        "crowded",
        "A queue for pictures",
        actions=("go", "wait"),
        render_modes=("text", "png"),
        limits=Limits(max_turns=3),
        slow_render=True,
    )
    taken: ClassVar[int] = 0
    closed: ClassVar[bool] = False
    drawn_on: ClassVar[set[str]] = set()

    @classmethod
    def prepare(cls) -> None:
        if cls.spec.concurrency is Concurrency.PROCESS:
            Crowded.taken = 1  # when the first picture is asked for

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


CrowdedThread = elsewhere(Crowded, Concurrency.THREAD)
CrowdedProcess = elsewhere(Crowded, Concurrency.PROCESS)


class UndrawnProcess(Crowded):
    """A `Crowded` in a process of its own, where nothing can draw pictures."""

    spec = dataclasses.replace(Crowded.spec, id="undrawn_process-v1", concurrency=Concurrency.PROCESS)

    def render(self, mode: str = "text") -> str | bytes:
        if mode == "png":
            raise Unavailable("no brush: install one")
        return super().render(mode)


class Anything(Environment):
    """Takes and shows every kind of action and part."""

    spec = specify("anything", "An echo", grammar="anything")

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


class Altering(Environment):
    """An environment that changes the actions that it gets, and later the observations that it has returned."""

    spec = specify("altering", "It writes on everything", grammar="anything")

    def reset(self, rng: random.Random) -> None:
        self.board = np.zeros(3)
        self.facts = {"turns": 0}

    def step(self, action: Any) -> Outcome:
        match action:
            case JSON():
                action.value.pop()
            case ToolCall():
                dict.clear(action.arguments)  # type: ignore[arg-type]
            case np.ndarray():
                action += 1
        self.board += 1
        self.facts["turns"] += 1
        return Outcome(info=self.facts)

    def observe(self) -> Any:
        return [self.board]

    def render(self, mode: str = "text") -> str:
        return str(self.board)


class Unruly(Environment):
    """Gives what no message can hold, raises the first time in mid-step, or would end the process."""

    spec = specify(
        "unruly",
        "Rude",
        actions=("info", "array", "text", "raise", "exit", "stop", "leave", "fork", "options", "state", "gone", "fine"),
    )

    class Options(EnvironmentOptions):
        text: bool = False
        instructions: bool = False
        numpy: bool = False

    def reset(self, rng: random.Random) -> None:
        self.played = 0
        self.text = self.options.text

    def step(self, action: str) -> Outcome:
        self.played += 1
        if action == "raise" and self.played == 1:
            raise RuntimeError("in mid-step on purpose")
        if action in ("exit", "stop"):
            raise SystemExit(3) if action == "exit" else StopIteration("no more")
        if action == "leave":
            raise GeneratorExit("left")
        if action in ("options", "state"):  # would mean that nothing has changed
            raise OptionsError("no level 2") if action == "options" else StateError("no level 2")
        if action == "gone":
            raise MachineLost("was removed on purpose")
        if action == "fork" and (child := os.fork()):
            return Outcome(info={"status": os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])})
        self.text = action == "text"
        if action == "array":
            return Outcome(info={"array": np.array([[0.5], [np.nan]])})
        return Outcome(info={"object": object()} if action == "info" else None)

    def set_state(self, state: Any) -> None:
        raise SystemExit(4)

    def instructions(self) -> str:
        return None if self.options.instructions else "Obey."  # type: ignore[return-value]

    def render(self, mode: str = "text") -> str:
        if self.options.numpy:
            return np.str_("north")
        return "half a pair: \ud800" if self.text else f"played {self.played}"


UnrulyThread = elsewhere(Unruly, Concurrency.THREAD)
UnrulyProcess = elsewhere(Unruly, Concurrency.PROCESS)

ALL = tuple(
    each
    for each in globals().values()
    if isinstance(each, type) and issubclass(each, Environment) and each.__module__ == __name__
)
