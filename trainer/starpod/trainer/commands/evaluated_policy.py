"""The policy that an argument of `starpod eval` names."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import click

from starpod.client.spelling import near
from starpod.trainer.agents.base import AgentRefused, Agents, Sampling
from starpod.trainer.agents.scripted import ReferenceAgents, reference_names
from starpod.trainer.configuration.seeds import SeedsConfig
from starpod.trainer.rollout.config import EnvironmentConfig
from starpod.trainer.rollout.environment import is_hostable

CHAT = "openai:"


@dataclass(frozen=True, slots=True)
class EvaluatedPolicy:
    """A policy to evaluate."""

    kind: str
    name: str
    agents: Agents
    tasks: Mapping[str, str] = field(default_factory=dict)
    """Environment ids by name in the policy's run ("" for the only one); empty without a run."""
    served: Sequence[EnvironmentConfig] = ()
    """Configurations of the run's environments if the run hosts its own servers, else empty."""
    seeds: SeedsConfig = field(default_factory=SeedsConfig)
    """Seeds of the run, or the default ones."""


def find_policy(
    model: str, sampling: Sampling, engine: Literal["torch", "vllm"], base_url: str | None, concurrency: int
) -> EvaluatedPolicy:
    """Return the policy that a command-line argument names.

    Args:
        model: A reference policy, `openai:MODEL`, or the folder or name of a pretrained model (see `PretrainedAgents`).
        sampling: Values that replace those of the run or endpoint.
        engine: Engine that samples from a pretrained model.
        base_url: URL of the endpoint of `openai:MODEL`; None: OpenAI's.
        concurrency: Maximum number of concurrent requests to the endpoint.

    Raises:
        ClickException: There is no such policy, or it cannot be loaded.
    """
    if model.startswith(CHAT):
        return _chat_policy(model.removeprefix(CHAT), sampling, base_url, concurrency)
    if base_url:
        raise click.UsageError(f"--base-url is for models of an endpoint: openai:{model}")
    if model in reference_names():
        return EvaluatedPolicy("reference", model, ReferenceAgents(model))
    _refuse_misspelt(model)
    return _pretrained_policy(model, sampling, engine)


def _refuse_misspelt(model: str) -> None:
    """Raise BadParameter if `model` looks like a misspelt reference policy or `openai:` prefix."""
    if "/" in model or model in reference_names() or Path(model).exists():
        return
    if close := near(model, [CHAT] if ":" in model else reference_names()):
        raise click.BadParameter(
            f"no policy {model!r}; did you mean {' or '.join(close)}?", param_hint="MODEL_OR_CHECKPOINT"
        )


def _pretrained_policy(model: str, sampling: Sampling, engine: Literal["torch", "vllm"]) -> EvaluatedPolicy:
    from starpod.trainer.agents.pretrained import PretrainedAgents  # slow: imports torch

    try:
        agents = PretrainedAgents(model, sampling, engine)
    except AgentRefused as error:
        raise click.ClickException(str(error)) from error
    if (config := agents.config) is None:
        return EvaluatedPolicy("model", model, agents)
    tasks = {task.name: task.environment.id for task in config.tasks}
    environments = [task.environment for task in config.tasks]
    served = environments if all(map(is_hostable, environments)) else []
    return EvaluatedPolicy("model", model, agents, tasks=tasks, served=served, seeds=config.seeds)


def _chat_policy(model: str, sampling: Sampling, base_url: str | None, concurrency: int) -> EvaluatedPolicy:
    from starpod.trainer.agents.chat import ChatAgents  # slow: imports openai

    if not model:
        raise click.BadParameter(
            "openai: needs a model behind it, as in openai:gpt-5", param_hint="MODEL_OR_CHECKPOINT"
        )
    try:
        agents = ChatAgents(
            model,
            base_url=base_url,
            temperature=sampling.temperature,
            max_tokens=sampling.max_tokens or 400,
            at_once=concurrency,
            thinking=sampling.thinking is not False,
        )
    except AgentRefused as error:
        raise click.UsageError(str(error)) from error
    return EvaluatedPolicy("openai", model, agents)


def incomplete_call(model: str | None) -> click.UsageError:
    """Return the error for a call that lacks a model or an environment. The error shows a full command."""
    other_models = f"{CHAT}MODEL or {', '.join(reference_names())}"
    if not model:
        choices = f"the folder of a run, a checkpoint or an export, a Hugging Face model, {other_models}"
        return click.UsageError(f"name what to evaluate: {choices}; for example: starpod eval runs/lake")
    _refuse_misspelt(model)
    subject, run = f"to play {model}", ""
    if not (Path(model).is_dir() or model in reference_names() or model.startswith(CHAT)):
        subject = f"{model} is no folder here, and not {other_models}. If it is a Hugging Face model"
        run = ". A run is evaluated by its folder: starpod eval runs/lake"
    return click.UsageError(f"{subject}, name an environment, for example: starpod eval {model} frozen_lake{run}")
