"""Policies whose tokens we sample ourselves, played outside training: run folders, checkpoints, Hugging Face models."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal

import torch
from transformers.utils import logging

from starpod.client import Fleet, Limits
from starpod.trainer.agents.base import AgentRefused, Sampling, Task
from starpod.trainer.checkpoints.checkpoint import CheckpointError
from starpod.trainer.checkpoints.trained import is_run_or_checkpoint, load_trained
from starpod.trainer.config import Config, ConfigError, parse_config
from starpod.trainer.data.episode import Episode
from starpod.trainer.engines.base import Engine
from starpod.trainer.engines.config import EngineConfig
from starpod.trainer.engines.errors import EngineError
from starpod.trainer.engines.factory import build_engine
from starpod.trainer.models.config import ModelConfig
from starpod.trainer.models.errors import ModelError
from starpod.trainer.models.policy import Policy, build_policy, load_policy
from starpod.trainer.models.precision import round_weights
from starpod.trainer.prompts.conversation import Template
from starpod.trainer.prompts.prompt import PromptConfig
from starpod.trainer.rewards.reward import RewardConfig, Rewards
from starpod.trainer.rollout.collect import EnvironmentConfig, Player, SamplingConfig, Start

TEMPERATURE = 0.5
"""Where no run says otherwise: what RAGEN evaluates at (arXiv 2504.20073)."""

AT_ONCE = 512
"""Episodes that are open at a time."""


class TokenPolicy:
    """A model that is loaded here, with the prompt, the limits and the environment options of its run's evaluations.

    model: a run folder (its best checkpoint), a checkpoint's folder, a folder with a Hugging Face model, or the name of
    one. sampling: what is given there goes before what the run says. Raises AgentRefused.
    """

    def __init__(self, model: str, sampling: Sampling, engine: Literal["torch", "vllm"] = "torch") -> None:
        self.config: Config | None = None
        self._facts: dict[str, Any] = {}
        if not sys.stderr.isatty():
            logging.disable_progress_bar()  # type: ignore[no-untyped-call]
        try:
            self._policy = self._load(model)
            round_weights(self._policy.model)
            self._policy.to("cuda" if torch.cuda.is_available() else "cpu")
            prompt = self.config.prompt if self.config else PromptConfig()
            if sampling.thinking is not None:
                prompt = prompt.model_copy(update={"thinking": sampling.thinking})
            self._prompt = prompt
            self._template = Template(self._policy.tokenizer, prefill=prompt.opening)
            values = self.config.sampling if self.config else SamplingConfig()
            if sampling.max_tokens is not None:
                values = values.model_copy(update={"max_reply_tokens": sampling.max_tokens})
            self._sampling = values
            usual = self.config.evaluation.temperature if self.config else TEMPERATURE
            self.temperature = usual if sampling.temperature is None else sampling.temperature
            self._engine: Engine = build_engine(
                EngineConfig(name=engine), self._policy, max_context=values.max_episode_tokens
            )
        except (CheckpointError, ConfigError, ModelError, EngineError, ValueError) as error:
            raise AgentRefused(f"{model}: {error}") from error

    def _load(self, model: str) -> Policy:
        path = Path(model)
        if is_run_or_checkpoint(path):
            trained = load_trained(path)
            self.config = parse_config(trained.config)
            self._facts = {"checkpoint": str(trained.path), "step": trained.step}
            torch.set_num_threads(self.config.threads)
            return trained.policy
        if path.is_dir():
            return load_policy(path)
        if not _could_be_a_name(model):
            raise ModelError("there is no such folder, and no Hugging Face model can have this name")
        dtype: Literal["bfloat16", "float32"] = "bfloat16" if torch.cuda.is_available() else "float32"
        return build_policy(ModelConfig(name=model, dtype=dtype), texts=None, critic="none", seed=0)

    def fit(self, task: Task) -> Task:
        """The task with whatever it leaves open as its run evaluated it, where it is the same environment."""
        if self.config is None or self.config.environment.id != task.environment:
            return task
        trained = self.config.held_out
        given, usual = task.limits, trained.limits
        limits = Limits(
            _or(given.max_turns, usual.max_turns),
            _or(given.max_actions_per_turn, usual.max_actions_per_turn),
            _or(given.max_actions, usual.max_actions),
        )
        options = {**trained.options, **task.options}
        return Task(task.environment, task.version or trained.version, options, limits, task.actions)

    async def play(
        self, fleet: Fleet, task: Task, seeds: Sequence[int], samples: int, watch: Callable[[Episode], None]
    ) -> list[Episode]:
        """`samples` episodes from each seed, in their order. The same as an evaluation inside training plays."""
        episodes: list[Episode] = []

        def keep(episode: Episode) -> None:
            episodes.append(episode)
            watch(episode)

        player = Player(
            fleet,
            self._engine,
            self._template,
            environment=EnvironmentConfig(
                id=task.environment,
                version=task.version,
                options=task.options,
                max_turns=task.limits.max_turns,
                max_actions_per_turn=task.limits.max_actions_per_turn,
                max_actions=task.limits.max_actions,
            ),
            prompt=self._prompt,
            sampling=self._sampling,
            rewards=Rewards(RewardConfig(format_penalty=0.0)),
            seed=self.config.seed if self.config else 0,
            actions=task.actions,
            watch=keep,
        )
        starts = [Start(group, seed) for group, seed in enumerate(seeds)]
        block = max(1, AT_ONCE // samples)
        for first in range(0, len(starts), block):
            await player.collect(
                starts[first : first + block], samples, purpose="evaluation", temperature=self.temperature
            )
        return sorted(episodes, key=lambda episode: (episode.group, episode.member))

    def facts(self) -> dict[str, Any]:
        return {**self._facts, "temperature": self.temperature}

    async def close(self) -> None:
        await self._engine.close()


def _or(value: int | None, usual: int | None) -> int | None:
    return usual if value is None else value


def _could_be_a_name(model: str) -> bool:
    """Whether a text has the form of a Hugging Face model's name: NAME or OWNER/NAME."""
    parts = model.split("/")
    return 1 <= len(parts) <= 2 and all(part and part[0] not in ".~" for part in parts)
