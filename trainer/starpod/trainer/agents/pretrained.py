"""Agents that load a model from a run folder, a checkpoint or Hugging Face."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import click
import torch
from transformers.utils import logging

from starpod.client import Session, Want
from starpod.trainer.agents.base import Agent, AgentRefused, Agents, Sampling, Task
from starpod.trainer.agents.config import SamplingConfig, ScriptConfig
from starpod.trainer.agents.engine import EngineAgents
from starpod.trainer.agents.program import Wrap
from starpod.trainer.agents.script import engine_agents
from starpod.trainer.checkpoints.checkpoint import CheckpointError
from starpod.trainer.checkpoints.export import read_settings
from starpod.trainer.checkpoints.trained import find_checkpoint, is_run_or_checkpoint, load_trained
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
from starpod.trainer.models.trunk import unwrapped
from starpod.trainer.prompts.prompt import PromptConfig
from starpod.trainer.prompts.structure import check_schema
from starpod.trainer.prompts.template import Template

TEMPERATURE = 0.5
"""Default temperature for models that have no run, as in RAGEN's evaluations (arXiv 2504.20073)."""

UNUSABLE = (CheckpointError, ConfigError, ModelError, EngineError, ValueError)
"""Exceptions that say why a model cannot be loaded or sampled from."""


class PretrainedAgents(Agents):
    """Agents of a loaded model, with the prompt, limits and environment options of its run's evaluations.

    Args:
        model: A run folder (its best checkpoint), a checkpoint's folder, a folder with a Hugging Face model, or the
            name of one.
        sampling: Values that replace those of the run.

    Raises:
        AgentRefused: If the model cannot be loaded or sampled from.
    """

    at_once = 512

    def __init__(self, model: str, sampling: Sampling, engine: Literal["torch", "vllm"] = "torch") -> None:
        self._name = model
        if not sys.stderr.isatty():
            logging.disable_progress_bar()  # type: ignore[no-untyped-call]
        try:
            found = find_pretrained(model)
            self.config, self._policies = found.config, found.load()
            prompt = self.config.prompt if self.config else PromptConfig()
            if sampling.thinking is not None:
                prompt = prompt.model_copy(update={"thinking": sampling.thinking})
            self.want = Want(image=prompt.shows_images or any(task.prompt.shows_images for task in self._tasks))
            values = self._sampling(sampling.max_tokens)
            if values.json_schema is not None:
                check_schema(values.json_schema)
            self.temperature = evaluation_temperature(self.config, sampling)
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
            self._by_task: dict[str, EngineAgents] = {}
            for task in self._tasks:
                self._by_task[task.name] = agents = self._agents_of(task, sampling)
                self._by_task.setdefault(task.environment.id, agents)
        except UNUSABLE as error:
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

    def _sampling(self, max_tokens: int | None) -> SamplingConfig:
        """Return the run's or default sampling with replies of up to `max_tokens`.

        Without a run, the context grows by the additional tokens, up to what the model reads. Raises ConfigError.
        """
        sampling = self.config.sampling if self.config else SamplingConfig()
        if max_tokens is None:
            return sampling
        context = sampling.max_episode_tokens
        if self.config is None:
            configs = [unwrapped(policy.model).config.get_text_config() for policy in self._policies.by_agent.values()]
            positions = min(getattr(each, "max_position_embeddings", sys.maxsize) for each in configs)
            context = max(context, min(context + max_tokens - sampling.max_reply_tokens, positions))
        if max_tokens >= context:
            click.echo(f"Warning: replies of {self._name} end at its context of {context} tokens", err=True)
        values = {**sampling.to_dict(), "max_reply_tokens": min(max_tokens, context), "max_episode_tokens": context}
        if sampling.min_reply_tokens is not None:
            values["min_reply_tokens"] = min(sampling.min_reply_tokens, max_tokens)
        return SamplingConfig.model_validate(values)

    def _template(self, prompt: PromptConfig) -> Template:
        return Template(self._policies.tokenizer, prefill=prompt.opening, view=self._policies.view, calls=prompt.calls)

    def play_through(self, wrap: Wrap) -> None:
        """Let a program make the moves, with these agents' model behind it. Raises AgentRefused."""
        if type(self._agents) is not EngineAgents:
            raise AgentRefused(f"{self._name} was trained with a script of several agents, which no program can play")
        self._agents = wrap(self._agents)
        self._by_task = {name: wrap(agents) for name, agents in self._by_task.items()}

    def agent(self, session: Session, task: Task, group: int) -> Agent:
        agents = self._by_task.get(task.name) or self._by_task.get(task.environment) or self._agents
        return agents.agent(session, task, group)

    async def close(self) -> None:
        await self._engine.close()


@dataclass(frozen=True, slots=True)
class FoundModel:
    """A model that exists. Its weights are not loaded yet."""

    config: Config | None
    """Configuration of its run, or the part of it in an exported folder; None without a run."""
    facts: dict[str, Any]
    """Checkpoint and step, and the full title of a bundled model, as JSON values."""
    build: Callable[[], Policies]
    """Return the policies as they were saved."""

    def load(self) -> Policies:
        """Return the policies to sample from, on their device. Raises CheckpointError and ModelError."""
        if self.config and "checkpoint" in self.facts:
            torch.set_num_threads(self.config.threads)
        policies = self.build()
        for policy in policies.by_agent.values():
            round_weights(policy.model)
        policies.to("cuda" if torch.cuda.is_available() else "cpu")
        return policies


def evaluation_temperature(config: Config | None, sampling: Sampling) -> float:
    """Return the temperature at which a model is evaluated. config: as in `FoundModel`."""
    default_temperature = config.evaluation.temperature if config else TEMPERATURE
    return default_temperature if sampling.temperature is None else sampling.temperature


def find_pretrained(model: str) -> FoundModel:
    """Find a run's best checkpoint, a checkpoint, an exported or other Hugging Face folder, or a model by its name.

    Raises CheckpointError, ConfigError and ModelError.
    """
    path = Path(model)
    facts: dict[str, Any] = {}
    if is_run_or_checkpoint(path):
        checkpoint = find_checkpoint(path)
        config: Config | None = parse_config(checkpoint.state["config"])
        facts = {"checkpoint": str(checkpoint.path), "step": checkpoint.step}
        build = lambda: load_trained(checkpoint.path).policies  # noqa: E731
    elif os.path.isdir(path):
        if not (path / "config.json").exists():
            children = sorted(str(child) for child in path.iterdir() if is_run_or_checkpoint(child))
            hint = f"; choose one below it: {', '.join(children)}" if children else ""
            raise ModelError(f"the folder holds no run, checkpoint or model{hint}")
        config = read_settings(path)
        build = lambda: Policies({"": load_policy(path)})  # noqa: E731
    elif not _could_be_a_name(model):
        raise ModelError("there is no such folder, and no Hugging Face model can have this name")
    else:
        config = None
        dtype: Literal["bfloat16", "float32"] = "bfloat16" if torch.cuda.is_available() else "float32"
        settings = ModelConfig(name=model, dtype=dtype)
        build = lambda: Policies({"": build_policy(settings, texts=None, critic="none", seed=0)})  # noqa: E731
    name = config.model.name if config else model
    title = model_title(name)
    return FoundModel(config, facts | ({} if title == name else {"model": title}), build)


def _could_be_a_name(model: str) -> bool:
    """Return whether a text has the form of a Hugging Face model's name: NAME or OWNER/NAME."""
    parts = model.split("/")
    return 1 <= len(parts) <= 2 and all(part and part[0] not in ".~" for part in parts)
