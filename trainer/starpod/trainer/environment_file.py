"""Configuration for the file of an environment: a tiny policy, sized by what the environment tells and shows."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from starpod.client import Fleet, Limits, StarpodError
from starpod.client.nearest import unknown_environment
from starpod.client.programs import ServiceFailed, ServiceRefused, started
from starpod.trainer.agents.base import Task
from starpod.trainer.models.config import TinyConfig
from starpod.trainer.prompts.prompt import PromptConfig
from starpod.trainer.section import ConfigError
from starpod.trainer.warm_start.config import WarmStartConfig
from starpod.trainer.warmstart import Demonstration, DemonstrationWriter, collect_demonstrations
from starpod.v1 import environment_pb2 as pb

_EPISODES = 64
"""Episodes that are played to find the sizes."""
_MOST_TURNS = 32
"""Turns of an episode that nobody ended."""
_MOST_TOKENS = 768
"""Tokens of an episode up to which a reply sees all of it: longer ones take minutes to train on."""
_NOISE = 0.5


@dataclass(frozen=True, slots=True)
class Job:
    """A configuration as plain values, and why it is so, a line each."""

    values: dict[str, Any]
    reasons: tuple[str, ...]


def choose_job(source: str) -> Job:
    """The job for `FILE.py` or, where the file holds several environments, `FILE.py:ENVIRONMENT`.

    Serves the file and plays some episodes of it: by its expert, where it has one. Raises ConfigError, for a mistake in
    the file with its line.
    """
    file, _, name = source.partition(":")
    path = Path(file).resolve()
    if not path.is_file():
        raise ConfigError(f"no such file: {file}")
    try:
        with started("the environment service", "serve", "--environment-module", str(path), "--port", "0") as address:
            return asyncio.run(_explore(path, name, address))
    except ServiceRefused as error:
        raise ConfigError(error.said) from error
    except (StarpodError, ServiceFailed) as error:
        raise ConfigError(f"{path.name} cannot be played: {error}") from error


async def _explore(path: Path, name: str, address: str) -> Job:
    async with Fleet(address) as fleet:
        spec = _chosen(path, name, await fleet.describe())
        names, can = tuple(spec.action_space.names), spec.capabilities
        if not (can.expert_action or names or can.valid_actions):
            raise ConfigError(
                f"{path.name}: {spec.id} lists no actions and has no expert, so a policy from scratch has nothing to "
                "begin from: give it `expert_action`, `valid_actions` or names in `spec.actions`, or train a "
                "pretrained model, in a YAML file with `model` and `environment`"
            )
        noise = _NOISE if names or can.valid_actions else 0.0  # where no actions are listed none is drawn
        warm_start: dict[str, Any] = (
            {"steps": 120, "batch_size": 32, "lr": 0.003, "noise": noise, "imitate_noise": True}
            if can.expert_action
            else {"steps": 80, "batch_size": 32, "lr": 0.003, "episodes": 500, "actions": "random", "noise": 0.0}
        )
        own = spec.limits.max_turns
        task = Task(spec.id, limits=Limits(min(own or _MOST_TURNS, _MOST_TURNS), 1), actions=names)
        config = WarmStartConfig(**{**warm_start, "noise": 0.0})
        played = await collect_demonstrations(fleet, config, task, range(_EPISODES))
        return _job(path, spec, warm_start, played)


def _chosen(path: Path, name: str, specs: Sequence[pb.EnvironmentSpec]) -> pb.EnvironmentSpec:
    newest = {spec.id: spec for spec in reversed(specs)}
    if name:
        for id_, spec in newest.items():
            if name in (id_, id_.rpartition("-v")[0]):
                return spec
        raise ConfigError(f"{path.name}: {unknown_environment(name, sorted(newest)).message}")
    if len(newest) > 1:
        several = " and ".join(sorted(newest))
        raise ConfigError(f"{path.name} holds {several}: say which, as in {path.name}:{min(newest)}")
    return next(iter(newest.values()))


def _job(path: Path, spec: pb.EnvironmentSpec, warm_start: dict[str, Any], played: Sequence[Demonstration]) -> Job:
    expert, own = spec.capabilities.expert_action, spec.limits.max_turns
    lengths = [len(each.episode.turns) for each in played]
    longest = max(lengths)
    # Twice what the expert needs: a policy that is still learning takes detours.
    turns = min(own or _MOST_TURNS, _MOST_TURNS, max(4, 2 * longest) if expert else 2 * longest if longest > 1 else 1)
    reply, turn = _tokens(spec, warm_start, played)
    whole = _rounded(1.25 * turns * turn)
    alone = whole > _MOST_TOKENS
    prompt = {"thinking": False} | ({"context": "single_turn", "window": 1} if alone else {})
    tokens = _rounded(1.5 * turn) if alone else whole
    groups, size, iterations, minutes = 32, 8, 60, 3
    references = ["random"] * bool(spec.action_space.names or spec.capabilities.valid_actions) + ["expert"] * expert
    single = turns == 1
    values = {
        "base": "tiny",
        "title": f"A tiny policy learns {spec.title or spec.id}",
        "environment": {
            "id": spec.id,
            "max_turns": turns,
            "max_actions_per_turn": 1,
            "serve": ["--environment-module", str(path)],
        },
        "prompt": prompt,
        "sampling": {"max_reply_tokens": reply, "max_episode_tokens": tokens},
        "collect": {"groups": groups, "group_size": size},
        # Once most groups do alike, the few that are left would take full steps: a run fell from 98 % to 44 % so. An
        # entropy bonus of 0.005 then outweighed what was left to learn: replies grew past their limit, 98 % fell to 47.
        "algorithm": {
            "preset": "starpo-s",
            "filter": {"value": 0.5},
            "filter_loss_scaling": "linear",
            "entropy_coefficient": 0.0,
        }
        | ({"advantage": "grpo"} if single else {}),
        "optimizer": {"critic_lr": 0.001},
        "warm_start": warm_start,
        "evaluation": {"every": 5, "episodes": 128, "reference": references},
        "stop": {"iterations": iterations, "minutes": minutes, "success": 0.99},
    }
    who = "its expert" if expert else "random play"
    limit = f"its own limit is {own}" if own else "it has no limit of its own"
    episodes = warm_start.get("episodes", WarmStartConfig.model_fields["episodes"].default)
    reasons = (
        f"{spec.id} {spec.version} of {path.name}, with a policy from scratch on a CPU",
        f"episodes of at most {turns} turns: {who} took {min(lengths)} to {longest}, and {limit}",
        f"replies of {reply} tokens, {'the present turn alone' if alone else 'the whole episode'} in {tokens}",
        f"warm start from {episodes} demonstrations of its expert, {warm_start['noise']:.0%} of the moves random"
        if expert
        else f"warm start from {episodes} episodes at random, for the format alone: it has no expert",
        "each reply compared with others from the same start: one turn decides"
        if single
        else "StarPO-S with a critic: rewards come over several turns",
        f"{groups} groups of {size} episodes, {iterations} times, for {minutes} minutes or until 99 % are solved",
    )
    return Job(values, reasons)


def _tokens(spec: pb.EnvironmentSpec, warm_start: dict[str, Any], played: Sequence[Demonstration]) -> tuple[int, int]:
    """Tokens to allow for a reply, and those of the longest turn, its reply included."""
    prompt = PromptConfig(style="compact", thinking=False)
    writer = DemonstrationWriter(WarmStartConfig(**warm_start), prompt, tuple(spec.action_space.names))
    from starpod.trainer.models.tiny import train_tokenizer  # which loads torch

    tokenizer = train_tokenizer(writer.texts(played), size=TinyConfig().vocabulary)
    replies, seen = [], []
    for each in played:
        for turn in each.episode.turns:
            replies.append(len(tokenizer.encode(writer.reply(turn))))
            seen.append(len(tokenizer.encode(turn.observation)))
    reply = max(16, round(1.5 * max(replies)))
    return reply, max(seen) + reply + 8


def _rounded(tokens: float) -> int:
    """Up to the next multiple of 64."""
    return -int(-tokens // 64) * 64
