"""Choice of a configuration for an environment's file: a tiny policy, sized by the spec and by test episodes."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Any

from starpod.client import Fleet, Limits, StarpodError
from starpod.client.nearest import unknown_environment
from starpod.client.programs import ServiceFailed, ServiceRefused, run_program
from starpod.client.spelling import near
from starpod.trainer.agents.base import Task
from starpod.trainer.engines.config import EngineConfig
from starpod.trainer.models.config import TinyConfig, model_title
from starpod.trainer.prompts.prompt import PromptConfig
from starpod.trainer.section import ConfigError
from starpod.trainer.warm_start.config import WarmStartConfig
from starpod.trainer.warm_start.demonstrations import Demonstration, DemonstrationWriter, collect_demonstrations
from starpod.v1 import environment_pb2 as pb

if TYPE_CHECKING:
    from starpod.trainer.config import Config

_EPISODES = 64
"""Number of test episodes that are played to choose the policy's context and token limits."""
_MOST_TURNS = 32
"""Maximum number of turns of an episode."""
_MOST_TOKENS = 768
"""If a whole episode fits into this number of tokens, replies see all of it even if one observation is enough."""
_MOST_CONTEXT = 4096
"""If a whole episode fits into this number of tokens, replies see all of it. Otherwise they see a window of the last
turns."""
_NOISE = 0.3
_SLOW = 1.0
"""Limit in seconds for the test episodes of an environment without an expert. If they take longer, the warm start plays
500 random episodes and imitates the best half. Otherwise it plays 3000 and imitates the best tenth."""
_IMITATED, _IMITATED_IN_ALL, _COLLECTED = 2048, 655_360, 24_576
"""Numbers of tokens of a warm-start step, of the whole warm start, and of an iteration. Small steps imitate better: for
the same total number of tokens, the loss was 0.38 nats per token with 8 episodes per step, and 0.43 with 32. On an
idle core the warm start takes half a minute, and an iteration two seconds."""
_SPEED = 14_000
"""Number of tokens per second that an iteration processes on an idle core."""


@dataclass(frozen=True, slots=True)
class Job:
    """A configuration as plain values, and facts about the environment."""

    values: dict[str, Any]
    path: Path
    spec: pb.EnvironmentSpec
    lengths: tuple[int, ...]
    """Number of turns of each test episode, played by the expert or, without one, at random."""
    solved: int | None
    """Number of successful test episodes; None if the environment does not say."""
    seconds: float
    """Estimated seconds per episode of an iteration: the trainer's time on an idle core plus the environment's."""

    def explain(self, config: Config) -> list[str]:
        """Return lines on what will be trained and how. config: this configuration with the user's changes."""
        spec, warm_start, collect, stop = self.spec, config.warm_start, config.collect, config.stop
        player = "its expert" if spec.capabilities.expert_action else "random play"
        own_limit = spec.limits.max_turns
        max_turns = config.environment.max_turns
        examples = f"the best {warm_start.best:.0%} of " * (warm_start.best < 1) + f"{warm_start.episodes} "
        examples += (
            "demonstrations of its expert" + f", {warm_start.noise:.0%} of the moves random" * (warm_start.noise > 0)
            if warm_start.actions == "expert"
            else "episodes played at random"
        )
        times = f"{collect.groups} groups of {collect.group_size} episodes, {stop.iterations} times"
        ends, forecast = [f"until {stop.success:.0%} are solved"] if stop.success is not None else [], []
        if stop.minutes is not None:
            ends = [f"for {stop.minutes:g} minutes", *ends]
            seconds = self.seconds * collect.groups * collect.group_size
            if seconds * stop.iterations > 60 * stop.minutes:
                forecast = [
                    f"on an idle core about {int(60 * stop.minutes / seconds)} of them take {stop.minutes:g} minutes"
                ]
        return [
            f"{spec.id} {spec.version} of {self.path.name}, with the model {model_title(config.model.name)}",
            f"episodes of at most {max_turns} turns: {player} took {min(self.lengths)} to {max(self.lengths)}, and "
            + (f"its own limit is {own_limit}" if own_limit else "it has no limit of its own"),
            *([] if self.solved is None else [f"{player} solved {self.solved} of {len(self.lengths)}{self._advice()}"]),
            f"the policy sees {self._describe_context(config)}, and replies with at most "
            f"{config.sampling.max_reply_tokens} tokens",
            f"first it imitates {examples}" if warm_start.steps else "no warm start",
            f"then {config.algorithm.preset} compares "
            + (
                "each turn with a critic's estimate"
                if config.algorithm.needs_critic
                else "each turn with others from the same state"
                if config.algorithm.needs_state_key
                else "each episode with others from the same start"
            ),
            ", ".join([times, " or ".join(ends)]) if ends else times,
            *forecast,
        ]

    def _advice(self) -> str:
        if self.solved or self.spec.capabilities.expert_action:
            return ""
        return "; if training stays flat, give it an `expert_action`, rewards on the way, or easier starts"

    def _describe_context(self, config: Config) -> str:
        prompt, tokens = config.prompt, f"(up to {config.sampling.max_episode_tokens} tokens)"
        if prompt.context == "full" or prompt.window is None:
            return f"the whole episode so far {tokens}"
        if prompt.window > 1:
            return f"the last {prompt.window} turns at most {tokens}"
        reason = ", since its spec says fully_observed" * self.spec.capabilities.fully_observed
        return f"only the present observation{reason}"


def remedies(warm_start: WarmStartConfig) -> str:
    """Return a text on how to raise success."""
    imitates_expert = warm_start.steps and warm_start.actions == "expert"
    expert = "" if imitates_expert else "imitate the environment's `expert_action` in a warm start, or "
    return f"{expert}give the environment rewards on the way or easier starts"


def choose_job(source: str, context: str | None = None) -> Job:
    """Return the job for `FILE.py` or, if the file defines several environments, `FILE.py:ENVIRONMENT`.

    Serves the file and plays some episodes, by its expert if it has one. context: the user's `prompt.context`; None:
    choose one. Raises ConfigError, with the line number for a mistake in the file.
    """
    file, _, name = source.partition(":")
    path = Path(file).resolve()
    if not path.is_file():
        close = near(path.name, [other.name for other in path.parent.glob("*.py")])
        hint = f"; did you mean {' or '.join(str(Path(file).with_name(name)) for name in close)}?" if close else ""
        raise ConfigError(f"no such file: {file}{hint}")
    try:
        with run_program(
            "the environment service", "serve", "--environment-module", str(path), "--port", "0"
        ) as address:
            return asyncio.run(_explore(path, name, address, context))
    except ServiceRefused as error:
        raise ConfigError(error.stderr) from error
    except (StarpodError, ServiceFailed) as error:
        raise ConfigError(f"{path.name} cannot be played: {error}") from error


async def _explore(path: Path, name: str, address: str, context: str | None) -> Job:
    async with Fleet(address) as fleet:
        spec = _choose_spec(path, name, await fleet.describe())
        names, capabilities = tuple(spec.action_space.names), spec.capabilities
        if not (capabilities.expert_action or names or capabilities.valid_actions):
            raise ConfigError(
                f"{path.name}: {spec.id} lists no actions and has no expert, so a policy from scratch has nothing to "
                "begin from: give it `expert_action`, `valid_actions` or names in `spec.actions`, or train a "
                "pretrained model, in a YAML file with `model` and `environment`"
            )
        noise = _NOISE if names or capabilities.valid_actions else 0.0  # random moves need a list of actions
        warm_start: dict[str, Any] = {"steps": 320, "lr": 0.003} | (
            {"episodes": 1000, "best": 0.5 if noise else 1.0, "noise": noise, "imitate_noise": True}
            if capabilities.expert_action
            else {"episodes": 3000, "best": 0.1, "actions": "random", "noise": 0.0}
        )
        own_limit = spec.limits.max_turns
        task = Task(spec.id, limits=Limits(min(own_limit or _MOST_TURNS, _MOST_TURNS), 1), actions=names)
        config = WarmStartConfig(**{**warm_start, "noise": 0.0})
        start_time = perf_counter()
        demonstrations = await collect_demonstrations(fleet, config, task, range(_EPISODES))
        seconds = perf_counter() - start_time
        if seconds > _SLOW and not capabilities.expert_action:
            warm_start |= {"episodes": 500, "best": 0.5}
        return _job(path, spec, warm_start, demonstrations, seconds, context)


def _choose_spec(path: Path, name: str, specs: Sequence[pb.EnvironmentSpec]) -> pb.EnvironmentSpec:
    specs_by_id = {spec.id: spec for spec in reversed(specs)}
    if name:
        for id_, spec in specs_by_id.items():
            if name in (id_, id_.rpartition("-v")[0]):
                return spec
        raise ConfigError(f"{path.name}: {unknown_environment(name, sorted(specs_by_id)).message}")
    if len(specs_by_id) > 1:
        names = " and ".join(sorted(specs_by_id))
        raise ConfigError(f"{path.name} holds {names}: say which, as in {path.name}:{min(specs_by_id)}")
    return next(iter(specs_by_id.values()))


def _job(
    path: Path,
    spec: pb.EnvironmentSpec,
    warm_start: dict[str, Any],
    demonstrations: Sequence[Demonstration],
    seconds: float,
    context: str | None,
) -> Job:
    expert, cap = spec.capabilities.expert_action, spec.limits.max_turns
    lengths = [len(demo.episode.turns) for demo in demonstrations]
    longest = max(lengths)
    # Allow twice the expert's turns, because a policy that is still learning takes detours.
    turns = min(cap or _MOST_TURNS, _MOST_TURNS, max(4, 2 * longest) if expert else 2 * longest if longest > 1 else 1)
    reply, turn, mean_turn = _tokens(spec, warm_start, demonstrations)
    episode = turns * mean_turn  # an untrained policy uses all turns
    episode_tokens = _rounded(1.25 * turns * turn)
    prompt, tokens = _chosen_prompt(spec, turn, episode_tokens) if context is None else ({}, episode_tokens)
    size, iterations, minutes = 8, 100, 3
    groups = min(max(int(_COLLECTED / (size * episode)), 8), 32)
    batch = min(max(int(_IMITATED / episode), 4), 64)
    steps = min(max(int(_IMITATED_IN_ALL / (batch * episode)), 80), warm_start["steps"])
    warm_start = {**warm_start, "batch_size": batch, "steps": steps}
    references = ["random"] * bool(spec.action_space.names or spec.capabilities.valid_actions) + ["expert"] * expert
    is_single_turn = turns == 1
    values = {
        "base": "tiny",
        "title": f"A tiny policy learns {spec.title or spec.id}",
        "environment": {
            "id": spec.id,
            "max_turns": turns,
            "max_actions_per_turn": 1,
            "serve": ["--environment-module", str(path)],
        },
        "model": {"tiny": {"phrases": True}},
        "prompt": {"thinking": False, **prompt},
        "sampling": {"max_reply_tokens": reply, "max_episode_tokens": tokens},
        "collect": {"groups": groups, "group_size": size},
        # Use one slot per episode. With fewer, half of all prompts were read again, and collecting took ten times as
        # long.
        "engine": {"slots": max(groups * size, EngineConfig.model_fields["slots"].default)},
        # Once most groups have equal rewards, the few others would take full steps, and one run fell from 98 % to 44 %.
        # With an entropy bonus of 0.005, that bonus then outweighed the task: replies exceeded their limit, and a run
        # fell from 98 % to 47 %. A critic's head on a policy that has seen no rewards explains nothing for as long as
        # these runs last, so turns are compared with others from the same state instead.
        "algorithm": {
            "preset": "starpo-s",
            "advantage": "grpo" if is_single_turn else "gigpo",
            "filter": {"value": 0.5},
            "filter_loss_scaling": "linear",
            "entropy_coefficient": 0.0,
            "mini_batch_size": 8,
        },
        # Without slower first iterations, the share of well-formed replies fell from 99.7 % to 95 % at this rate.
        "optimizer": {"lr": 0.001, "warmup_iterations": 5},
        "warm_start": warm_start,
        "evaluation": {"every": 5, "episodes": 128, "reference": references},
        "stop": {"iterations": iterations, "minutes": minutes, "success": 0.99},
    }
    successes = [demo.episode.success for demo in demonstrations if demo.episode.success is not None]
    return Job(
        values,
        path,
        spec,
        tuple(lengths),
        sum(successes) if successes else None,
        episode / _SPEED + seconds / sum(lengths) * turns,
    )


def _chosen_prompt(spec: pb.EnvironmentSpec, turn: int, whole: int) -> tuple[dict[str, Any], int]:
    """Return the keys of `prompt` that choose the context of a reply, and that context's number of tokens.

    Args:
        turn: Tokens of the longest turn.
        whole: Tokens of the longest episode.
    """
    if spec.capabilities.fully_observed and whole > _MOST_TOKENS:
        return {"context": "single_turn", "window": 1}, _rounded(1.5 * turn)
    if whole <= _MOST_CONTEXT:
        return {}, whole
    turns = max(2, _MOST_CONTEXT // turn)
    return {"context": "split", "window": turns, "overlap": turns // 2}, _rounded(1.25 * turns * turn)


def _tokens(
    spec: pb.EnvironmentSpec, warm_start: dict[str, Any], demonstrations: Sequence[Demonstration]
) -> tuple[int, int, float]:
    """Return numbers of tokens: a reply's limit, the longest turn with its reply, and the mean turn with its reply."""
    prompt = PromptConfig(style="compact", thinking=False)
    writer = DemonstrationWriter(WarmStartConfig(**warm_start), prompt, tuple(spec.action_space.names))
    from starpod.trainer.models.tiny import train_tokenizer  # imports torch

    texts, size = list(writer.texts(demonstrations)), TinyConfig().vocabulary
    # Limits are for text without phrases, because new texts may have none.
    words, phrases = train_tokenizer(texts, size=size), train_tokenizer(texts, size=size, phrases=True)
    turns = [turn for demo in demonstrations for turn in demo.episode.turns]
    replies = [writer.reply(turn) for turn in turns]
    reply = max(16, round(1.5 * max(len(words.encode(text)) for text in replies)))
    longest = max(len(words.encode(turn.observation)) for turn in turns) + reply + 8
    total = sum(len(phrases.encode(text)) for text in (*replies, *(turn.observation for turn in turns)))
    return reply, longest, total / len(turns) + 3


def _rounded(tokens: float) -> int:
    """Round up to a multiple of 64."""
    return -int(-tokens // 64) * 64
