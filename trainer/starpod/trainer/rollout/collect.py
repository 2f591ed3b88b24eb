"""Collection of groups of episodes. Each episode has its own coroutine, so a slow one does not delay the others."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from starpod.client import Fleet, Session
from starpod.trainer.agents.base import Agents, Task
from starpod.trainer.data.episode import Episode
from starpod.trainer.data.group import Group
from starpod.trainer.rewards.reward import Rewards
from starpod.trainer.rollout.branches import Brancher
from starpod.trainer.rollout.expert_start import open_near_success
from starpod.trainer.rollout.play import OWN_REWARD, play, together
from starpod.trainer.rollout.saved_starts import SavedStart, open_saved
from starpod.trainer.rollout.search import Search

if TYPE_CHECKING:
    from starpod.trainer.parallel.ranks import Parallel


@dataclass(frozen=True, slots=True)
class Start:
    """A group that is to be played."""

    id: int
    """Number of the group, unique in the run."""
    seed: int
    """Seed of the start state."""
    task: str = ""
    """Name of its task; "" if the run has only one."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """Options that replace the task's options."""
    saved: SavedStart | None = None
    """State in which the episodes begin; None begins at the start state of `seed`."""
    members: Collection[int] | None = None
    """Members to play if the others were played before; None: all."""


class CollectionFailed(Exception):
    """Infrastructure failures left no group with enough episodes. The message contains the first error."""


@dataclass(slots=True)
class Collected:
    """The groups of a collection, in the order of their starts."""

    groups: list[Group] = field(default_factory=list)
    failed_episodes: list[Episode] = field(default_factory=list)
    """Episodes that the infrastructure or a bug of the environment failed."""
    dropped: int = 0
    """Number of groups that were dropped because too many of their episodes failed."""
    latencies: list[float] = field(default_factory=list)
    """Duration of each environment step in seconds."""
    attempted: int = 0
    """Number of episodes that were played, with those that failed and those of dropped groups."""

    @classmethod
    def of(cls, groups: Sequence[Group], min_size: int) -> Collected:
        """Build a collection of the groups with at least `min_size` episodes. The others count as dropped."""
        failed_episodes = [episode for group in groups for episode in group.failed]
        valid_groups = [group for group in groups if len(group.episodes) >= min_size]
        turns = (turn for group in groups for episode in group.members for turn in episode.own_turns)
        return cls(
            valid_groups,
            failed_episodes,
            len(groups) - len(valid_groups),
            [turn.stepping for turn in turns if turn.actions],
            sum(len(group.members) for group in groups),
        )

    @property
    def failed(self) -> int:
        """Number of failed episodes."""
        return len(self.failed_episodes)

    @property
    def error(self) -> str:
        """Error of the first failed episode."""
        return self.failed_episodes[0].error if self.failed_episodes else ""

    @property
    def episodes(self) -> list[Episode]:
        """All episodes that did not fail, group after group, including those without sampled tokens."""
        return [episode for group in self.groups for episode in group.episodes]

    @classmethod
    def joined(cls, parts: Sequence[Collected]) -> Collected:
        """Concatenate several collections."""
        return cls(
            [group for part in parts for group in part.groups],
            [episode for part in parts for episode in part.failed_episodes],
            sum(part.dropped for part in parts),
            [latency for part in parts for latency in part.latencies],
            sum(part.attempted for part in parts),
        )


async def of_all_ranks(collecting: Awaitable[Collected], parallel: Parallel, warn: Callable[[str], None]) -> Collected:
    """Return on every rank the groups of all ranks, ordered by id, and warn if episodes failed.

    Args:
        parallel: The ranks, all of which must call this.
        warn: Called with the number and the first error of failed episodes.
    """
    collected, *parts = await parallel.all_done(collecting)
    if parts:
        collected = Collected.joined([collected, *parts])
        collected.groups.sort(key=lambda group: group.id)
    if collected.failed:
        warn(f"{collected.failed} episodes failed, the first one with: {collected.error}")
    return collected


Players = TypeVar("Players", bound=Agents)


@dataclass(frozen=True, slots=True, kw_only=True)
class Collector(Generic[Players]):
    """Plays groups of episodes of one task, or of several."""

    fleet: Fleet
    agents: Players
    task: Task
    rewards: Rewards = OWN_REWARD
    watch: Callable[[Episode], None] = lambda episode: None
    """Called with each episode that is over."""
    deadline: float | None = None
    """Maximum duration of an episode in seconds; None is no limit."""
    search: Search | None = None
    """Search that finds the episodes of a group; None plays them without a search."""
    others: Mapping[str, Collector[Players]] = field(default_factory=dict)
    """Collectors of other tasks by name. They play the starts that name their task."""

    @property
    def by_task(self) -> dict[str, Collector[Players]]:
        """The collector of each task, by its name."""
        return dict(self.others) or {"": self}

    async def collect(self, starts: Sequence[Start], size: int, *, min_size: int = 1) -> Collected:
        """Play `size` episodes from each start, at the same time if the agents allow that many.

        Errors of `Fleet.open` (a wrong configuration, or no server is left) and AgentRefused are raised. An episode
        that fails later is left out and counted.

        Args:
            starts: Starts of the groups, which are returned in this order.
            min_size: Groups with fewer episodes than this are dropped.
        """
        limit = self.agents.at_once
        slots = nullcontext() if limit is None else asyncio.Semaphore(max(1, limit // size))

        async def play_in_slot(start: Start) -> Group:
            async with slots:
                return await self.play_group(start, size)

        return Collected.of(await together(map(play_in_slot, starts)), min_size)

    async def play_group(self, start: Start, size: int, begun: dict[int, Episode] | None = None) -> Group:
        """Play `size` episodes from one start state.

        Args:
            begun: The group's episodes by member; updated while they are played. Finished episodes in it are not
                played again, and unfinished ones are continued.
        """
        if (collector := self.others.get(start.task)) is not None:
            return await collector.play_group(start, size, begun)
        begun = {} if begun is None else begun
        task = self.task.with_options(start.options)
        if self.search is not None:
            brancher = Brancher(
                fleet=self.fleet,
                agents=self.agents,
                task=task,
                group=start.id,
                seed=start.seed,
                rewards=self.rewards,
                watch=self.watch,
                deadline=self.deadline,
            )
            return await self.search.find(brancher, size)

        async def play_member(session: Session) -> None:
            if start.members is not None and session.member not in start.members:
                return
            record = begun.get(session.member)
            if record is not None and record.end and not record.failed:
                return
            begun[session.member] = episode = Episode.begin(session, start.id, task.name)
            await play(
                self.agents.agent(session, task, start.id),
                session,
                rewards=self.rewards,
                watch=self.watch,
                deadline=self.deadline,
                episode=episode,
                past_turns=record.turns if record is not None else (),
            )

        if sum(bool(episode.end) and not episode.failed for episode in begun.values()) < size:
            sessions = await self._open(task, start, size)
            try:
                await together(map(play_member, sessions))
            finally:
                await self.fleet.close_sessions(sessions)
        members = [begun[member] for member in sorted(begun)]
        return Group(
            start.id,
            [episode for episode in members if not episode.failed],
            [episode for episode in members if episode.failed],
        )

    async def _open(self, task: Task, start: Start, size: int) -> list[Session]:
        want, moves = self.agents.want, task.expert_moves_left
        if start.saved is not None:
            return await open_saved(task, self.fleet, start.saved, size, want, group=start.id)
        if moves is not None:
            return await open_near_success(task, self.fleet, start.seed, size, want=want, moves=moves, group=start.id)
        return await task.open(self.fleet, start.seed, size, want)


def starts_from(seeds: Sequence[int]) -> list[Start]:
    """Return one start per seed, with ids 0, 1, ..."""
    return [Start(index, seed) for index, seed in enumerate(seeds)]
