"""The environments of a run: servers, tasks and demonstrations."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field

from starpod.client import Fleet, Want
from starpod.trainer.agents.base import Task
from starpod.trainer.configuration.config import Config
from starpod.trainer.configuration.preflight import check_environment
from starpod.trainer.configuration.section import ConfigError
from starpod.trainer.configuration.seeds import SeedCursor
from starpod.trainer.configuration.tasks import TaskConfig
from starpod.trainer.data.episode import Episode
from starpod.trainer.models.config import TINY
from starpod.trainer.output.screen import Screen
from starpod.trainer.parallel.ranks import Parallel
from starpod.trainer.prompts.template import Template
from starpod.trainer.rollout.config import Facts
from starpod.trainer.rollout.environment import connect, make_task, read_facts
from starpod.trainer.run.interrupts import Interrupts
from starpod.trainer.warm_start.chats import encode_chats
from starpod.trainer.warm_start.demonstrations import (
    Demonstration,
    choose_best,
    collect_demonstrations,
    drop_failures,
    of_episodes,
)
from starpod.trainer.warm_start.files import FileContents, read_contents
from starpod.trainer.warm_start.scout import RULES_EPISODES, Scouting, open_scout, read_scout
from starpod.trainer.warm_start.teacher import DemonstrationWriter


@dataclass(slots=True)
class Served:
    """One environment of a run: its servers, its task and its demonstrations."""

    config: TaskConfig
    fleet: Fleet
    task: Task
    writer: DemonstrationWriter
    facts: Facts
    demonstrations: list[Demonstration] = field(default_factory=list)
    contents: FileContents | None = None
    """Contents of the file of demonstrations, once it has been read."""
    texts: list[str] = field(default_factory=list)
    """All texts of this environment that a policy will read or write, if a tokenizer is trained on them."""

    async def demonstrate(self, config: Config, cursor: SeedCursor, screen: Screen) -> None:
        """Read demonstrations from the configured file, and collect more from the next seeds. Raises ConfigError."""
        warm_start = self.config.warm_start
        seeds = cursor.take(warm_start.episodes)

        # Read the file first, so that an unusable one is reported before minutes of play.
        file_demonstrations = await self._read()
        async with open_scout(self._scouting(config)) as explore:
            demonstrations = await collect_demonstrations(
                self.fleet,
                warm_start,
                self.task,
                seeds,
                self.writer.attempts,
                images=self.config.prompt.shows_images,
                explore=explore,
                watch=screen.counter("demonstrations", len(seeds)),
            )
        kept_share = float(explore is None) if warm_start.failures is None else warm_start.failures
        demonstrations = drop_failures(demonstrations, kept_share)
        self.demonstrations = [*choose_best(demonstrations, warm_start.best), *file_demonstrations]

    async def check_scout(self, config: Config) -> None:
        """Raise ConfigError if the scout plays by other rules. It is not loaded."""
        if (scouting := self._scouting(config)) is not None:
            await scouting.check_rules(SeedCursor(config.seeds.warmstart, config.seed).take(RULES_EPISODES))

    def _scouting(self, config: Config) -> Scouting | None:
        if not self.config.warm_start.scout:
            return None
        scout = read_scout(config, self.config)
        task = make_task(scout.environment, self.task.actions, scout.name)
        return Scouting(self.config.warm_start, self.fleet, self.task, task, images=self.config.prompt.shows_images)

    async def _read(self) -> list[Demonstration]:
        path = self.config.warm_start.demonstrations
        if not path:
            return []
        self.contents = contents = read_contents(self.config.warm_start, self.task.environment)
        (session,) = await self.task.open(self.fleet, 0, 1, Want())
        await session.close()
        demos = of_episodes(contents.episodes, session.limits)
        if self.config.prompt.shows_images and not all(turn.image for demo in demos for turn in demo.episode.turns):
            raise ConfigError(
                f"warm_start.demonstrations {path} has turns without an image, but prompt.observation is "
                f"{self.config.prompt.observation}: give a file of a run that showed images"
            )
        return demos


@contextlib.asynccontextmanager
async def serve(config: Config, task: TaskConfig) -> AsyncIterator[Served]:
    """Connect to the servers of an environment, and start them if the run hosts them. Raises ConfigError."""
    async with connect(task.environment) as fleet:
        facts = await read_facts(fleet, task.environment)
        await check_environment(config, task, fleet, facts)
        writer = DemonstrationWriter(task.warm_start, task.prompt, facts.actions, config.script, config.sampling)
        yield Served(task, fleet, make_task(task.environment, facts.actions, task.name), writer, facts)


async def demonstrate(
    config: Config, served: Sequence[Served], *, parallel: Parallel, screen: Screen, interrupts: Interrupts
) -> None:
    """Fill in the demonstrations of each environment. Rank 0 plays them for all.

    Args:
        served: Environments of the run, in the order in which they take seeds.
        parallel: The ranks, all of which must call this.

    Raises:
        Interrupted: A stop was requested.
        ConfigError: Demonstrations cannot be read or played.
    """
    if count := sum(task.warm_start.episodes for task in config.tasks):
        screen.phase(f"collecting {count} demonstrations")
    cursor = SeedCursor(config.seeds.warmstart, config.seed)
    for environment in served:
        if parallel.is_main:
            await interrupts.unless_requested(environment.demonstrate(config, cursor, screen))
            if config.model.name == TINY:
                chats = environment.contents.chats if environment.contents else []
                environment.texts = await environment.writer.texts(environment.demonstrations)
                environment.texts += [message["content"] for chat in chats for message in chat.messages]
        pair = environment.demonstrations, environment.contents
        environment.demonstrations, environment.contents = parallel.broadcast_object(pair)


async def episodes_to_imitate(
    config: Config, served: Sequence[Served], templates: Mapping[str, Template]
) -> list[Episode]:
    """Return the demonstrations as episodes in the policy's format; an empty list if the run does not imitate.

    Args:
        served: Environments with their demonstrations. Each demonstration becomes a group.
        templates: Chat template of each environment, by its name.

    Raises:
        ConfigError: The agents in the demonstrations are not those in `script.policies`.
    """
    if not config.warm_start.imitates:
        return []
    pairs = [(environment, demonstration) for environment in served for demonstration in environment.demonstrations]
    episodes = [
        await environment.writer.episode(demonstration, templates[environment.config.name], index)
        for index, (environment, demonstration) in enumerate(pairs)
    ]
    for environment in served:
        if environment.contents is not None:
            episodes += encode_chats(
                environment.contents,
                templates[environment.config.name],
                most_tokens=config.sampling.max_episode_tokens,
                group=len(episodes),
                task=environment.config.name,
            )
    if not episodes and (contents := [each.contents for each in served if each.contents is not None]):
        raise ConfigError(f"warm_start.demonstrations: no conversation can be imitated: {contents[0].sentence()}")
    policies = set(config.script.policies)
    agents = {turn.agent_id for episode in episodes for turn in episode.turns}
    if policies and agents and agents != policies:
        raise ConfigError(
            f"script.policies names {', '.join(sorted(policies))}, but the agents of the demonstrations are "
            f"{', '.join(map(repr, sorted(agents)))}: name all agents and no others"
        )
    return episodes
