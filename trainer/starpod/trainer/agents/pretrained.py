"""Agents that load a model from a run folder, a checkpoint or Hugging Face."""

from __future__ import annotations

import sys
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch
from transformers.utils import logging

from starpod.client import Session, Want
from starpod.trainer.agents.base import Agent, AgentRefused, Agents, Sampling, Task
from starpod.trainer.agents.config import SamplingConfig, ScriptConfig
from starpod.trainer.agents.engine import EngineAgents
from starpod.trainer.agents.script import engine_agents
from starpod.trainer.checkpoints.checkpoint import CheckpointError
from starpod.trainer.checkpoints.export import read_settings
from starpod.trainer.checkpoints.trained import is_run_or_checkpoint, load_trained
from starpod.trainer.configuration.config import Config
from starpod.trainer.configuration.loading import parse_config
from starpod.trainer.configuration.section import ConfigError
from starpod.trainer.configuration.tasks import TaskConfig
from starpod.trainer.engines.base import EngineError
from starpod.trainer.engines.config import EngineConfig
from starpod.trainer.engines.factory import build_engines
from starpod.trainer.models.config import ModelConfig, ModelError, model_title
from starpod.trainer.models.policies import Policies
from starpod.trainer.models.policy import build_policy, load_policy
from starpod.trainer.models.precision import round_weights
from starpod.trainer.prompts.prompt import PromptConfig
from starpod.trainer.prompts.template import Template
from starpod.trainer.rollout.environment import make_task

TEMPERATURE = 0.5
"""Default temperature for models that have no run, as in RAGEN's evaluations (arXiv 2504.20073)."""


class PretrainedAgents(Agents):
    """Agents of a loaded model, with the prompt, limits and environment options of its run's evaluations.

    Args:
        model: A run folder (its best checkpoint), a checkpoint's folder, a folder with a Hugging Face model, or the
            name of one.
        sampling: Values that replace those of the run.
        engine: Engine that samples.

    Raises:
        AgentRefused: If the model cannot be loaded or sampled from.
    """

    at_once = 512

    def __init__(self, model: str, sampling: Sampling, engine: Literal["torch", "vllm"] = "torch") -> None:
        self._name = model
        if not sys.stderr.isatty():
            logging.disable_progress_bar()  # type: ignore[no-untyped-call]
        try:
            loaded_model = load_model(model)
            self.config, self._facts, self._policies = loaded_model.config, loaded_model.facts, loaded_model.policies
            prompt = self.config.prompt if self.config else PromptConfig()
            if sampling.thinking is not None:
                prompt = prompt.model_copy(update={"thinking": sampling.thinking})
            self.want = Want(image=prompt.shows_images or any(task.prompt.shows_images for task in self._tasks))
            values = self.config.sampling if self.config else SamplingConfig()
            if sampling.max_tokens is not None:
                values = values.model_copy(update={"max_reply_tokens": sampling.max_tokens})
            default_temperature = self.config.evaluation.temperature if self.config else TEMPERATURE
            self.temperature = default_temperature if sampling.temperature is None else sampling.temperature
            max_context = values.max_episode_tokens
            self._engine = build_engines(EngineConfig(name=engine), self._policies, max_context=max_context)
            self._agents = engine_agents(
                self.config.script if self.config else ScriptConfig(),
                engine=self._engine,
                template=self._template(prompt),
                prompt=prompt,
                sampling=values,
                seed=self.config.seed if self.config else 0,
                purpose="evaluation",
                temperature=self.temperature,
            )
            self._by_task = {task.name: self._agents_of(task, sampling) for task in self._tasks}
        except (CheckpointError, ConfigError, ModelError, EngineError, ValueError) as error:
            raise AgentRefused(f"{model}: {error}") from error

    @property
    def _tasks(self) -> tuple[TaskConfig, ...]:
        return self.config.tasks if self.config else ()

    def _agents_of(self, task: TaskConfig, sampling: Sampling) -> EngineAgents:
        """Return agents with the prompt and temperature of one of the run's environments."""
        prompt, temperature = task.prompt, task.evaluation.temperature
        if sampling.thinking is not None:
            prompt = prompt.model_copy(update={"thinking": sampling.thinking})
        return replace(
            self._agents,
            template=self._template(prompt),
            prompt=prompt,
            temperature=temperature if sampling.temperature is None else sampling.temperature,
        )

    def _template(self, prompt: PromptConfig) -> Template:
        return Template(self._policies.tokenizer, prefill=prompt.opening, view=self._policies.view, calls=prompt.calls)

    def fit(self, task: Task) -> Task:
        """Return the task with its unset values filled in from the run's evaluations.

        The values come from the run's task of the same name, or otherwise from its first task with the same
        environment.
        """
        matches = [candidate for candidate in self._tasks if candidate.environment.id == task.environment]
        matches = [candidate for candidate in matches if candidate.name == task.name] or matches
        if not matches:
            return task
        run_task = make_task(matches[0].held_out, task.actions)
        limit_values = {name: value for name, value in asdict(task.limits).items() if value is not None}
        limits = replace(run_task.limits, **limit_values)
        options = {**run_task.options, **task.options}
        return Task(task.environment, task.version or run_task.version, options, limits, task.actions, matches[0].name)

    def agent(self, session: Session, task: Task, group: int) -> Agent:
        return self._by_task.get(task.name, self._agents).agent(session, task, group)

    def facts(self) -> dict[str, Any]:
        """Return JSON values to report. Short names of the package's models are replaced by their full titles."""
        name = self.config.model.name if self.config else self._name
        title = model_title(name)
        return {**self._facts, **({} if title == name else {"model": title}), "temperature": self.temperature}

    async def close(self) -> None:
        await self._engine.close()


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """Policies to sample from, on their device."""

    policies: Policies
    config: Config | None
    """Configuration of its run, or the part of it in an exported folder; None without a run."""
    facts: dict[str, Any]
    """Checkpoint and step as JSON values; empty without a run."""


def load_model(model: str) -> LoadedModel:
    """Load a run's best checkpoint, a checkpoint, an exported or other folder of a Hugging Face model, or one by name.

    Raises CheckpointError, ConfigError and ModelError.
    """
    path, config, facts = Path(model), None, {}
    if is_run_or_checkpoint(path):
        trained = load_trained(path)
        config = parse_config(trained.config)
        facts = {"checkpoint": str(trained.path), "step": trained.step}
        torch.set_num_threads(config.threads)
        policies = trained.policies
    elif path.is_dir():
        if not (path / "config.json").exists():
            children = sorted(str(child) for child in path.iterdir() if is_run_or_checkpoint(child))
            hint = f"; choose one below it: {', '.join(children)}" if children else ""
            raise ModelError(f"the folder holds no run, checkpoint or model{hint}")
        config = read_settings(path)
        policies = Policies({"": load_policy(path)})
    elif not _could_be_a_name(model):
        raise ModelError("there is no such folder, and no Hugging Face model can have this name")
    else:
        dtype: Literal["bfloat16", "float32"] = "bfloat16" if torch.cuda.is_available() else "float32"
        base_policy = build_policy(ModelConfig(name=model, dtype=dtype), texts=None, critic="none", seed=0)
        policies = Policies({"": base_policy})
    for policy in policies.by_agent.values():
        round_weights(policy.model)
    policies.to("cuda" if torch.cuda.is_available() else "cpu")
    return LoadedModel(policies, config, facts)


def _could_be_a_name(model: str) -> bool:
    """Return whether a text has the form of a Hugging Face model's name: NAME or OWNER/NAME."""
    parts = model.split("/")
    return 1 <= len(parts) <= 2 and all(part and part[0] not in ".~" for part in parts)
