"""Choice of a configuration for an environment: sized for its options and the model, by test episodes."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from starpod.client import BadArgument, StarpodError, Unreachable
from starpod.client.programs import ServiceFailed, ServiceRefused
from starpod.remote.catalog import no_answer
from starpod.trainer.configuration.config import Config
from starpod.trainer.configuration.exploration import (
    MOST_TURNS,
    Explored,
    cache_file,
    explore,
    read_cache,
    serve,
    write_cache,
)
from starpod.trainer.configuration.job_sizes import fixed_values, size_pretrained, size_tiny
from starpod.trainer.configuration.loading import Complete
from starpod.trainer.configuration.preflight import check, check_model
from starpod.trainer.configuration.section import ConfigError
from starpod.trainer.models.config import TINY, ModelError, model_title
from starpod.trainer.prompts.prompt import FullContext
from starpod.trainer.warm_start.config import WarmStartConfig
from starpod.v1 import environment_pb2 as pb
from starpod.v1.environment_word import EnvironmentWord, WordError


@dataclass(frozen=True, slots=True)
class Job:
    """A configuration as plain values, and facts about the environment."""

    values: dict[str, Any]
    source: str
    """Name of the file, or address of the servers."""
    spec: pb.EnvironmentSpec
    lengths: tuple[int, ...]
    """Number of turns of each test episode, played by the expert or, without one, at random."""
    solved: int | None
    """Number of successful test episodes; None if the environment does not say."""
    seconds: float | None
    """Estimated seconds per episode of an iteration: the trainer's time on an idle core plus the environment's. None
    for a pretrained model, whose speed is unknown."""

    def explain(self, config: Config) -> list[str]:
        """Return lines on what will be trained and how. config: this configuration with the user's changes."""
        spec, warm_start, collect, stop = self.spec, config.warm_start, config.collect, config.stop
        player = "its expert" if spec.capabilities.expert_action else "random play"
        own_limit = spec.limits.max_turns
        max_turns = config.environment.max_turns
        examples = f"the best {warm_start.best:.0%} of " * (warm_start.best < 1) + f"{warm_start.episodes} "
        examples += (
            f"episodes of {warm_start.scout}"
            if warm_start.scout
            else "demonstrations of its expert"
            if warm_start.actions == "expert"
            else "episodes played at random"
        )
        examples += f", {warm_start.noise:.0%} of the moves random" * (warm_start.noise > 0)
        if warm_start.demonstrations:
            examples = f"{examples}, and {warm_start.demonstrations}" * (warm_start.episodes > 0)
            examples = examples or warm_start.demonstrations
        times = f"{collect.groups} groups of {collect.group_size} episodes, {stop.iterations} times"
        ends, forecast = [f"until {stop.success:.0%} are solved"] if stop.success is not None else [], []
        if stop.minutes is not None:
            ends = [f"for {stop.minutes:g} minutes", *ends]
            seconds = (self.seconds or 0.0) * collect.groups * collect.group_size
            if seconds * stop.iterations > 60 * stop.minutes:
                forecast = [
                    f"on an idle core about {int(60 * stop.minutes / seconds)} of them take {stop.minutes:g} minutes"
                ]
        return [
            f"{spec.id} {spec.version} of {self.source}, with the model {model_title(config.model.name)}",
            f"episodes of at most {max_turns} turns: {player} took {min(self.lengths)} to {max(self.lengths)}, and "
            + (f"its own limit is {own_limit}" if own_limit else "it has no limit of its own"),
            *([] if self.solved is None else [f"{player} solved {self.solved} of {len(self.lengths)}{self._advice()}"]),
            f"the policy sees {self._describe_context(config)}, and replies with at most "
            f"{config.sampling.max_reply_tokens} tokens",
            f"first it imitates {examples}" if warm_start.imitates else "no warm start",
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
        context, tokens = config.prompt.context, f"(up to {config.sampling.max_episode_tokens} tokens)"
        if isinstance(context, FullContext) or context.window is None:
            return f"the whole episode so far {tokens}"
        if context.window > 1:
            return f"the last {context.window} turns at most {tokens}"
        reason = ", since its spec says fully_observed" * self.spec.capabilities.fully_observed
        return f"only the present observation{reason}"


def remedies(warm_start: WarmStartConfig) -> str:
    """Return a text on how to raise success."""
    imitates_expert = warm_start.imitates and warm_start.episodes and warm_start.actions == "expert"
    expert = "" if imitates_expert else "imitate the environment's `expert_action` in a warm start, or "
    return f"{expert}give the environment rewards on the way or easier starts"


def choose_job(source: str, complete: Complete, report: Callable[[str], None] = lambda _: None) -> Job:
    """Return the job for an environment: see EnvironmentWord.

    The configuration is checked first. Then some episodes are played, by the expert if there is one, with the options
    of the user. Those of a file are cached until it changes.

    Args:
        report: Called with lines on the progress.

    Raises:
        ConfigError: The configuration cannot be used, or the environment cannot be played. A mistake in a file is
            reported with its line.
    """
    try:
        word = EnvironmentWord.parse(source)
    except WordError as error:
        raise ConfigError(str(error)) from error
    draft = _draft(word, complete, pb.EnvironmentSpec(id=word.id or "environment-v1"))
    if draft.model.name != TINY:
        try:
            check_model(draft)  # imports torch, which takes seconds
        except ModelError as error:
            raise ConfigError(str(error)) from error
    cache = cache_file(word, draft)
    if (explored := read_cache(cache)) is not None:
        _checked(word, complete, explored.spec)
    else:
        report(f"{word.source}: some episodes are played to choose sizes")
        try:
            with serve(word, draft.environment) as environment:
                explored = asyncio.run(explore(word, environment, partial(_checked, word, complete), report))
        except ServiceRefused as error:
            raise ConfigError(error.stderr) from error
        except Unreachable as error:
            raise ConfigError(no_answer(word.source, str(error).removesuffix("."))) from error
        except BadArgument as error:
            raise ConfigError(str(error)) from error
        except (StarpodError, ServiceFailed) as error:
            raise ConfigError(f"{word.source} cannot be played: {error}") from error
        write_cache(cache, explored)
    return _job(word, explored, _draft(word, complete, explored.spec))


def _draft(word: EnvironmentWord, complete: Complete, spec: pb.EnvironmentSpec) -> Config:
    """Return the user's configuration for an environment whose sizes are not chosen yet.

    Its sections have a key in `model_fields_set` if the user gave it. Raises ConfigError if no choice fits.
    """
    contexts: list[dict[str, Any]] = [
        {},
        {"context": {"kind": "single_turn", "window": 1}},
        {"context": {"kind": "split", "window": 32, "overlap": 16}},
    ]
    first_error: ConfigError | None = None
    for tiny, context, single_turn in itertools.product((True, False), contexts, (False, True)):
        values = fixed_values(word, spec, tiny=tiny, single_turn=single_turn)
        prompt = {"style": "compact", **values["prompt"]} if tiny else values["prompt"]
        try:
            config = complete({**values, "prompt": {**prompt, **context}})
        except ConfigError as error:
            first_error = first_error or error
            continue
        if tiny == (config.model.name == TINY):
            given_keys = config.prompt.model_fields_set - context.keys()
            prompt_config = config.prompt.model_construct(given_keys, **dict(config.prompt))
            return config.model_copy(update={"prompt": prompt_config})
    assert first_error is not None
    raise first_error


def _checked(word: EnvironmentWord, complete: Complete, spec: pb.EnvironmentSpec) -> Config:
    """Return the draft for an environment after all checks that need no episode. Raises ConfigError."""
    draft = _draft(word, complete, spec)
    check(draft, world=1)
    names, capabilities = tuple(spec.action_space.names), spec.capabilities
    if draft.model.name == TINY and not (capabilities.expert_action or names or capabilities.valid_actions):
        raise ConfigError(
            f"{word.source}: {spec.id} lists no actions and has no expert, so a policy from scratch has nothing to "
            "begin from: give it `expert_action`, `valid_actions` or names in `spec.actions`, or train a "
            "pretrained model: model=NAME"
        )
    return draft


def _job(word: EnvironmentWord, explored: Explored, draft: Config) -> Job:
    spec, demonstrations, limit = explored.spec, explored.demonstrations, draft.environment.max_turns
    expert, cap = spec.capabilities.expert_action, limit or spec.limits.max_turns
    lengths = [len(demo.episode.turns) for demo in demonstrations]
    longest = max(lengths)
    # Allow twice the expert's turns, because a policy that is still learning takes detours.
    turns = max(min(2 * longest, MOST_TURNS), longest)
    turns = limit or min(cap or turns, max(4, turns) if expert else turns if longest > 1 else 1)
    tiny = draft.model.name == TINY
    values = fixed_values(word, spec, tiny=tiny, single_turn=turns == 1)
    sized, seconds = (size_tiny if tiny else size_pretrained)(draft, explored, turns)
    values = {
        key: {**section, **sized.get(key, {})} if isinstance(section, dict) else section
        for key, section in {**sized, **values}.items()
    }
    values["environment"]["max_turns"] = turns
    successes = [demo.episode.success for demo in demonstrations if demo.episode.success is not None]
    return Job(values, word.source, spec, tuple(lengths), sum(successes) if successes else None, seconds)
