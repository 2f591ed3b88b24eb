"""The models that words of `starpod eval` name."""

from __future__ import annotations

import os
import shlex
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal, cast

import click

from starpod.client.versions import latest_name
from starpod.trainer.agents.base import AgentRefused, Agents, Sampling
from starpod.trainer.agents.config import ProgramConfig
from starpod.trainer.agents.scripted import ReferenceAgents, reference_names
from starpod.trainer.configuration.config import Config
from starpod.trainer.configuration.seeds import SeedsConfig
from starpod.trainer.configuration.tasks import TaskConfig
from starpod.v1.environment_word import EnvironmentWord, WordError, installed_ids
from starpod.v1.spelling import near

if TYPE_CHECKING:
    from starpod.trainer.agents.pretrained import PretrainedAgents

CHAT = "openai:"
URLS = ("http://", "https://")
PROGRAM = " | "
"""Separates a model and the command of the program that plays with it."""
Engine = Literal["torch", "vllm"]


@dataclass(frozen=True, slots=True)
class EvaluatedModel:
    """A model to evaluate. Its weights are not loaded yet."""

    name: str
    """The word that names it."""
    facts: dict[str, Any]
    """Kind, and what else determines its episodes, as JSON values."""
    load: Callable[[], Agents]
    """Load it. Raises AgentRefused."""
    config: Config | None = None
    """Configuration of its run; None without a run."""
    program: ProgramConfig | None = None
    """Program that plays with it; None: it plays by itself."""

    @property
    def tasks(self) -> tuple[TaskConfig, ...]:
        """Environments of its run; empty without a run."""
        return self.config.tasks if self.config else ()

    @property
    def seeds(self) -> SeedsConfig:
        """Seeds of its run, or the default ones."""
        return self.config.seeds if self.config else SeedsConfig()

    @asynccontextmanager
    async def opened(self) -> AsyncIterator[Agents]:
        """Load the model, and yield its agents while the context lasts. Raises AgentRefused and ConfigError."""
        async with AsyncExitStack() as stack:
            agents = self.load()
            stack.push_async_callback(agents.close)
            if self.program is not None:
                from starpod.trainer.agents.program import load_programs  # which loads torch

                wrap = await stack.enter_async_context(load_programs()(self.program))
                cast("PretrainedAgents", agents).play_through(wrap)
            yield agents


def find_model(word: str, sampling: Sampling, engine: Engine, concurrency: int, port: int = 0) -> EvaluatedModel:
    """Return the model that a word names, without loading it.

    Args:
        word: A reference policy, `openai:MODEL`, `URL#MODEL`, the folder or name of a pretrained model (see
            `PretrainedAgents`), or one of these and a command, as in `runs/lake | python agent.py`.
        sampling: Values that replace those of the run or endpoint.
        concurrency: Maximum number of concurrent requests to an endpoint.
        port: Port of the gateway that a command's program uses; 0: a free one.

    Raises:
        ClickException: There is no such model.
    """
    policy, bar, command = word.partition(PROGRAM)
    if bar:
        model = find_model(policy.strip(), sampling, engine, concurrency)
        program = ProgramConfig(command=tuple(shlex.split(command)), at_once=concurrency, port=port)
        return _with_program(word, model, program)
    if word.startswith((CHAT, *URLS)):
        return _endpoint(word, sampling, concurrency)
    if word in reference_names():
        return EvaluatedModel(word, {"kind": "reference"}, lambda: ReferenceAgents(word))
    _refuse_misspelt(word)
    return _pretrained(word, sampling, engine)


def _with_program(word: str, model: EvaluatedModel, program: ProgramConfig) -> EvaluatedModel:
    if model.facts["kind"] != "model":
        raise click.UsageError(
            f"{word!r}: a program plays with a model that is sampled here: write the folder of a run or of a model "
            f"before{PROGRAM.rstrip()}"
        )
    if not program.command:
        raise click.UsageError(f"{word!r} has no command, as in {model.name}{PROGRAM}python agent.py")
    return replace(model, name=word, facts={**model.facts, "kind": "program"}, program=program)


def _refuse_misspelt(word: str) -> None:
    """Raise BadParameter if the word looks like an environment, a misspelt policy or a command without a model."""
    if os.path.isdir(word):
        return
    problem = ""
    if is_environment(word):
        problem = f"{word} is an environment: write --environment {shlex.quote(word)}"
    elif " " in word:
        problem = (
            f"{word!r} is no model; to evaluate a program, write the model that it plays with before it: "
            f"'runs/lake{PROGRAM}{word}'"
        )
    elif "/" not in word and (close := near(word, [CHAT] if ":" in word else reference_names())):
        problem = f"no model {word!r}; did you mean {' or '.join(close)}?"
    if problem:
        raise click.BadParameter(problem, param_hint="MODEL")


def is_environment(word: str) -> bool:
    """Return whether a word of the command line is an environment, and no model."""
    is_model = PROGRAM in word or word.startswith((CHAT, *URLS)) or word in reference_names() or os.path.isdir(word)
    try:
        parsed = EnvironmentWord.parse(word)
    except WordError:
        return False
    return not is_model and (parsed.id != word or latest_name(word, ids := installed_ids()) in ids)


def _pretrained(word: str, sampling: Sampling, engine: Engine) -> EvaluatedModel:
    from starpod.trainer.agents.pretrained import (  # slow: imports torch
        UNUSABLE,
        PretrainedAgents,
        evaluation_temperature,
        find_pretrained,
    )

    try:
        found = find_pretrained(word)
    except UNUSABLE as error:
        raise click.ClickException(f"{word}: {error}") from error
    facts = {"kind": "model", **found.facts, "temperature": evaluation_temperature(found.config, sampling)}
    source = str(found.facts.get("checkpoint", word))  # a run may save a better checkpoint meanwhile
    return EvaluatedModel(word, facts, lambda: PretrainedAgents(source, sampling, engine), found.config)


def _endpoint(word: str, sampling: Sampling, concurrency: int) -> EvaluatedModel:
    from starpod.trainer.agents.chat import ChatAgents  # slow: imports openai

    url, _, model = ("", "", word.removeprefix(CHAT)) if word.startswith(CHAT) else word.partition("#")
    if not model:
        example = f"{url}#NAME" if url else "openai:gpt-5"
        raise click.BadParameter(f"{word} needs the name of a model behind it, as in {example}", param_hint="MODEL")
    try:
        agents = ChatAgents(
            model,
            base_url=url or None,
            temperature=sampling.temperature,
            max_tokens=sampling.max_tokens or 400,
            at_once=concurrency,
            thinking=sampling.thinking is not False,
        )
    except AgentRefused as error:
        raise click.UsageError(str(error)) from error
    return EvaluatedModel(word, {"kind": "endpoint", "model": model}, lambda: agents)


def incomplete_call(model: str = "") -> click.UsageError:
    """Return the error for a call that lacks a model or an environment. The error shows a full command."""
    if model:
        return click.UsageError(
            f"to play {model}, name an environment, for example: starpod eval {shlex.quote(model)} -e frozen_lake. "
            "A run is evaluated by its folder: starpod eval runs/lake"
        )
    return click.UsageError(
        "name what to evaluate: the folder of a run, a checkpoint or an export, a Hugging Face model, "
        f"{CHAT}MODEL, URL#MODEL or {', '.join(reference_names())}; for example: starpod eval runs/lake"
    )
