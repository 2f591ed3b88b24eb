"""The configuration of a run: one frozen, validated tree from YAML files and `key=value` words."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import Field, PrivateAttr, field_validator, model_validator

from starpod.trainer.agents.config import SamplingConfig, ScriptConfig
from starpod.trainer.algorithms.config import AlgorithmConfig
from starpod.trainer.algorithms.distillation import Teaching
from starpod.trainer.checkpoints.config import CheckpointConfig
from starpod.trainer.configuration.layers import difference
from starpod.trainer.configuration.optimizer import OptimizerConfig
from starpod.trainer.configuration.section import Section
from starpod.trainer.configuration.seeds import SeedsConfig
from starpod.trainer.configuration.stages import StageConfig
from starpod.trainer.configuration.tasks import MixedEnvironment, TaskConfig, merged
from starpod.trainer.data.replay import ReplayConfig
from starpod.trainer.diagnostics.config import MonitorConfig
from starpod.trainer.engines.config import EngineConfig
from starpod.trainer.evaluation.config import EvaluationConfig
from starpod.trainer.models.config import ModelConfig
from starpod.trainer.prompts.prompt import PromptConfig
from starpod.trainer.rewards.reward import RewardConfig
from starpod.trainer.rollout.config import CONNECTION, CollectConfig, EnvironmentConfig
from starpod.trainer.scorers.config import NoScorer, ScorerConfig
from starpod.trainer.warm_start.config import WarmStartConfig


class StopConfig(Section):
    """Conditions that end a run; the first one that is met counts."""

    iterations: int = Field(default=200, ge=0, description="Iterations, each of one collection and its updates.")
    minutes: float | None = Field(
        default=None, gt=0, description="Minutes of training, counted from the first iteration; null: no limit."
    )
    tokens: int | None = Field(
        default=None, ge=1, description="Tokens sampled in training, including those of a search; null: no limit."
    )
    success: float | None = Field(
        default=None, gt=0, le=1, description="Success at which an evaluation ends the run; null: never."
    )


class Config(Section):
    """The configuration of a run."""

    title: str = Field(default="", description="Title of the run in its report and on the live site.")
    seed: int = Field(default=1, ge=0, description="Seed of all random numbers, and of the start states of training.")
    threads: int = Field(default=1, ge=1, description="CPU threads of torch; services share the cores.")
    device: str = Field(default="auto", description="cpu, cuda, cuda:1, ...; auto: the GPU if there is one.")
    seeds: SeedsConfig = SeedsConfig()
    environment: EnvironmentConfig = EnvironmentConfig()
    environments: dict[str, MixedEnvironment] = Field(
        default={},
        description="Several environments under names of your choice. `environment` may then only set addresses, "
        "token, certificates and timeouts, as defaults for all of them.",
    )
    prompt: PromptConfig = PromptConfig()
    sampling: SamplingConfig = SamplingConfig()
    script: ScriptConfig = ScriptConfig()
    collect: CollectConfig = CollectConfig()
    model: ModelConfig = ModelConfig()
    engine: EngineConfig = EngineConfig()
    algorithm: AlgorithmConfig = AlgorithmConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    rewards: RewardConfig = RewardConfig()
    scorer: ScorerConfig = Field(
        default=NoScorer(),
        description="Model that is trained to score each turn, as the reward part `process`. implicit: a second "
        "policy that learns to prefer successful episodes (iStar); q: a prediction of the outcome "
        "after a turn; off: none.",
    )
    replay: ReplayConfig = ReplayConfig()
    warm_start: WarmStartConfig = WarmStartConfig()
    evaluation: EvaluationConfig = EvaluationConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    monitor: MonitorConfig = MonitorConfig()
    stop: StopConfig = StopConfig()
    stages: tuple[StageConfig, ...] = Field(
        default=(),
        description="Stages with other settings, in order. After the last one, the configuration itself applies.",
    )
    _in_stages: tuple[Config, ...] = PrivateAttr(default=())

    @model_validator(mode="before")
    @classmethod
    def _connect_environments(cls, values: Any) -> Any:
        """Move the keys of `environment` that say how to reach servers to each of several environments without them."""
        keys = ("environment", "environments")
        environment, several = (values.get(key) if isinstance(values, dict) else None for key in keys)
        if not (isinstance(environment, dict) and isinstance(several, dict) and several):
            return values
        shared = {key: value for key, value in environment.items() if key in CONNECTION}
        connected = {
            name: {**shared, **({"id": each} if isinstance(each, str) else each)}
            for name, each in several.items()
            if isinstance(each, str | dict)
        }
        rest = {key: value for key, value in environment.items() if key not in CONNECTION}
        return {**values, "environment": rest, "environments": {**several, **connected}}

    @field_validator("device")
    @classmethod
    def _known_device(cls, device: str) -> str:
        if not re.fullmatch(r"auto|cpu|cuda(:\d+)?", device):
            raise ValueError(f"{device!r} is not supported; give auto, cpu, cuda, or cuda:0 and so on")
        return device

    @field_validator("environments")
    @classmethod
    def _names_are_words(cls, environments: dict[str, MixedEnvironment]) -> dict[str, MixedEnvironment]:
        for name in environments:
            if not re.fullmatch(r"[a-z0-9][a-z0-9_-]*", name):
                raise ValueError(
                    f"environments.{name}: the name is used in metrics and on the command line; write it in "
                    "lower-case letters, digits, _ and -"
                )
        return environments

    @model_validator(mode="after")
    def _sections_of_environments_are_valid(self) -> Config:
        _ = self.tasks
        return self

    def with_stages(self, stages: Sequence[Config]) -> Config:
        """Return this configuration with that of each of its stages."""
        config = self.model_copy()
        config._in_stages = tuple(stages)
        return config

    @property
    def tasks(self) -> tuple[TaskConfig, ...]:
        """Environments of the run in order, each with the sections that apply to it.

        Raises ValueError if a section of one environment among several is wrong.
        """
        if not self.environments:
            return (TaskConfig("", 1.0, self.environment, self.prompt, self.rewards, self.warm_start, self.evaluation),)
        return tuple(
            TaskConfig(
                name,
                environment.weight,
                environment,
                merged(self.prompt, name, "prompt", environment.prompt),
                merged(self.rewards, name, "rewards", environment.rewards),
                merged(self.warm_start, name, "warm_start", environment.warm_start),
                merged(self.evaluation, name, "evaluation", environment.evaluation),
            )
            for name, environment in self.environments.items()
        )

    @property
    def criteria_weights(self) -> dict[str, Mapping[str, float]]:
        """Weights of criteria by task name, which is "" in a run with one environment."""
        return {task.name: task.rewards.criteria.weights for task in self.tasks}

    @property
    def in_stages(self) -> tuple[Config, ...]:
        """Configuration of each stage in order, then the unchanged configuration that applies after the last stage."""
        return (*self._in_stages, self)

    @property
    def needs_reference(self) -> bool:
        """Whether any stage uses a frozen reference policy."""
        return any(stage.algorithm.needs_reference for stage in self.in_stages)

    @property
    def teaching(self) -> Teaching:
        """Settings of the first stage with a teacher; those of the run if no stage has one."""
        stages = (stage.algorithm for stage in self.in_stages)
        return next((stage.distillation for stage in stages if stage.has_teacher), self.algorithm.distillation)

    @property
    def needs_state_key(self) -> bool:
        """Whether any stage needs the environments to send a digest of each state."""
        return any(stage.algorithm.needs_state_key for stage in self.in_stages)

    def to_dict(self) -> dict[str, Any]:
        """Return plain values, with either `environment` or `environments`, and with stages if there are any.

        The settings of a stage are written in full, including derived ones.
        """
        values = super().to_dict()
        for task in self.tasks if self.environments else ():
            differing = values["environments"][task.name]
            for name in ("prompt", "rewards", "warm_start"):
                differing[name] = _validated(differing[name], getattr(task, name).to_dict())
        del values["environment" if self.environments else "environments"]
        stages = values.pop("stages")
        if stages:
            values["stages"] = [
                {"until": section["until"], "set": difference(Config, values, stage.to_dict())}
                for section, stage in zip(stages, self._in_stages, strict=True)
            ]
        return values


def _validated(given: Mapping[str, Any], section: Mapping[str, Any]) -> dict[str, Any]:
    """Return the given keys with their values in a validated section, whose paths are absolute."""
    validated = {key: section.get(key, value) for key, value in given.items()}
    return {
        key: _validated(given[key], value) if isinstance(given[key], Mapping) and isinstance(value, Mapping) else value
        for key, value in validated.items()
    }
