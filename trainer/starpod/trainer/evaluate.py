"""Evaluation inside training: fixed held-out start states, beside the reference ladder."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from pydantic import Field, field_validator

from starpod.client import Fleet, StarpodError
from starpod.trainer.agents.base import Task
from starpod.trainer.agents.scripted import REFERENCES, ReferenceAgents
from starpod.trainer.data.episode import Episode
from starpod.trainer.rollout.collect import Collected, Collector, starts_from
from starpod.trainer.section import Section
from starpod.trainer.statistics import mean_interval, wilson_interval


class EvaluationConfig(Section):
    """How often, how much, and against what the policy is measured."""

    every: int = Field(default=25, ge=0, description="Iterations between evaluations; 0: only before and after.")
    episodes: int = Field(default=256, ge=1, description="Held-out start states, the same each time.")
    temperature: float = Field(default=1.0, ge=0, description="Of sampling; 0 is greedy. RAGEN evaluates at 0.5.")
    greedy: bool = Field(default=False, description="Evaluate once more, greedily, at the end.")
    options: dict[str, Any] = Field(
        default={}, description="Options of the environment in evaluations alone, such as another split of its tasks."
    )
    reference: tuple[str, ...] = Field(
        default=("random", "expert"), description=f"Policies to stand beside the curve: {', '.join(REFERENCES)}."
    )
    keep_episodes: int = Field(default=64, ge=0, description="Episodes of each evaluation that the run folder keeps.")

    @field_validator("reference")
    @classmethod
    def _known(cls, names: tuple[str, ...]) -> tuple[str, ...]:
        if unknown := [name for name in names if name not in REFERENCES]:
            raise ValueError(f"no reference policy {unknown[0]!r}; there are {', '.join(REFERENCES)}")
        return names


@dataclass(frozen=True, slots=True)
class Evaluation:
    """What a policy came to. `failed` episodes, lost to the infrastructure, are in no figure but their own."""

    episodes: list[Episode]
    failed: int

    @classmethod
    def of(cls, collected: Collected) -> Evaluation:
        return cls([episode for group in collected.groups for episode in group.episodes], collected.failed)

    def summary(self) -> dict[str, Any]:
        """JSON values: success and the environment's own return with their 95 % intervals, means per episode, share of
        well-formed turns."""
        episodes = self.episodes
        count = len(episodes)
        turns = [turn for episode in episodes for turn in episode.turns]
        return {
            "episodes": count,
            "failed": self.failed,
            **_figures([episode.success is True for episode in episodes], [e.own_return for e in episodes]),
            "turns_mean": len(turns) / max(count, 1),
            "format_rate": sum(turn.well_formed for turn in turns) / max(len(turns), 1),
        }


async def evaluate_reference(fleet: Fleet, name: str, task: Task, seeds: Sequence[int]) -> dict[str, Any]:
    """The same figures for a reference policy. Raises StarpodError where the infrastructure failed an episode."""
    collected = await Collector(fleet=fleet, agents=ReferenceAgents(name), task=task).collect(starts_from(seeds), 1)
    if collected.failed:
        raise StarpodError(f"the reference policy {name} could not be played: {collected.error}")
    episodes = Evaluation.of(collected).episodes
    return {
        **_figures([episode.success is True for episode in episodes], [episode.own_return for episode in episodes]),
        "turns_mean": sum(len(episode.turns) for episode in episodes) / len(episodes),
    }


def _figures(successes: Sequence[bool], returns: Sequence[float]) -> dict[str, float | None]:
    """Success with Wilson's interval, and the mean return with Student's; None for an interval of one return."""
    wins, count = sum(successes), len(successes)
    success_low, success_high = wilson_interval(wins, count)
    return_low, return_high = mean_interval(returns) if count > 1 else (None, None)
    return {
        "success": wins / max(count, 1),
        "success_low": success_low,
        "success_high": success_high,
        "return_mean": sum(returns) / max(count, 1),
        "return_low": return_low,
        "return_high": return_high,
    }
