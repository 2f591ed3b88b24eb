"""Places where an episode runs: the event loop, a thread or a separate process. Each session has one EpisodeHost."""

from __future__ import annotations

import functools
import logging
import os
import threading
from collections.abc import Callable
from typing import NamedTuple, Protocol, TypeVar

from starpod.env_server.authoring.environment import (
    Busy,
    Concurrency,
    Environment,
    EnvironmentOptions,
    Limits,
    MachineLost,
    OptionsError,
    Unavailable,
)
from starpod.env_server.episodes import convert
from starpod.env_server.episodes.effects import Journal, UselessReply
from starpod.env_server.episodes.errors import EnvironmentRaised
from starpod.env_server.episodes.live_episode import (
    EpisodeEnded,
    LiveEpisode,
    ObservedState,
    Pictures,
    TurnResult,
    Want,
)
from starpod.env_server.episodes.results import expect_text
from starpod.env_server.episodes.state import StateError
from starpod.env_server.episodes.timing import measured
from starpod.env_server.processes.threads import Hung, ThreadPool
from starpod.serving.user_code import end_forked_copy, is_ctrl_c
from starpod.v1 import environment_pb2 as pb
from starpod.v1.values import Action

logger = logging.getLogger(__name__)
R = TypeVar("R")

_COMPUTING_THREADS = 2
_LONGEST_COMMAND = 86_400.0
_PICTURE = Want(image=True)
_REHEARSED = 16
"""Maximum number of actions tried on a restored state."""


class HostDied(Exception):
    """The process or thread that ran the episode is gone. The text says why."""


class StateTooLarge(Exception):
    """A state that is too large to send. The text gives its size and the maximum."""


class ResetPlan(NamedTuple):
    """Everything that determines a new episode."""

    options: EnvironmentOptions
    limits: Limits
    seed: int
    """Seed of the initial state, 64 bits."""
    dynamics_seed: int
    """Seed of the random transitions, 64 bits."""
    want: Want
    pictures: Pictures | None = None
    """Pictures already drawn for other members of the group; None outside of groups."""


class Started(NamedTuple):
    """The beginning of a new episode: its first observation, and instructions for its options."""

    observation: pb.Observation | ObservedState
    """A message, unless the observation is only a text, perhaps with a state key."""
    instructions: str


class Pools(NamedTuple):
    """The threads on which environments run."""

    waiting: ThreadPool
    """Threads for work that waits or releases the interpreter lock."""
    computing: ThreadPool
    """Two threads for work that holds the interpreter lock, and thereby delays the event loop."""
    commanding: ThreadPool
    """Threads that wait for containers, one per container. Environments of class `container` set their own limits."""

    @classmethod
    def of(cls, threads: int, seconds: float, containers: int = 1) -> Pools:
        """Create the pools. A call that takes longer than `seconds` counts as hung, except for those on containers."""
        return cls(
            ThreadPool(threads, seconds, "environment"),
            ThreadPool(_COMPUTING_THREADS, seconds, "computing"),
            ThreadPool(containers, _LONGEST_COMMAND, "commanding"),
        )

    def shut_down(self) -> None:
        for pool in self:
            pool.shut_down()


class EpisodeHost(Protocol):
    """Runner of one episode. Calls come one at a time, and any of them may raise HostDied or EnvironmentRaised."""

    episode: LiveEpisode | None
    """The episode if it may be stepped in the event loop, else None."""

    async def reset(self, plan: ResetPlan) -> Started: ...
    async def turn(self, actions: list[Action], want: Want) -> TurnResult | pb.Transition: ...
    async def observe(self, want: Want, pictures: Pictures | None = None) -> pb.Observation: ...
    async def render(self, mode: str) -> str | bytes: ...
    async def save(self) -> bytes: ...
    async def load(self, data: bytes, *, rehearse: bool = False) -> str: ...
    async def fork(self, dynamics_seed: int | None) -> EpisodeHost: ...
    def close(self) -> None: ...


def start_episode(
    environment: type[Environment], plan: ResetPlan, journal: Journal | None = None
) -> tuple[LiveEpisode, Started]:
    """Start a new episode in a fresh instance, so that no state of an old episode remains.

    Args:
        journal: records the effects of an environment with `effects`; by default none are recorded.
    """
    instance = environment()
    instance.options = plan.options
    episode = LiveEpisode(instance, plan.limits)
    try:
        if journal and environment.spec.effects:
            with journal.recording(instance, None):
                episode.reset(plan.seed, plan.dynamics_seed)
        else:
            episode.reset(plan.seed, plan.dynamics_seed)
        observation = episode.observe(plan.want, plan.pictures)
    except BaseException:
        instance.close()
        raise
    if type(observation.parts) is not str or type(observation.state_key) is not bytes or observation.extras:
        return episode, Started(convert.observation_to(observation), instructions_of(episode))
    expect_text("observe", observation.parts)
    return episode, Started(observation, instructions_of(episode))


def instructions_of(episode: LiveEpisode) -> str:
    """Return the instructions. Raises BadResult if they are not text that can be sent."""
    return expect_text("instructions", episode.environment.instructions())


def expect_playable(episode: LiveEpisode) -> None:
    """Raise StateError if the environment fails on this state but works on a new episode."""
    try:
        _rehearse(episode)
    except (Busy, Unavailable):
        return
    except BaseException as error:
        environment = type(episode.environment)
        try:
            _rehearse(
                start_episode(environment, ResetPlan(episode.environment.options, episode.limits, 0, 0, Want()))[0]
            )
        except BaseException:  # a bug of the environment, which the step that meets it will report
            return
        raise StateError(f"not a saved episode of {environment.spec.id}: {error!r}") from error


def _rehearse(episode: LiveEpisode) -> None:
    """Render and play on a copy of the episode: all text modes, then named actions and valid actions.

    Experts and scores are not tried, because they may search, and a search in a forged state may not end.
    """
    copy = episode.fork(None)
    environment = copy.environment
    environment.dynamics.random()
    for mode in environment.spec.render_modes:
        if mode != "png":
            environment.render(mode)
    for action in [*environment.spec.actions, *(environment.valid_actions() or ()), ""][:_REHEARSED]:
        if not copy.end_reason:
            copy.turn([action], Want(valid_actions=True, state_key=True))
    copy.save()


class LocalHost:
    """Host for classes `inline`, `thread` and `container`: the episode's object is in this process.

    Turns of the classes `thread` and `container` run on threads, and so do slow resets and drawing. A container is
    removed when its episode is replaced or the host closes.

    `containers` is the number of hosts of class `container` that are not closed, also before the container boots.
    """

    __slots__ = ("_environment", "_episode", "_has_container", "_journal", "_pools", "_threads", "_want", "episode")

    containers = 0

    def __init__(
        self,
        environment: type[Environment],
        pools: Pools,
        journal: Journal,
        want: Want,
        episode: LiveEpisode | None = None,
    ) -> None:
        self._environment = environment
        self._pools = pools
        self._journal = journal
        self._threads = {
            Concurrency.THREAD: pools.waiting,
            Concurrency.CONTAINER: pools.commanding,
        }.get(environment.spec.concurrency)
        self.episode: LiveEpisode | None
        self._episode: LiveEpisode | None = None
        self._has_container = environment.spec.concurrency is Concurrency.CONTAINER
        LocalHost.containers += self._has_container
        self._take(episode, want)

    async def reset(self, plan: ResetPlan) -> Started:
        # Swap in the new episode only after it has started and its observation is converted. If reset raises, the old
        # one stays unchanged.
        work = functools.partial(start_episode, self._environment, plan, self._journal)
        pool = self._drawing_pool(plan.want) or (self._pools.computing if self._environment.spec.slow_reset else None)
        episode, started = await self._run(work, intact=True, pool=pool)
        self._take(episode, plan.want)
        return started

    def start(self, plan: ResetPlan) -> Started:
        """Start a new episode in the event loop. If this raises, the old one stays.

        The caller has to look for a forked copy of the process, once for many episodes: os.getpid takes microseconds.
        """
        work = functools.partial(start_episode, self._environment, plan, self._journal)
        episode, started = self._attempt(work, intact=True)
        self._take(episode, plan.want)
        return started

    async def turn(self, actions: list[Action], want: Want) -> TurnResult:
        episode = self._live()
        spec = self._environment.spec
        turn = episode.undoable_turn if spec.slow_render else episode.turn
        if spec.effects:
            turn = functools.partial(episode.recorded_turn, journal=self._journal)
        return await self._run(lambda: turn(actions, want), intact=False, pool=self._drawing_pool(want))

    async def observe(self, want: Want, pictures: Pictures | None = None) -> pb.Observation:
        episode = self._live()
        return await self._run(
            lambda: convert.observation_to(episode.observe(want, pictures)),
            intact=True,
            pool=self._drawing_pool(want),
        )

    async def render(self, mode: str) -> str | bytes:
        episode = self._live()
        is_slow = mode == "png" or self._environment.spec.slow_render
        pool = self._drawing_pool(_PICTURE) if is_slow else None
        return await self._run(lambda: episode.render(mode), intact=True, pool=pool)

    async def save(self) -> bytes:
        return await self._run(self._live().save, intact=True)

    async def load(self, data: bytes, *, rehearse: bool = False) -> str:
        """Load a saved episode, and return its instructions. Raises StateError if it is not one.

        Args:
            rehearse: whether the data is untrusted. A copy is then tried first, which takes milliseconds.
        """

        def work() -> tuple[LiveEpisode, str]:
            episode = LiveEpisode.load(self._environment, data)
            if rehearse and not self._threads and self._environment.copy is Environment.copy:
                expect_playable(episode)
            return episode, instructions_of(episode)

        pool = self._pools.computing if rehearse and self._environment.spec.slow_reset else None
        episode, instructions = await self._run(work, intact=True, pool=pool)
        self._take(episode, self._want)
        return instructions

    async def fork(self, dynamics_seed: int | None) -> LocalHost:
        episode = self._live()
        copy = type(self)(self._environment, self._pools, self._journal, self._want)  # counts while it is made
        try:
            copy._take(await self._run(lambda: episode.fork(dynamics_seed), intact=True), self._want)
        except BaseException:
            copy.close()
            raise
        return copy

    def close(self) -> None:
        self._take(None, self._want)
        LocalHost.containers -= self._has_container
        self._has_container = False

    def _live(self) -> LiveEpisode:
        assert self._episode is not None, "reset comes first"
        return self._episode

    def _take(self, episode: LiveEpisode | None, want: Want) -> None:
        """Continue with another episode. Its steps may run in the event loop only if no part of a step is slow."""
        if self._has_container and self._episode is not None:
            # The interpreter waits for this thread at exit, unless it hangs. Removing a container takes 0.2 s.
            threading.Thread(target=_close, args=(self._episode.environment,), name="starpod closing").start()
        self._want = want
        self._episode = episode
        self.episode = None if self._threads or want.image else episode

    def _drawing_pool(self, want: Want) -> ThreadPool | None:
        """Return the pool that draws the wanted picture, or None if none is wanted."""
        if not want.image:
            return None
        return self._pools.waiting if self._environment.spec.slow_render else self._pools.computing

    def _attempt(self, function: Callable[[], R], *, intact: bool) -> R:
        """Return the function's result. Exceptions beyond the contract become EnvironmentRaised."""
        try:
            return function()
        except (Busy, EpisodeEnded, OptionsError, StateError, Unavailable):
            raise
        except MachineLost as error:
            raise HostDied(str(error)) from error
        except BaseException as error:
            if is_ctrl_c(error):
                raise
            is_intact = intact or isinstance(error, UselessReply)
            raise EnvironmentRaised.from_exception(self._environment, error, intact=is_intact) from error

    async def _run(self, function: Callable[[], R], *, intact: bool, pool: ThreadPool | None = None) -> R:
        def work() -> R:
            # Catch exceptions here, not around `await`: StopIteration cannot leave a thread, and SystemExit would end
            # the server.
            process_id = os.getpid()
            try:
                return self._attempt(function, intact=intact)
            finally:
                end_forked_copy(process_id, self._environment.spec.id)

        measured_work = measured(work)
        pool = self._threads or pool
        if pool is None:
            return measured_work()
        try:
            return await pool.run(measured_work)
        except Hung as hung:
            raise HostDied(str(hung)) from hung


def _close(environment: Environment) -> None:
    try:
        environment.close()
    except Exception:
        logger.exception("%s: the container could not be removed; a sweep will remove it", environment.spec.id)
