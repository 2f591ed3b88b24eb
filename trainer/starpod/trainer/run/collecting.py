"""Collection of the groups that a step trains on, and of replacements for lost or uniform groups."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any

import numpy as np

from starpod.client import EnvironmentBug
from starpod.trainer.agents.engine import EngineAgents
from starpod.trainer.algorithms.filters import needs_reask
from starpod.trainer.algorithms.terms import PROCESS
from starpod.trainer.configuration.seeds import SeedCursor, derive
from starpod.trainer.data.group import Group, episodes_of
from starpod.trainer.data.replay import ReplayBuffer, oldest_version
from starpod.trainer.diagnostics.diversity import diversity
from starpod.trainer.diagnostics.metrics import (
    episode_metrics,
    latency_metrics,
    metrics_by_task,
    search_metrics,
    staleness_metrics,
    tokens_spent,
)
from starpod.trainer.engines.base import EngineStats
from starpod.trainer.rewards.truth import punish_repetition
from starpod.trainer.rollout.ahead import Ahead
from starpod.trainer.rollout.collect import Collected, CollectionFailed, Collector, of_all_ranks
from starpod.trainer.rollout.mixture import Mixture
from starpod.trainer.run.progress import Progress, Shared


@dataclass(slots=True)
class Collection:
    """The groups of one step."""

    groups: list[Group]
    """Groups to train on."""
    played: list[Group]
    """All groups that were played, including those that dynamic sampling rejected."""
    rejected_groups: list[Group] = field(default_factory=list)
    """Groups that dynamic sampling rejected."""
    metrics: dict[str, float] = field(default_factory=dict)
    tokens: int = 0
    """Number of tokens sampled for this collection."""


@dataclass(slots=True)
class _Rounds:
    """Results of all rounds of one collection."""

    groups: list[Group] = field(default_factory=list)
    uniform: list[Group] = field(default_factory=list)
    """Groups that dynamic sampling rejected because all of their returns are equal."""
    collected: list[Collected] = field(default_factory=list)
    stale: int = 0
    """Number of groups that were dropped because they were too old."""


class Collecting:
    """Collector of each step's groups: plays them, as early as the staleness bound allows, or takes them from files.

    Args:
        collectors: One per stage in order, then one with the unchanged configuration.
        offline: If given, take P of these groups per step instead of playing any. They are reshuffled at each pass,
            with the run's seed.
    """

    def __init__(
        self, shared: Shared, collectors: Sequence[Collector[EngineAgents]], *, offline: Sequence[Group] = ()
    ) -> None:
        config = shared.config
        self.collectors = collectors
        self.offline = offline
        self.cursor = SeedCursor(config.seeds.train, config.seed)
        self.mixture = Mixture(config.tasks, config.seeds.train, config.seed)
        self.replay = ReplayBuffer(config.replay)
        sizes = [stage.collect.group_size for stage in config.in_stages]
        self.ahead = Ahead(list(zip(collectors, sizes, strict=True)), shared.parallel)
        self._shared = shared
        self._restarts = 0
        self._last_collection_end: float | None = None

    @property
    def collector(self) -> Collector[EngineAgents]:
        """Collector with the unchanged configuration, which applies after the last stage."""
        return self.collectors[-1]

    @property
    def parts(self) -> dict[str, Any]:
        """Parts that a step changes and a checkpoint contains, by name."""
        search = self.collector.search
        return {"cursor": self.cursor, "mixture": self.mixture} | ({"pivots": search.pivots} if search else {})

    def begin_stage(self) -> None:
        """Use the current stage's configuration for groups admitted from now on. Groups in play keep the old one."""
        self.ahead.stage = self._shared.settings.stages.index

    async def collect(self, progress: Progress) -> Collection:
        """Return P groups of N fresh episodes.

        Replacements are played for groups with too few episodes and, with dynamic sampling, for uniform groups.

        Raises:
            CollectionFailed: Episodes failed, and no group is left.
        """
        if self.offline:
            groups = self._offline_groups(progress.step)
            _forget_scores(groups)
            return Collection(groups, groups, metrics=episode_metrics(groups))
        config = self._shared.settings.now.collect
        start_time, stats = perf_counter(), self.collector.agents.engine.stats()
        self._shared.screen.phase("collecting")
        rounds = await self._play_rounds(progress)
        total = Collected.joined(rounds.collected)
        # Measure all groups that were played. Dynamic sampling selects the varied ones, which would hide a collapse of
        # diversity.
        played = [*rounds.groups, *rounds.uniform]
        for task in self._shared.settings.now.tasks:
            episodes = [episode for group in played for episode in group.members if episode.task == task.name]
            punish_repetition(task.rewards.relations, episodes)
        if not played:
            raise CollectionFailed(
                f"step {progress.step} has nothing to train on: {total.failed} episodes failed and left no group of "
                f"at least {config.min_group_size}; the first error: {total.error}"
            )
        bugs = [episode.error for episode in total.failed_episodes if episode.error.startswith(EnvironmentBug.__name__)]
        if len(bugs) > 1 and len(bugs) >= total.attempted / 4:
            raise CollectionFailed(
                f"in step {progress.step}, {len(bugs)} of {total.attempted} episodes failed because of a bug of the "
                f"environment, so the others are no sample of its start states; the first error: {bugs[0]}; correct "
                "the environment"
            )
        metrics = episode_metrics(played) | latency_metrics(total.latencies) | diversity(episodes_of(played))
        metrics |= {
            "collect/failed": float(total.failed),
            "collect/groups_dropped": float(total.dropped),
            "collect/groups_reasked": float(len(rounds.uniform)),
        }
        metrics |= self._rates(played, stats, start_time)
        metrics |= self._follow_tasks(played)
        if (search := self.collector.search) is not None:
            search.pivots.observe(played)
            metrics |= search_metrics(played)
        if config.max_staleness:
            metrics |= staleness_metrics(rounds.groups, progress.version)
            metrics["collect/stale_groups"] = float(rounds.stale)
        return Collection(rounds.groups, played, rounds.uniform, metrics, tokens_spent(played))

    async def _play_rounds(self, progress: Progress) -> _Rounds:
        """Take the oldest groups, and play replacements for lost or uniform groups, round by round."""
        config, dynamic = self._shared.settings.now.collect, self._shared.settings.now.algorithm.dynamic_sampling
        rounds = _Rounds()
        free_places = config.groups + self._groups_ahead(progress.step) - len(self.ahead)
        self.ahead.admit(self.mixture.starts(self.mixture.divide(max(free_places, 0)), self.cursor))
        starts = self.ahead.oldest(config.groups)
        while starts:
            pending_groups = self.ahead.take(starts, min_size=config.min_group_size)
            collected = await self._shared.interrupts.unless_requested(
                of_all_ranks(pending_groups, self._shared.parallel, self._shared.screen.warn)
            )
            rounds.stale += self._drop_stale(collected, progress.version)
            task_by_id = {start.id: start.task for start in starts}
            uniform: list[str] = []
            for group, is_uniform in zip(collected.groups, needs_reask(dynamic, collected.groups), strict=True):
                task = task_by_id.pop(group.id)
                (rounds.uniform if is_uniform else rounds.groups).append(group)
                uniform += [task] if is_uniform else []
            round_count = len(rounds.collected)
            tasks = list(task_by_id.values()) if round_count < config.max_rounds else []
            tasks += uniform if round_count < dynamic.max_rounds else []
            rounds.collected.append(collected)
            self.ahead.admit(self.mixture.starts(tasks, self.cursor))
            starts = self.ahead.oldest_of(tasks)
        return rounds

    def _rates(self, groups: Sequence[Group], before: EngineStats, start_time: float) -> dict[str, float]:
        """Return times and rates of a collection. start_time, before: clock and engine counts at its start."""
        after = self.collector.agents.engine.stats()
        seconds = perf_counter() - start_time
        config = self._shared.settings.now
        if after.restarts > self._restarts:
            self._restarts = after.restarts
            allowance = config.engine.restarts
            self._shared.screen.warn(
                f"the engine lost a process and recovered ({self._restarts} of engine.restarts={allowance})"
            )
        # With groups played ahead, some work was done before this collection. Divide by the time since the last one
        # instead.
        span = perf_counter() - (self._last_collection_end or start_time) if config.collect.max_staleness else seconds
        self._last_collection_end = perf_counter()
        generate_seconds = after.seconds - before.seconds
        # Sum the tokens of all ranks. The time is this rank's.
        counts = [getattr(after, name) - getattr(before, name) for name in ("sampled", "reused", "prefilled")]
        sampled, reused, prefilled = map(sum, zip(*self._shared.parallel.gather_objects(counts), strict=True))
        turns = sum(len(episode.turns) for group in groups for episode in group.episodes)
        return {
            "time/collect": seconds,
            "time/generate_wait": generate_seconds,
            "time/environment_wait": max(seconds - generate_seconds, 0.0),
            "rate/sampled_tokens_per_s": sampled / max(generate_seconds, 1e-9),
            "rate/prompt_reused": reused / max(reused + prefilled, 1),
            "rate/environment_steps_per_s": turns / max(span, 1e-9),
            "rate/episodes_per_s": sum(len(group.episodes) for group in groups) / max(span, 1e-9),
        }

    def _follow_tasks(self, groups: Sequence[Group]) -> dict[str, float]:
        """Return metrics per environment if there are several, and update their curricula."""
        several = bool(self._shared.config.environments)
        metrics = metrics_by_task(groups) if several else {}
        for task, values in self.mixture.metrics().items():
            metrics |= {f"{f'environments/{task}' if several else 'collect'}/{key}": values[key] for key in values}
        for task in self.mixture.silent(groups):
            self._shared.screen.warn(
                f"{task or 'the environment'} does not report success, so its curriculum learns nothing"
            )
        for task in self.mixture.update(groups):
            self._shared.screen.phase(f"{task} continues at level {self.mixture.levels()[task]}".lstrip())
        return metrics

    def _groups_ahead(self, step: int) -> int:
        """Return how many groups for later steps may be in play now.

        Each step trains on the oldest groups, so a group admitted now is trained on at most `max_staleness` versions
        later. This is the bound of arXiv 2505.24298 with batches in the order of admission.
        """
        config = self._shared.settings.now
        steps = config.collect.max_staleness // config.replay.reuse
        return config.collect.groups * min(steps, max(config.stop.iterations - step, 0))

    def _drop_stale(self, collected: Collected, version: int) -> int:
        """Remove and count groups that are too old. They occur if a run is resumed with a smaller bound."""
        oldest = version - self._shared.settings.now.collect.max_staleness
        fresh_groups = [group for group in collected.groups if oldest_version(group, version) >= oldest]
        dropped = len(collected.groups) - len(fresh_groups)
        collected.groups = fresh_groups
        return dropped

    def _offline_groups(self, step: int) -> list[Group]:
        count = len(self.offline)
        size = min(self._shared.settings.now.collect.groups, count)
        # Groups left over at the end of a pass are skipped in that pass, so that no batch contains a group twice.
        sweep, batch = divmod(step - 1, count // size)
        order = np.random.default_rng(derive(self._shared.config.seed, "offline", sweep)).permutation(count)
        return [self.offline[index] for index in order[batch * size : (batch + 1) * size]]

    def with_replayed(self, groups: list[Group], progress: Progress) -> tuple[list[Group], Mapping[str, float]]:
        """Return the fresh groups plus older groups from the replay buffer if replay is on, and metrics."""
        if not self.replay.enabled or self.offline:
            return groups, {}
        rng = np.random.default_rng(derive(self._shared.config.seed, "replay", progress.step))
        stale_groups, dropped = self.replay.sample(progress.version, rng)
        self.replay.add(groups, progress.version)
        _forget_scores(stale_groups)
        return groups + stale_groups, {"collect/stale_dropped": float(dropped)}


def _forget_scores(groups: Sequence[Group]) -> None:
    """Remove the turn scorer's old rewards: the filter compares returns without them, and the scorer pays again."""
    for turn in (turn for group in groups for episode in group.members for turn in episode.turns):
        turn.parts.pop(PROCESS, None)
