"""Checks of a configuration before anything is played.

`check` only needs the configuration, and `starpod train --dry-run` runs it as well. `check_model` needs the model's
files, and `check_environment` the servers. Settings that contradict each other are rows of rules.py.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from random import Random
from typing import Any

from starpod.client import Fleet, Observation, Want
from starpod.trainer.agents.program import load_programs
from starpod.trainer.agents.scripted import ReferenceAgent, choose_expertly, choose_randomly, find_reference
from starpod.trainer.configuration.case import Case
from starpod.trainer.configuration.config import Config
from starpod.trainer.configuration.rules import refuse_broken
from starpod.trainer.configuration.section import ConfigError
from starpod.trainer.configuration.tasks import TaskConfig
from starpod.trainer.configuration.user_file import names_file
from starpod.trainer.output.sinks import check_sinks
from starpod.trainer.prompts.template import Template
from starpod.trainer.rewards.reward import RewardConfig, Rewards
from starpod.trainer.rollout.config import EnvironmentConfig, Facts
from starpod.trainer.rollout.environment import check_installed, make_task
from starpod.trainer.rollout.play import play
from starpod.trainer.rollout.saved_starts import open_saved, read_starts
from starpod.trainer.warm_start.files import read_contents


def check(config: Config, *, world: int, local_world: int = 1, resume: bool = False) -> None:
    """Refuse a configuration that is certain to fail. This check needs neither servers nor weights.

    Args:
        world: Number of processes that train together.
        local_world: Number of them on each machine.
        resume: Whether an earlier run continues, which needs no scout.

    Raises:
        ConfigError: The message names the key.
    """
    check_sinks(config.monitor.sinks)
    if config.sampling.json_schema is not None:
        _check_schema(config.sampling.json_schema)
    if config.collect.agent.command:
        load_programs()
    for task in config.tasks:
        check_installed(task.environment)
        for name in task.evaluation.reference:
            find_reference(name)
        task.prompt.check_grammar()
        if path := task.environment.starts:
            starts = read_starts(path, task.environment.id)
            refuse_held_out(config, "environment.starts", path, (start.seed for start in starts))
        if task.warm_start.demonstrations and not resume:
            _check_demonstrations(config, task)
        if task.warm_start.scout and not resume:
            from starpod.trainer.warm_start.scout import read_scout  # which loads torch

            read_scout(config, task)
    for stage in config.in_stages:
        if names_file(stage.algorithm.advantage.kind) or names_file(stage.algorithm.loss.kind):
            from starpod.trainer.algorithms.user_methods import check_user_methods  # which loads torch

            check_user_methods(stage.algorithm)
        for task in stage.tasks:
            Rewards(task.rewards)  # loads the functions
    if world > 1:
        refuse_broken(Case(config, config.tasks[0], processes=local_world))


def _check_schema(schema: Mapping[str, Any]) -> None:
    from starpod.trainer.prompts.structure import check_schema  # which loads torch

    try:
        check_schema(schema)
    except ValueError as error:
        raise ConfigError(f"sampling.json_schema: {error}") from error


def _check_demonstrations(config: Config, task: TaskConfig) -> None:
    """Raise ConfigError if a task's file of demonstrations cannot be read or used."""
    contents, path = read_contents(task.warm_start, task.environment.id), task.warm_start.demonstrations
    seeds = [*(each.seed for each in contents.episodes), *(chat.seed for chat in contents.chats if chat.environment)]
    refuse_held_out(config, "warm_start.demonstrations", path, seeds)
    if task.name and contents.chats and path == config.warm_start.demonstrations:
        raise ConfigError(
            f"warm_start.demonstrations {path} has conversations, which belong to one environment: give it in that "
            f"section, such as environments.{task.name}.warm_start.demonstrations"
        )


def refuse_held_out(config: Config, key: str, path: str, seeds: Iterable[int]) -> None:
    """Raise ConfigError if training data of a file comes from a seed that is held out for evaluations."""
    for seed in seeds:
        if holder := config.seeds.holds_out(seed):
            raise ConfigError(
                f"{key} {path} has data of seed {seed}, which {holder} holds out: save data of another seed, such as "
                f"{config.seeds.train.start}, or choose other {holder.split()[0]}"
            )


def check_model(config: Config) -> None:
    """Refuse a model that cannot be loaded, is unsupported by the engine, or cannot read the images in its prompts.

    Raises ConfigError and ModelError.
    """
    import torch

    from starpod.trainer.engines.base import EngineError
    from starpod.trainer.engines.factory import slots_within
    from starpod.trainer.models.config import TINY
    from starpod.trainer.models.hf import load_tokenizer
    from starpod.trainer.models.policy import build_shape
    from starpod.trainer.models.trunk import unwrapped
    from starpod.trainer.models.vision import view_of

    if config.model.name == TINY:
        return  # its sections check the rest
    load_tokenizer(config.model)
    shape = build_shape(config.model)
    if config.engine.name == "torch":
        try:
            dtype = getattr(torch, config.model.dtype)
            slots_within(config.engine, unwrapped(shape).config, config.sampling.max_episode_tokens, dtype)
        except EngineError as error:
            raise ConfigError(str(error)) from error
    if view_of(shape) is None and any(task.prompt.shows_images for task in config.tasks):
        raise ConfigError(
            f"prompt.observation shows images, but {config.model.name} has no image input: choose an Idefics3 or "
            "SmolVLM, or set prompt.observation to text"
        )


def warn_of_rewrites(config: Config, templates: Mapping[str, Template]) -> list[str]:
    """Return a sentence for each environment's template that changes the past, if prompts show a whole conversation."""
    # A program writes its own prompts, in which replies may have thoughts.
    rewrites = {
        (Template(templates[task.name].tokenizer) if config.collect.agent.command else templates[task.name]).rewrite
        for task in config.tasks
        if task.prompt.context.kind in ("full", "split")
    }
    return [
        f"the chat template {rewrite}; so each turn begins a fresh sample, in which earlier turns are context as the "
        "template writes them. For one sample per episode, set model.chat_template to one that keeps the past"
        for rewrite in sorted(filter(None, rewrites))
    ]


def check_templates(config: Config) -> list[str]:
    """Return the sentences of `warn_of_rewrites` before a run has built its model. Raises ModelError and ValueError."""
    from starpod.trainer.models.config import TINY
    from starpod.trainer.models.hf import load_tokenizer

    if config.model.name == TINY:
        return []  # its template keeps the past
    tokenizer = load_tokenizer(config.model)
    return warn_of_rewrites(
        config, {task.name: Template(tokenizer, prefill=task.prompt.opening) for task in config.tasks}
    )


async def check_environment(config: Config, task: TaskConfig, fleet: Fleet, facts: Facts) -> None:
    """Refuse settings and options that an environment does not support, and shaping functions that raise.

    Args:
        fleet: Where the environment is served. Some episodes are begun there.

    Raises:
        ConfigError: The settings do not suit the environment.
        BadArgument: The environment refuses its options.
        UserCodeError: A shaping function raises.
    """
    refuse_broken(Case(config, task, facts))
    environments: list[EnvironmentConfig] = []
    for environment in played_environments(config, task):
        if environment not in environments:
            environments.append(environment)
            seed = config.seeds.train.start
            want = Want(state_key=config.needs_state_key)  # an error in `state_key` must not show after the warm start
            for session in await make_task(environment, facts.actions, task.name).open(fleet, seed, 1, want):
                await session.close()
    if task.environment.starts:
        await _try_starts(config, task, fleet, facts)
    await _try_rewards(config, task, fleet, facts)


async def _try_starts(config: Config, task: TaskConfig, fleet: Fleet, facts: Facts) -> None:
    """Reach each saved start state with each set of options, to find those of another version before the warm start."""
    starts = read_starts(task.environment.starts, task.environment.id)
    _, *environments = played_environments(config, task)  # evaluations begin in no saved state
    for environment in environments:
        for start in starts:
            replayed_task = make_task(environment, facts.actions, task.name)
            opening = open_saved(replayed_task, fleet, start, 1, Want(), group=0)
            await fleet.close_sessions(await opening)


async def _try_rewards(config: Config, task: TaskConfig, fleet: Fleet, facts: Facts) -> None:
    """Play an episode with each set of shaping functions, to find functions that raise before the warm start."""
    configs: list[RewardConfig] = []
    for rewards in (each.rewards for stage in config.in_stages for each in stage.tasks if each.name == task.name):
        if not rewards.shaped or rewards in configs:
            continue
        configs.append(rewards)
        want = Want(valid_actions=True, expert_action=facts.expert)
        opening = make_task(task.environment, facts.actions, task.name).open(fleet, config.seeds.train.start, 1, want)
        for session in await opening:
            try:
                await play(ReferenceAgent(_any_action, facts.actions, Random(0)), session, rewards=Rewards(rewards))
            finally:
                await session.close()


def _any_action(observation: Observation, actions: Sequence[str], rng: Random) -> str:
    """Return the expert's action, else a random one, else "" if the environment lists no actions."""
    return choose_expertly(observation, actions, rng) or choose_randomly(observation, actions, rng) or ""


def played_environments(config: Config, task: TaskConfig) -> Iterator[EnvironmentConfig]:
    """Yield a task's environment with each set of options that the run uses: for evaluations, stages and levels."""
    yield task.held_out
    for stage in config.in_stages:
        (environment,) = (each.environment for each in stage.tasks if each.name == task.name)
        levels: tuple[dict[str, Any], ...] = getattr(environment.curriculum, "levels", ()) or ({},)
        for level in levels:
            yield environment.with_options(level)
