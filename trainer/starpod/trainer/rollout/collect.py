"""Collects groups of episodes: one coroutine for each, so that slow episodes delay no others."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from pydantic import Field, model_validator

from starpod.client import Fleet
from starpod.trainer.agents.base import Agents, Task
from starpod.trainer.data.episode import Episode, Group
from starpod.trainer.rewards.reward import Rewards
from starpod.trainer.rollout.play import OWN_REWARD, play
from starpod.trainer.section import Section


class CollectConfig(Section):
    """P groups of N episodes; the members of a group share a start state."""

    groups: int = Field(default=8, ge=1, description="Start states of a collection (P).")
    group_size: int = Field(default=16, ge=1, description="Episodes from each (N).")
    min_group_size: int = Field(
        default=2,
        ge=1,
        description="Episodes below which a group is dropped and replaced.",
    )
    keep_mib: float = Field(
        default=64.0,
        ge=0,
        description="MiB of collected episodes that the run folder keeps, the newest ones; 0: none.",
    )
    max_rounds: int = Field(default=4, ge=1, description="Most rounds of replacing in a collection.")

    @model_validator(mode="after")
    def _sizes(self) -> CollectConfig:
        if self.min_group_size > self.group_size:
            raise ValueError(
                f"collect.min_group_size {self.min_group_size} is more than group_size {self.group_size}: "
                "every group would be dropped"
            )
        return self


@dataclass(frozen=True, slots=True)
class Start:
    """A group to be played: its id, unique in the run, and the seed of its start state.

    task: the name of its task, where the run has several. options: over those of the task.
    """

    id: int
    seed: int
    task: str = ""
    options: Mapping[str, Any] = field(default_factory=dict)


class CollectionFailed(Exception):
    """The infrastructure failed so many episodes that no group was left. The message holds the first error."""


@dataclass(slots=True)
class Collected:
    """Groups in the order in which they were asked for, and what became of the rest.

    failed: episodes that the infrastructure failed. error: what failed the first of them; empty where none did.
    dropped: groups that ended up too small. latencies: seconds of each call of an environment.
    """

    groups: list[Group] = field(default_factory=list)
    failed: int = 0
    error: str = ""
    dropped: int = 0
    latencies: list[float] = field(default_factory=list)

    @property
    def episodes(self) -> list[Episode]:
        """Those that did not fail, group after group, untrainable ones too."""
        return [episode for group in self.groups for episode in group.episodes]

    @classmethod
    def joined(cls, parts: Sequence[Collected]) -> Collected:
        """Several as one, group after group."""
        return cls(
            [group for part in parts for group in part.groups],
            sum(part.failed for part in parts),
            next((part.error for part in parts if part.error), ""),
            sum(part.dropped for part in parts),
            [latency for part in parts for latency in part.latencies],
        )


Players = TypeVar("Players", bound=Agents)


@dataclass(frozen=True, slots=True, kw_only=True)
class Collector(Generic[Players]):
    """Plays groups of episodes of one task, or of several.

    agents: who plays. rewards: what a turn earns. watch: called with each episode that is over.
    others: collectors of other tasks by name; starts that name one of them are played by it.
    """

    fleet: Fleet
    agents: Players
    task: Task
    rewards: Rewards = OWN_REWARD
    watch: Callable[[Episode], None] = lambda episode: None
    others: Mapping[str, Collector[Players]] = field(default_factory=dict)

    async def collect(self, starts: Sequence[Start], size: int, *, min_size: int = 1) -> Collected:
        """Plays `size` episodes from each start, all at once or as many as the agents allow.

        Groups come back in the order of `starts`; those with fewer than `min_size` episodes are dropped.
        Raises what opening raises (the configuration is wrong, or no server is left) and AgentRefused; an episode that
        fails later is counted and left out.
        """
        collected = Collected()
        at_once = self.agents.at_once
        slots = nullcontext() if at_once is None else asyncio.Semaphore(max(1, at_once // size))
        tasks = [
            asyncio.ensure_future(self.others.get(start.task, self)._play_group(start, size, slots)) for start in starts
        ]
        try:
            groups = await asyncio.gather(*tasks)
        except BaseException:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            raise
        for group in groups:
            collected.failed += len(group.failed)
            if group.failed and not collected.error:
                collected.error = group.failed[0].error
            for episode in (*group.episodes, *group.failed):
                collected.latencies.extend(turn.stepping for turn in episode.turns if turn.actions)
            if len(group.episodes) < min_size:
                collected.dropped += 1
            else:
                collected.groups.append(group)
        return collected

    async def _play_group(self, start: Start, size: int, slots: asyncio.Semaphore | nullcontext[None]) -> Group:
        task = self.task.with_options(start.options)
        async with slots:
            sessions = await task.open(self.fleet, start.seed, size, self.agents.want)
            try:
                episodes = await asyncio.gather(
                    *(
                        play(
                            self.agents.agent(session, task, start.id),
                            session,
                            group=start.id,
                            task=task.name,
                            rewards=self.rewards,
                            watch=self.watch,
                        )
                        for session in sessions
                    )
                )
            finally:
                await self.fleet.close_sessions(sessions)
        return Group(
            start.id,
            [episode for episode in episodes if not episode.failed],
            [episode for episode in episodes if episode.failed],
        )


def starts_from(seeds: Sequence[int]) -> list[Start]:
    """A start state for each seed, numbered from 0."""
    return [Start(index, seed) for index, seed in enumerate(seeds)]
