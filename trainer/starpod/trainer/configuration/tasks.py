"""Environments of a run, each with the sections that apply to it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, TypeVar

from pydantic import Field, ValidationError

from starpod.trainer.configuration.layers import ChangesTo, Layers
from starpod.trainer.configuration.mistakes import explain, unknown_key
from starpod.trainer.configuration.section import Section
from starpod.trainer.evaluation.config import EvaluationConfig
from starpod.trainer.prompts.prompt import PromptConfig
from starpod.trainer.rewards.reward import RewardConfig
from starpod.trainer.rollout.config import EnvironmentConfig
from starpod.trainer.warm_start.config import WarmStartConfig

Any_Section = TypeVar("Any_Section", bound=Section)

OWN_KEYS = {
    "prompt": tuple(PromptConfig.model_fields),
    "rewards": tuple(RewardConfig.model_fields),
    "warm_start": (
        *("episodes", "demonstrations", "min_reward", "from", "failures"),
        *("actions", "noise", "imitate_noise", "best", "thought"),
    ),
    "evaluation": ("episodes", "temperature", "options", "reference"),
}
"""Keys that each of several environments may override, by section of the run."""


class MixedEnvironment(EnvironmentConfig):
    """One of several environments: the keys of `environment`, and its changes to the run's other sections."""

    id: str = Field(description="Name, as `starpod list` shows it.")
    weight: float = Field(
        default=1.0, gt=0, allow_inf_nan=False, description="Share of the groups, relative to the others' weights."
    )
    prompt: Annotated[dict[str, Any], ChangesTo(PromptConfig)] = Field(
        default={}, description="Keys of `prompt` that differ here."
    )
    rewards: dict[str, Any] = Field(default={}, description="Keys of `rewards` that differ here.")
    warm_start: dict[str, Any] = Field(
        default={}, description=f"Keys of `warm_start` that differ here: {', '.join(OWN_KEYS['warm_start'])}."
    )
    evaluation: dict[str, Any] = Field(
        default={}, description=f"Keys of `evaluation` that differ here: {', '.join(OWN_KEYS['evaluation'])}."
    )


@dataclass(frozen=True, slots=True)
class TaskConfig:
    """An environment of a run with the sections that apply to it."""

    name: str
    """Key in `environments`; "" if the run has one environment."""
    weight: float
    environment: EnvironmentConfig
    prompt: PromptConfig
    rewards: RewardConfig
    warm_start: WarmStartConfig
    evaluation: EvaluationConfig

    @property
    def held_out(self) -> EnvironmentConfig:
        """The environment of evaluations: with their options, and from the start state of each seed."""
        return self.environment.with_options(self.evaluation.options).model_copy(update={"expert_moves_left": None})


def merged(section: Any_Section, name: str, key: str, values: Mapping[str, Any]) -> Any_Section:
    """Return a section of the run with the values of `environments.<name>.<key>` applied to it.

    Args:
        key: Name of the section, a key of OWN_KEYS.
        values: Plain values that differ for this environment.

    Raises:
        ValueError: A key does not exist, cannot be set per environment, or has a wrong value.
    """
    prefix = f"environments.{name}.{key}"
    for field in values:
        if field not in type(section).model_fields:
            raise ValueError(unknown_key(f"{prefix}.{field}", OWN_KEYS[key]))
        if field not in OWN_KEYS[key]:
            raise ValueError(f"{prefix}.{field} is the same for all environments: give {key}.{field}")
    layers = Layers(type(section))
    layers.add("", section.to_dict())
    layers.add("", values)
    try:
        return type(section).model_validate(layers.values)
    except ValidationError as error:
        raise ValueError(explain(type(section), error, prefix)) from None
