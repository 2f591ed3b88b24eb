"""The plan of an evaluation: its models, environments, start states, attempts and sampling."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal

from starpod.trainer.agents.base import Sampling, Task


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
    models: Mapping[str, Mapping[str, Any]]
    """Facts about each model by its name, such as the checkpoint that is played."""
    environments: Mapping[str, PlannedEnvironment]
    """Environments by name: the task's name in a run, or the environment's id."""
    format: Literal[1] = 1
    """Version of the folder's files."""

    @property
    def seeds(self) -> range:
        """Seeds of the start states."""
        return range(self.seed, self.seed + self.episodes)

    def extended(self, call: EvaluationPlan) -> EvaluationPlan:
        """Return this plan with the models, environments, start states and attempts that a further call adds.

        Raises:
            PlanDiffers: The call contradicts this plan.
        """
        pairs = {name: (getattr(self, name), getattr(call, name)) for name in ("seed", *_COUNTS)}
        pairs |= {name: (value, getattr(call.sampling, name)) for name, value in asdict(self.sampling).items()}
        for model, facts in call.models.items():
            known = self.models.get(model, facts)
            pairs |= {f"{key} of {model}": (known.get(key), value) for key, value in facts.items()}
        for name, environment in call.environments.items():
            settings = self.environments.get(name, environment).settings()
            pairs |= {f"{key} of {name}": (settings[key], value) for key, value in environment.settings().items()}
        differing = [
            f"{name}: {json.dumps(planned)} in the folder, {json.dumps(called)} now"
            for name, (planned, called) in pairs.items()
            if (called < planned if name in _COUNTS else called != planned)
        ]
        if differing:
            raise PlanDiffers("; ".join(differing))
        models, environments = {**self.models, **call.models}, {**self.environments, **call.environments}
        return replace(call, models=models, environments=environments)


_COUNTS = ("episodes", "attempts")
