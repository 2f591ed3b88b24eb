"""Scouts: trained policies whose episodes become demonstrations for another policy (SCOUT, arXiv 2601.21754).

A scout plays with the prompt and the options of its own run. Its actions are then played again with the options of the
run that learns from it, so the two policies may see the same states in different forms. The rules must be equal.
"""

from __future__ import annotations

import random
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path

import torch

from starpod.client import Fleet, Observation, Session, Want
from starpod.trainer.agents.base import Agent, AgentRefused, Move, Sampling, Stop, Task
from starpod.trainer.agents.pretrained import PretrainedAgents
from starpod.trainer.agents.scripted import GivenTurn, ReferenceAgent, choose_randomly
from starpod.trainer.checkpoints.checkpoint import CheckpointError
from starpod.trainer.checkpoints.trained import find_checkpoint
from starpod.trainer.configuration.config import Config
from starpod.trainer.configuration.loading import parse_config
from starpod.trainer.configuration.section import ConfigError
from starpod.trainer.configuration.seeds import PURPOSES, SeedRange, derive
from starpod.trainer.configuration.tasks import TaskConfig
from starpod.trainer.data.episode import Episode, Turn
from starpod.trainer.rollout.play import together
from starpod.trainer.warm_start.config import WarmStartConfig
from starpod.trainer.warm_start.demonstrations import Demonstration, Explore, play_start

RULES_EPISODES = 16
"""Number of random episodes with which the rules of two runs are compared."""


def read_scout(config: Config, task: TaskConfig) -> TaskConfig:
    """Return the environment that a task's scout was trained on, with the settings of its run.

    Raises ConfigError if there is no such policy, or if it cannot serve this run.
    """
    path, environment_id = task.warm_start.scout, task.environment.id
    try:
        run = parse_config(find_checkpoint(Path(path)).state["config"])
    except (CheckpointError, ConfigError) as error:
        raise ConfigError(f"warm_start.from: {error}") from error
    tasks = [each for each in run.tasks if each.environment.id == environment_id]
    if not tasks:
        played = ", ".join(each.environment.id for each in run.tasks)
        raise ConfigError(
            f"warm_start.from {path} plays {played}, and not {environment_id}: name a run of {environment_id}"
        )
    if run.script.name != "solo":
        raise ConfigError(f"warm_start.from {path} has the script {run.script.name}: name a run whose script is solo")
    for trained, purpose in product((run.seeds.train, run.seeds.warmstart), PURPOSES):
        held_out: SeedRange = getattr(config.seeds, purpose)
        if trained.start < held_out.stop and held_out.start < trained.stop:
            raise ConfigError(
                f"warm_start.from {path} was trained on seeds {trained.start} to {trained.stop - 1}, of which seeds."
                f"{purpose} holds out {max(trained.start, held_out.start)}: choose other seeds.{purpose} or another run"
            )
    return next((each for each in tasks if each.name == task.name), tasks[0])


@dataclass(frozen=True, slots=True)
class Scouting:
    """The task of a scout and the task of the run that learns from it, in the same environment."""

    config: WarmStartConfig
    fleet: Fleet
    task: Task
    scout_task: Task
    """Options and limits of the scout's run."""
    images: bool
    """Whether turns keep images."""

    async def check_rules(self, seeds: Sequence[int]) -> None:
        """Play random episodes in both tasks. Raises ConfigError if the same actions have other results."""

        async def compare(seed: int) -> None:
            agent = ReferenceAgent(choose_randomly, self.task.actions, random.Random(seed))
            await self.play(seed, lambda _: agent, Want(valid_actions=True))

        await together(map(compare, seeds))

    async def play(
        self, seed: int, make_agent: Callable[[Session], Agent], want: Want, *, group: int = 0
    ) -> Demonstration:
        """Play an episode of the scout's task, and return the same moves in the other task.

        Invalid moves are not imitated, and random ones only if that is configured.

        Args:
            want: What observations of the scout's episode contain beside their text.

        Raises:
            ConfigError: The moves have other results in the other task.
        """
        played, limits = await play_start(self.fleet, self.scout_task, seed, want, make_agent, group=group)
        turns = [turn for turn in played.turns if turn.actions]
        longest = max((len(turn.actions) for turn in turns), default=0)

        def play_again(session: Session) -> Agent:
            is_short = 0 < (session.limits.max_actions_per_turn or 0) < longest
            for name in ("max_turns", "max_actions", *["max_actions_per_turn"] * is_short):
                there, here = getattr(limits, name), getattr(session.limits, name)
                if there != here:
                    raise self._refusal(f"its environment.{name} is {there}, and here it is {here}")
            return Repeater(turns, images=self.images)

        again, own_limits = await play_start(self.fleet, self.task, seed, Want(image=self.images), play_again)
        results = [[(turn.own_reward, turn.outcomes) for turn in each] for each in (turns, again.turns)]
        ends = [each.terminated and (each.terminated, each.success) for each in (played, again)]
        if results[0] != results[1] or ends[0] != ends[1]:
            raise self._refusal(f"from seed {seed}, the same {len(turns)} moves have different results")
        noise = self.config.imitate_noise
        imitate = [turn.valid == len(turn.actions) and (noise or bool(turn.reply)) for turn in turns]
        return Demonstration(replace(again, end=played.end, success=played.success), own_limits, imitate)

    def _refusal(self, reason: str) -> ConfigError:
        there, here = ({**task.options, "version": task.version or "any"} for task in (self.scout_task, self.task))
        different = [
            f"{name} ({there.get(name, 'not set')} there, {here.get(name, 'not set')} here)"
            for name in dict.fromkeys([*there, *here])
            if there.get(name) != here.get(name)
        ]
        return ConfigError(
            f"warm_start.from {self.config.scout} plays {self.task.environment} by other rules: {reason}. Options that "
            f"differ: {', '.join(different) or 'none, so it is not deterministic'}; give both runs the same rules, as "
            "only what a policy sees may differ"
        )


@asynccontextmanager
async def open_scout(scouting: Scouting | None) -> AsyncIterator[Explore | None]:
    """Load a scout, and yield the function that plays its demonstrations; None without a scout. Raises ConfigError."""
    if scouting is None:
        yield None
        return
    config, threads = scouting.config, torch.get_num_threads()
    try:
        agents = PretrainedAgents(config.scout, Sampling())
    except AgentRefused as error:
        raise ConfigError(f"warm_start.from {error}") from error
    torch.set_num_threads(threads)  # loading has set the number of the scout's run
    task = scouting.scout_task
    want = replace(agents.want, valid_actions=config.noise > 0 and not task.actions)

    async def explore(seed: int, attempt: str) -> Demonstration:
        group, rng = derive(seed, attempt), random.Random(f"scout/{seed}{attempt}")

        def make_agent(session: Session) -> Agent:
            return Distracted(agents.agent(session, task, group), config.noise, task.actions, rng)

        return await scouting.play(seed, make_agent, want, group=group)

    try:
        yield explore
    finally:
        await agents.close()


class Distracted(Agent):
    """A sampling agent some of whose moves are replaced by random ones. A turn of those has no sampled ids."""

    def __init__(self, agent: Agent, noise: float, actions: Sequence[str], rng: random.Random) -> None:
        self._agent, self._noise, self._actions, self._rng = agent, noise, actions, rng

    async def act(self, observation: Observation, episode: Episode) -> Move | Stop:
        if self._rng.random() < self._noise:
            action = choose_randomly(observation, self._actions, self._rng)
            if action is not None:
                return Move(action, [action])
        if episode.turns and not episode.turns[-1].reply:
            self._agent.recall(episode)
        return await self._agent.act(observation, episode)

    def image_of(self, observation: Observation) -> bytes:
        return self._agent.image_of(observation)

    def close(self) -> None:
        self._agent.close()


class Repeater(Agent):
    """Agent that plays recorded turns again. images: whether turns keep the environment's images."""

    def __init__(self, turns: Sequence[Turn], *, images: bool) -> None:
        self._turns, self._images = turns, images

    async def act(self, observation: Observation, episode: Episode) -> Move | Stop:
        if len(episode.turns) == len(self._turns):
            return Stop()
        return await GivenTurn(self._turns[len(episode.turns)].actions).act(observation, episode)

    def image_of(self, observation: Observation) -> bytes:
        return observation.image.data if self._images and observation.image else b""
