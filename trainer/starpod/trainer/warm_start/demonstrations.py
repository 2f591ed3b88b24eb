"""Demonstrations to imitate, so that a new policy learns the response format."""

from __future__ import annotations

import math
import random
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace

from starpod.client import Fleet, Limits, Observation, Session, StarpodError, Want
from starpod.trainer.agents.base import Agent, Move, Stop, Task
from starpod.trainer.agents.scripted import REFERENCES, choose_randomly
from starpod.trainer.configuration.section import ConfigError
from starpod.trainer.data.episode import Episode, Turn, part_sums
from starpod.trainer.rollout.play import play, together
from starpod.trainer.warm_start.config import WarmStartConfig


@dataclass(frozen=True, slots=True)
class Demonstration:
    """One episode of a demonstrator, with one action per turn."""

    episode: Episode
    limits: Limits
    """Limits of its session."""
    imitate: list[bool]
    """For each turn, whether it is imitated."""
    earlier_attempts: tuple[Demonstration, ...] = ()
    """Earlier attempts at the same start state, if a script has them."""


Explore = Callable[[int, str], Awaitable[Demonstration]]
"""Function that plays a demonstration from a seed. The text names one of several attempts at its start state."""


class Demonstrator(Agent):
    """A reference policy with some random moves.

    images: whether turns keep the environment's images. imitate: for each turn so far, whether to imitate it.
    """

    def __init__(self, config: WarmStartConfig, task: Task, seed: str, *, images: bool = False) -> None:
        self._images = images
        self.imitate: list[bool] = []
        self._config = config
        self._task = task
        self._choose, _ = REFERENCES[config.actions]
        self._rng = random.Random(f"demonstration/{seed}")

    async def act(self, observation: Observation, episode: Episode) -> Move | Stop:
        action = self._choose(observation, self._task.actions, self._rng)
        if action is None:
            if not episode.turns:
                raise ConfigError(
                    f"{self._task.environment} shows no {self._config.actions} action to imitate; "
                    "set warm_start.actions to random, or warm_start.steps to 0"
                )
            return Stop()
        noisy = self._rng.random() < self._config.noise
        if noisy:
            action = choose_randomly(observation, self._task.actions, self._rng) or action
        self.imitate.append(self._config.imitate_noise or not noisy)
        return Move(action, [action])

    def image_of(self, observation: Observation) -> bytes:
        return observation.image.data if self._images and observation.image else b""


async def play_start(
    fleet: Fleet, task: Task, seed: int, want: Want, make_agent: Callable[[Session], Agent], *, group: int = 0
) -> tuple[Episode, Limits]:
    """Play an episode from the start state of a seed. Return it and its limits. Raises StarpodError if it failed."""
    (session,) = await task.open(fleet, seed, 1, want)
    try:
        episode = await play(make_agent(session), session, group=group)
    finally:
        await session.close()
    if episode.failed:
        raise StarpodError(f"a demonstration from seed {seed} failed: {episode.error}")
    return episode, session.limits


async def collect_demonstrations(
    fleet: Fleet,
    config: WarmStartConfig,
    task: Task,
    seeds: Sequence[int],
    attempts: int = 1,
    *,
    images: bool = False,
    explore: Explore | None = None,
    watch: Callable[[Demonstration], None] = lambda _: None,
) -> list[Demonstration]:
    """Play one episode per seed, preceded by other attempts at its start state if `attempts` is above 1.

    Args:
        attempts: Number of episodes per seed.
        images: Whether turns keep images.
        explore: Plays instead of the configured reference policy.
        watch: Called with the demonstration of each finished seed.

    Raises:
        ConfigError: An expert is configured, and the environment has none.
        StarpodError: An episode failed.
    """
    _, want = REFERENCES[config.actions]
    if config.noise and not task.actions:  # without fixed actions, the environment must list valid actions
        want = replace(want, valid_actions=True)
    want = replace(want, image=images)

    async def play_reference(seed: int, attempt: str) -> Demonstration:
        demonstrator = Demonstrator(config, task, f"{seed}{attempt}", images=images)
        episode, limits = await play_start(fleet, task, seed, want, lambda _: demonstrator)
        return Demonstration(episode, limits, demonstrator.imitate)

    async def demonstrate(seed: int, attempt: str) -> Demonstration:
        demonstration = await (explore or play_reference)(seed, attempt)
        count, limit = config.actions_per_turn, demonstration.limits.max_actions_per_turn
        if limit and count > limit:
            raise ConfigError(
                f"warm_start.actions_per_turn is {count}, but a turn of {task.environment} may have {limit}: lower "
                "it, or raise environment.max_actions_per_turn"
            )
        return join_turns(demonstration, count, random.Random(f"joined/{seed}{attempt}"))

    async def with_earlier(seed: int) -> Demonstration:
        names = [*(f"/{number}" for number in range(1, attempts)), ""]
        *earlier, last = await together(demonstrate(seed, name) for name in names)
        watch(last)
        return replace(last, earlier_attempts=tuple(earlier))

    return await together(map(with_earlier, seeds))


def join_turns(demonstration: Demonstration, max_moves: int, rng: random.Random) -> Demonstration:
    """Join turns into longer ones. A turn is imitated if all of its moves are.

    Args:
        demonstration: Demonstration to copy. It is not changed.
        max_moves: Maximum number of moves of a turn. Each turn draws its number from 1 to this, uniformly.
    """
    turns: list[Turn] = []
    imitate: list[bool] = []
    moves_left = -1
    for turn, imitated in zip(demonstration.episode.turns, demonstration.imitate, strict=True):
        if moves_left >= len(turn.outcomes):
            joined = turns[-1]
            turns[-1] = replace(
                joined,
                actions=[*joined.actions, *turn.actions],
                outcomes=[*joined.outcomes, *turn.outcomes],
                parts=part_sums([joined, turn]),
            )
            imitate[-1] = imitate[-1] and imitated
        else:
            turns.append(turn)
            imitate.append(imitated)
            moves_left = rng.randint(1, max_moves)
        moves_left -= len(turn.outcomes)
    return replace(demonstration, episode=replace(demonstration.episode, turns=turns), imitate=imitate)


def drop_failures(demonstrations: Sequence[Demonstration], kept: float) -> list[Demonstration]:
    """Return the demonstrations that did not fail, and a share of the failed ones.

    kept: share of the failed ones to return. Raises ConfigError if nothing is left.
    """
    failed = [number for number, each in enumerate(demonstrations) if each.episode.success is False]
    dropped = set(failed[math.ceil(kept * len(failed)) :])
    if dropped and len(dropped) == len(demonstrations):
        raise ConfigError(
            f"none of {len(demonstrations)} played episodes succeeded: raise warm_start.episodes or failures, lower "
            "warm_start.noise, or name a better policy in warm_start.from"
        )
    return [each for number, each in enumerate(demonstrations) if number not in dropped]


def choose_best(demonstrations: Sequence[Demonstration], share: float) -> Sequence[Demonstration]:
    """Return the demonstrations with the highest returns, in their original order.

    Their moves without effect are not imitated.

    Args:
        share: Fraction of the demonstrations to return; 1 returns all of them unchanged.
    """
    if share == 1:
        return demonstrations
    ranking = sorted(range(len(demonstrations)), key=lambda index: -demonstrations[index].episode.own_return)
    selection = [demonstrations[index] for index in sorted(ranking[: math.ceil(share * len(ranking))])]
    return [
        replace(
            item,
            imitate=[
                flag and 0 < turn.effective == len(turn.outcomes)
                for flag, turn in zip(item.imitate, item.episode.turns, strict=True)
            ],
        )
        for item in selection
    ]


def of_episodes(episodes: Sequence[Episode], limits: Limits) -> list[Demonstration]:
    """Return recorded episodes as demonstrations. Turns with an invalid move are not imitated.

    Args:
        episodes: Episodes of an environment, all of whose turns have an action.
    """
    return [
        Demonstration(episode, limits, [turn.valid == len(turn.actions) for turn in episode.turns])
        for episode in episodes
    ]
