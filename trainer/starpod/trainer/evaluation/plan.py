"""The plan of an evaluation: its models, environments, start states, attempts and sampling."""

from __future__ import annotations

import json
import re
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal

from starpod.trainer.agents.base import Sampling, Task

MOST_STARTS = 1_000_000
"""Maximum number of start states. Groups of the second environment are numbered from here on, and so on."""


class PlanDiffers(Exception):
    """A folder has episodes of another plan. The message says what differs."""


@dataclass(frozen=True, slots=True)
class PlannedEnvironment:
    """An environment that every model plays."""

    task: Task
    source: str
    """What serves it: the word of a command line, or the arguments of `starpod serve`. It may change between calls."""

    def settings(self) -> dict[str, Any]:
        """Return what determines the episodes, as JSON values."""
        return {name: asdict(self.task)[name] for name in ("environment", "version", "options", "limits")}


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationPlan:
    """Every model plays `attempts` episodes from each of `episodes` start states of every environment."""

    seed: int
    """Seed of the first start state. Each further one has the next seed."""
    episodes: int
    """Number of start states of an environment."""
    attempts: int
    """Number of episodes per start state."""
    sampling: Sampling = field(default_factory=Sampling)
    models: dict[str, dict[str, Any]]
    """Facts about each model by its name, such as the checkpoint that is played."""
    environments: dict[str, PlannedEnvironment]
    """Environments by name: the task's name in a run, or the environment's id."""
    format: Literal[1] = 1
    """Version of the folder's files."""

    @property
    def seeds(self) -> range:
        """Seeds of the start states."""
        return range(self.seed, self.seed + self.episodes)

    def group(self, environment: str, seed: int) -> int:
        """Return the number of a start state's group, which is unique among the environments."""
        return seed - self.seed + MOST_STARTS * list(self.environments).index(environment)

    def file_name(self, model: str) -> str:
        """Return the name of the file of a model's episodes."""
        slug = re.sub(r"\W+", "_", model, flags=re.ASCII).strip("_")[-60:] or "model"
        return f"{slug}-{list(self.models).index(model) + 1}.jsonl"

    def extended(self, call: EvaluationPlan) -> EvaluationPlan:
        """Return this plan with the models, environments, start states and attempts that a further call adds.

        Raises:
            PlanDiffers: The call contradicts this plan.
        """
        planned, called = self._settings(), call._settings()
        differing = [
            f"{name}: {json.dumps(planned[name])} in the folder, {json.dumps(called[name])} now"
            for name in planned.keys() & called.keys()
            if (planned[name] > called[name] if name in ("episodes", "attempts") else planned[name] != called[name])
        ]
        if differing:
            raise PlanDiffers("; ".join(sorted(differing)))
        models, environments = {**self.models, **call.models}, {**self.environments, **call.environments}
        return replace(call, models=models, environments=environments)

    def _settings(self) -> dict[str, Any]:
        """Return what determines the episodes, as JSON values."""
        settings = {"seed": self.seed, "episodes": self.episodes, "attempts": self.attempts, **asdict(self.sampling)}
        parts = [*self.models.items(), *((name, each.settings()) for name, each in self.environments.items())]
        return settings | {f"{key} of {name}": value for name, part in parts for key, value in part.items()}
