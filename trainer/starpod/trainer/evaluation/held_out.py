"""Evaluation on held-out start states, by a run's policy and by reference policies."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any, Literal

from starpod.trainer.agents.base import Task
from starpod.trainer.agents.best_of import BestOfAgents
from starpod.trainer.agents.engine import EngineAgents
from starpod.trainer.configuration.seeds import Purpose
from starpod.trainer.data.episode import Episode
from starpod.trainer.evaluation.figures import evaluate_reference, renumber_groups
from starpod.trainer.output.pictures import in_order, write_pictures
from starpod.trainer.output.run_folder import RunFolder
from starpod.trainer.rollout.collect import Collected, Collector, of_all_ranks, starts_from
from starpod.trainer.rollout.environment import make_task
from starpod.trainer.rollout.frames import draw_episodes
from starpod.trainer.run.progress import Shared
from starpod.trainer.scorers.base import TurnScorer


class HeldOut:
    """Player of held-out start states with the run's collectors. Raises Interrupted at a signal.

    Settings that a stage changes do not affect evaluations. scorer: chooses among replies if `best_of` is on.
    """

    def __init__(self, shared: Shared, collector: Collector[EngineAgents], scorer: TurnScorer | None) -> None:
        self.collectors = collector.by_task
        self.tasks = {task.name: task for task in shared.config.tasks}
        self.scorer = scorer
        self._shared = shared

    async def play(
        self, purpose: Purpose, streams: str, what: str = "", *, decoding: Literal["", "greedy", "best_of"] = ""
    ) -> dict[str, Collected]:
        """Play one episode per seed of each task.

        Args:
            purpose: Purpose whose held-out seeds are played.
            streams: Name of the random streams of the replies. Two evaluations with the same streams differ by their
                policy, not by chance.
            what: Name of the evaluated policy, followed by a space, for the screen.
            decoding: "greedy" or "best_of"; "" samples at the temperature of evaluations.
        """
        collected = {}
        for name, collector in self.collectors.items():
            settings = self.tasks[name].evaluation
            phase = f"evaluating {what}on {settings.episodes} {purpose} seeds" + f" of {name}" * bool(name)
            if not decoding:
                self._shared.screen.phase(phase)
            starts = self._shared.parallel.split(starts_from(self.seeds(name, purpose)))
            watch = self._shared.screen.counter(phase, len(starts))
            temperature = 0.0 if decoding == "greedy" else settings.temperature
            agents = replace(collector.agents, purpose=streams, temperature=temperature, hint="")
            if decoding == "best_of":
                assert self.scorer is not None
                score = partial(self._shared.parallel.in_thread, self.scorer.score)
                agents = BestOfAgents.from_agents(agents, count=self._shared.config.evaluation.best_of, score=score)
            task, rewards = self.task(name), collector.rewards.without_judges()
            player = replace(collector, agents=agents, task=task, rewards=rewards, search=None, others={}, watch=watch)
            collecting = of_all_ranks(player.collect(starts, 1), self._shared.parallel, self._shared.screen.warn)
            collected[name] = await self._shared.interrupts.unless_requested(collecting)
        return collected

    async def play_references(self) -> dict[str, Any]:
        """Return metrics of the reference policies by task and policy. They need no model, so only rank 0 plays."""

        async def play() -> dict[str, Any]:
            if not self._shared.parallel.is_main:
                return {}
            results: dict[str, Any] = {}
            for name, collector in self.collectors.items():
                task, seeds = self.task(name), self.seeds(name, "selection")
                if policies := self.tasks[name].evaluation.reference:
                    self._shared.screen.phase(f"playing {', '.join(policies)} on {len(seeds)} selection seeds")
                results[name] = {
                    policy: await evaluate_reference(
                        collector.fleet,
                        policy,
                        task,
                        seeds,
                        watch=self._shared.screen.counter(f"playing {policy}", len(seeds)),
                    )
                    for policy in policies
                }
            return results

        return (await self._shared.interrupts.unless_requested(self._shared.parallel.all_done(play())))[0]

    def seeds(self, name: str, purpose: Purpose) -> range:
        return self._shared.config.seeds.held_out(purpose, self.tasks[name].evaluation.episodes)

    def task(self, name: str) -> Task:
        return make_task(self.tasks[name].held_out, self.collectors[name].task.actions, name)

    def kept_episodes(self, collections: Mapping[str, Collected]) -> list[Episode]:
        """Return the first `keep_episodes` episodes of each environment, with unique group numbers."""
        limit = self._shared.config.evaluation.keep_episodes
        return renumber_groups([collected.episodes[:limit] for collected in collections.values()])

    async def draw(self, folder: RunFolder) -> None:
        """Render episodes of the evaluations for the report."""
        self._shared.screen.phase("drawing episodes for the report")
        players = {name: (collector.fleet, self.task(name)) for name, collector in self.collectors.items()}
        if pictures := await draw_episodes(players, in_order(folder)):
            write_pictures(folder.pictures, pictures)
