"""A run and one of its environments, as the rules of a configuration see them."""

from __future__ import annotations

from dataclasses import dataclass

from starpod.trainer.algorithms.terms import PROCESS
from starpod.trainer.configuration.config import Config
from starpod.trainer.configuration.tasks import TaskConfig
from starpod.trainer.models.config import TINY
from starpod.trainer.rollout.config import ALL_SUPPORTED, Facts


@dataclass(frozen=True, slots=True)
class Case:
    """A run and one of its environments, with all that is known of them so far."""

    run: Config
    task: TaskConfig
    facts: Facts = ALL_SUPPORTED
    """What the environment supports; everything, until its servers have answered."""
    processes: int = 0
    """Number of processes on each machine if several train together, else 0."""

    @property
    def search(self) -> str:
        """Strategy of the search."""
        return self.run.collect.search.strategy

    @property
    def evaluation_key(self) -> str:
        """Section of the evaluations of this environment."""
        return f"environments.{self.task.name}.evaluation" if self.task.name else "evaluation"

    @property
    def blocks(self) -> set[str]:
        """Blocks of a reply."""
        prompt = self.task.prompt
        return {*prompt.blocks, "answer", *(["think"] if prompt.thinking else [])}

    @property
    def unpaid(self) -> str:
        """First reward part that the estimator scores and nothing pays, other than the turn scorer's."""
        terms = self.run.algorithm.credit_terms
        parts = {name for term in terms for name in (*term.parts, *term.without, *term.strata)} - {PROCESS}
        return min(parts - self.task.rewards.names - self.run.script.parts, default="")

    @property
    def needs_process(self) -> bool:
        """Whether the estimator scores the reward part of a turn scorer."""
        return any(PROCESS in (*term.parts, *term.without) for term in self.run.algorithm.credit_terms)

    @property
    def plays_alone(self) -> bool:
        """Whether one agent plays, and the trainer samples its replies."""
        return self.run.script.name == "solo" and not (self.run.collect.agent.command or self.run.replay.offline)

    @property
    def image_engines(self) -> list[str]:
        """Engines that show images to the model."""
        return ["torch"] if self.run.model.name == TINY else ["torch", "vllm"]

    @property
    def expert_starts(self) -> bool:
        """Whether episodes of some stage begin in states that the expert has reached."""
        return any(task.environment.expert_moves_left for stage in self.run.in_stages for task in stage.tasks)
