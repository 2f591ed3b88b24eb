"""Plays the episodes of a plan that its folder lacks."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from starpod.client import Fleet
from starpod.trainer.agents.base import Agents
from starpod.trainer.data.episode import Episode
from starpod.trainer.evaluation.folder import EvaluationFolder
from starpod.trainer.evaluation.plan import EvaluationPlan
from starpod.trainer.rollout.collect import Collector, Start

Missing = dict[tuple[str, str], list[Start]]
"""Starts to play, with their members, by model and environment. Only pairs that lack an episode are in it."""


def missing_in(folder: EvaluationFolder, plan: EvaluationPlan, *, retry_failed: bool) -> Missing:
    """Return what is still to be played. Raises BadEpisodes.

    Args:
        retry_failed: Play failed episodes again.
    """
    missing: Missing = {}
    for model in plan.models:
        episodes = folder.read(plan, model)
        done = {key for key, episode in episodes.items() if not (retry_failed and episode.failed)}
        for environment in plan.environments:
            # A start has the same number in every call, because its number decides how replies are sampled.
            starts = [
                Start(seed - plan.seed, seed, members=members)
                for seed in plan.seeds
                if (members := [each for each in range(plan.attempts) if (environment, seed, each) not in done])
            ]
            if starts:
                missing[model, environment] = starts
    return missing


@dataclass(frozen=True, slots=True)
class PlanPlayer:
    """Plays the missing episodes of one model at a time, and adds each to the folder when it is over."""

    folder: EvaluationFolder
    plan: EvaluationPlan
    missing: Missing
    fleets: Mapping[str, Fleet]
    """Servers of each environment."""
    watch: Callable[[str, str], None]
    """Called with the names of model and environment after each episode."""

    async def play(self, model: str, agents: Agents) -> None:
        """Play a model in all environments, one after the other.

        Args:
            model: Name of the model.
            agents: Its agents.
        """
        for name, environment in self.plan.environments.items():
            if starts := self.missing.get((model, name)):

                def keep(episode: Episode, name: str = name) -> None:
                    self.folder.append(self.plan, model, episode)
                    self.watch(model, name)

                collector = Collector(fleet=self.fleets[name], agents=agents, task=environment.task, watch=keep)
                await collector.collect(starts, self.plan.attempts, min_size=0)
