"""Where an episode runs: in the event loop, on a thread, or in a process of its own. One Host per session."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import Executor
from dataclasses import dataclass
from typing import Protocol, TypeVar

from starpod.env_server.environment import Action, Concurrency, Environment, EnvironmentOptions, Limits, OptionsError
from starpod.env_server.episode import Episode, EpisodeOver, Observation, Transition, Want
from starpod.env_server.state import StateError
from starpod.v1 import environment_pb2 as pb

R = TypeVar("R")


class HostDied(Exception):
    """The process that ran the episode is gone; the text says how it went."""


class EnvironmentBug(Exception):
    """The environment's own code raised. `intact` tells whether the session can go on."""

    def __init__(self, exception: str, message: str, *, intact: bool) -> None:
        super().__init__(f"{exception}: {message}")
        self.exception = exception
        self.message = message
        self.intact = intact

    @classmethod
    def from_exception(cls, error: Exception, *, intact: bool) -> EnvironmentBug:
        return cls(type(error).__name__, str(error), intact=intact)


@dataclass(frozen=True, slots=True)
class ResetPlan:
    """Everything that decides a new episode."""

    options: EnvironmentOptions
    limits: Limits
    seed: int
    dynamics_seed: int
    want: Want


class Host(Protocol):
    """Runs one episode. Calls come one at a time. Any of them may raise HostDied or EnvironmentBug."""

    episode: Episode | None
    """The episode, where it may be stepped in the event loop; else None."""

    async def reset(self, plan: ResetPlan) -> Observation | pb.Observation: ...
    async def turn(self, actions: list[Action], want: Want) -> Transition | pb.Transition: ...
    async def observe(self, want: Want) -> Observation | pb.Observation: ...
    async def render(self, mode: str) -> str | bytes: ...
    async def instructions(self) -> str: ...
    async def save(self) -> bytes: ...
    async def fork(self, dynamics_seed: int | None) -> Host: ...
    def close(self) -> None: ...


def start_episode(environment: type[Environment], plan: ResetPlan) -> Episode:
    """A new episode of the class, as planned. A fresh instance each time: nothing of an old episode can linger."""
    instance = environment()
    instance.options = plan.options
    episode = Episode(instance, plan.limits)
    episode.reset(plan.seed, plan.dynamics_seed)
    return episode


class LocalHost:
    """Classes `inline` and `thread`: the episode lives in this process.

    Turns of class `thread` run on the executor's threads, and so do resets that the environment calls slow.
    """

    __slots__ = ("_environment", "_episode", "_executor", "_threaded", "episode")

    def __init__(self, environment: type[Environment], executor: Executor, episode: Episode | None = None) -> None:
        self._environment = environment
        self._executor = executor
        self._episode = episode
        self._threaded = environment.spec.concurrency is not Concurrency.INLINE
        self.episode = None if self._threaded else episode

    async def reset(self, plan: ResetPlan) -> Observation:
        def start() -> tuple[Episode, Observation]:
            # A new episode, swapped in only when it has started: a reset that raises leaves the old one as it was.
            episode = start_episode(self._environment, plan)
            return episode, episode.observe(plan.want)

        slow = self._threaded or self._environment.spec.slow_reset
        self._episode, observation = await self._run(start, intact=True, threaded=slow)
        self.episode = None if self._threaded else self._episode
        return observation

    async def turn(self, actions: list[Action], want: Want) -> Transition:
        episode = self._live()
        return await self._run(lambda: episode.turn(actions, want), intact=False)

    async def observe(self, want: Want) -> Observation:
        episode = self._live()
        return await self._run(lambda: episode.observe(want), intact=True)

    async def render(self, mode: str) -> str | bytes:
        environment = self._live().environment
        return await self._run(lambda: environment.render(mode), intact=True)

    async def instructions(self) -> str:
        return await self._run(self._live().environment.instructions, intact=True)

    async def save(self) -> bytes:
        return await self._run(self._live().save, intact=True)

    async def fork(self, dynamics_seed: int | None) -> LocalHost:
        episode = self._live()
        copy = await self._run(lambda: episode.fork(dynamics_seed), intact=True)
        return LocalHost(self._environment, self._executor, copy)

    def close(self) -> None:
        self._episode = self.episode = None

    def _live(self) -> Episode:
        assert self._episode is not None, "reset comes first"
        return self._episode

    async def _run(self, function: Callable[[], R], *, intact: bool, threaded: bool | None = None) -> R:
        try:
            if self._threaded if threaded is None else threaded:
                return await asyncio.get_running_loop().run_in_executor(self._executor, function)
            return function()
        except (EpisodeOver, OptionsError, StateError):
            raise
        except Exception as error:
            raise EnvironmentBug.from_exception(error, intact=intact) from error
