"""Choice of a configuration for an environment: sized for its options and the model, by test episodes."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import importlib.metadata
import itertools
import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from time import perf_counter
from typing import Any

import click

from starpod.client import BadArgument, Limits, StarpodError, Unreachable
from starpod.client.programs import ServiceFailed, ServiceRefused, start_server
from starpod.remote.catalog import find_environment, no_answer
from starpod.trainer.configuration.config import Config
from starpod.trainer.configuration.loading import Complete
from starpod.trainer.configuration.preflight import check, check_model, played_environments
from starpod.trainer.configuration.section import ConfigError
from starpod.trainer.data.episode import Episode
from starpod.trainer.engines.config import EngineConfig
from starpod.trainer.models.config import PACKAGED, TINY, ModelError, TinyConfig, model_title
from starpod.trainer.prompts.prompt import FullContext
from starpod.trainer.rollout.config import EnvironmentConfig
from starpod.trainer.rollout.environment import connect, make_task
from starpod.trainer.warm_start.config import WarmStartConfig
from starpod.trainer.warm_start.demonstrations import Demonstration, collect_demonstrations
from starpod.trainer.warm_start.teacher import DemonstrationWriter
from starpod.v1 import environment_pb2 as pb
from starpod.v1.environment_word import EnvironmentWord, WordError

_EPISODES = 64
"""Number of test episodes that are played to choose the policy's context and token limits."""
_MOST_TURNS = 32
"""Maximum number of turns of an episode, unless the expert needs more."""
_MOST_EXPERT_TURNS = 128
"""Maximum number of turns that the expert may take in a test episode."""
_REPORT_SECONDS = 10.0
"""Seconds between reports on the progress of the test episodes."""
_MOST_CACHED = 20
"""Number of explored environments that are cached. The oldest are removed first."""
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
            "demonstrations of its expert" + f", {warm_start.noise:.0%} of the moves random" * (warm_start.noise > 0)
            if warm_start.actions == "expert"
            else "episodes played at random"
        )
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
        context, tokens = config.prompt.context, f"(up to {config.sampling.max_episode_tokens} tokens)"
        if isinstance(context, FullContext) or context.window is None:
            return f"the whole episode so far {tokens}"
        if context.window > 1:
            return f"the last {context.window} turns at most {tokens}"
        reason = ", since its spec says fully_observed" * self.spec.capabilities.fully_observed
        return f"only the present observation{reason}"


def remedies(warm_start: WarmStartConfig) -> str:
    """Return a text on how to raise success."""
    imitates_expert = warm_start.steps and warm_start.actions == "expert"
    expert = "" if imitates_expert else "imitate the environment's `expert_action` in a warm start, or "
    return f"{expert}give the environment rewards on the way or easier starts"


def _servers(word: EnvironmentWord) -> dict[str, Any]:
    """Return the keys of the section `environment` that say where the environment is served."""
    if word.addresses:
        return {"addresses": word.addresses.split(",")}
    return {} if word.id else {"serve": [word.serve]}


@contextmanager
def _serve(word: EnvironmentWord, config: EnvironmentConfig) -> Iterator[EnvironmentConfig]:
    """Serve what is not served yet inside the context, and yield the section `environment` with its address."""
    if word.addresses:
        yield config
        return
    with start_server(*filter(None, [word.id]), *config.serve) as address:
        yield config.model_copy(update={"addresses": (address,), "serve": ()})


def _find(word: EnvironmentWord, specs: Sequence[pb.EnvironmentSpec]) -> pb.EnvironmentSpec:
    """Return the spec of the environment among those that its server hosts. Raises ConfigError."""
    ids = sorted({spec.id for spec in specs})
    if not word.id and len(ids) > 1:
        example = f"{word.source}{'/' if word.addresses else ':'}{ids[0]}"
        advice = "name one" if word.family else f"say which, as in {example}"
        raise ConfigError(f"{word.source} holds {' and '.join(ids)}: {advice}")
    try:
        return find_environment(specs, word.id)
    except click.BadParameter as error:
        raise ConfigError(f"{word.source}: {error.message}") from None


@dataclass(frozen=True, slots=True)
class Explored:
    """An environment and its test episodes."""

    spec: pb.EnvironmentSpec
    demonstrations: list[Demonstration]
    seconds: float
    """Duration of the test episodes."""

    def to_json(self) -> dict[str, Any]:
        """Return JSON values. `from_json` is the inverse."""
        spec = base64.b64encode(self.spec.SerializeToString()).decode()
        demos = [[demo.episode.to_json(), asdict(demo.limits), demo.imitate] for demo in self.demonstrations]
        return {"spec": spec, "seconds": self.seconds, "demonstrations": demos}

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Explored:
        """Raises LookupError, TypeError and ValueError for other values."""
        spec = pb.EnvironmentSpec.FromString(base64.b64decode(values["spec"]))
        demos = [
            Demonstration(Episode.from_json(episode), Limits(**limits), imitate)
            for episode, limits, imitate in values["demonstrations"]
        ]
        return cls(spec, demos, values["seconds"])


def choose_job(source: str, complete: Complete, report: Callable[[str], None] = lambda _: None) -> Job:
    """Return the job for an environment: see EnvironmentWord.

    The configuration is checked first. Then some episodes are played, by the expert if there is one, with the options
    of the user. Those of a file are cached until it changes.

    Args:
        source: The environment.
        complete: See `Complete`.
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
    cache = _cache_file(word, draft)
    if (explored := _read_cache(cache)) is not None:
        _checked(word, complete, explored.spec)
    else:
        report(f"{word.source}: some episodes are played to choose sizes")
        try:
            with _serve(word, draft.environment) as environment:
                explored = asyncio.run(_explore(word, environment, complete, report))
        except ServiceRefused as error:
            raise ConfigError(error.stderr) from error
        except Unreachable as error:
            raise ConfigError(no_answer(word.source, str(error).removesuffix("."))) from error
        except BadArgument as error:
            raise ConfigError(str(error)) from error
        except (StarpodError, ServiceFailed) as error:
            raise ConfigError(f"{word.source} cannot be played: {error}") from error
        _write_cache(cache, explored)
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
        values = _values(word, spec, tiny=tiny, single_turn=single_turn)
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


async def _explore(
    word: EnvironmentWord, environment: EnvironmentConfig, complete: Complete, report: Callable[[str], None]
) -> Explored:
    """Play test episodes with each set of options that the run will use."""
    async with connect(environment) as fleet:
        spec = _find(word, await fleet.describe())
        draft = _checked(word, complete, spec)
        expert, own_limit = spec.capabilities.expert_action, spec.limits.max_turns
        most_turns = _MOST_EXPERT_TURNS if expert else _MOST_TURNS
        turns = draft.environment.max_turns or min(own_limit or most_turns, most_turns)
        config = WarmStartConfig(actions="expert" if expert else "random", noise=0.0)
        tasks = [
            replace(make_task(each, spec.action_space.names), limits=Limits(turns, 1), expert_moves_left=None)
            for each in _settings(draft)
        ]
        count, start_time = _EPISODES * len(tasks), perf_counter()
        demonstrations: list[Demonstration] = []
        player = "by its expert" if expert else "at random"
        report(f"{spec.id}: playing {count} episodes {player}")

        async def tell() -> None:
            while True:
                await asyncio.sleep(_REPORT_SECONDS)
                seconds = perf_counter() - start_time
                report(f"{spec.id}: {len(demonstrations)} of {count} episodes played after {seconds:.0f} s")

        telling = asyncio.create_task(tell())
        try:
            for task in tasks:
                await collect_demonstrations(fleet, config, task, range(_EPISODES), watch=demonstrations.append)
        finally:
            telling.cancel()
        demonstrations.sort(key=lambda demo: demo.episode.seed)
        return Explored(spec, demonstrations, perf_counter() - start_time)


def _settings(draft: Config) -> list[EnvironmentConfig]:
    """Return the environment with each set of options that the run uses, once each."""
    (task,) = draft.tasks
    settings: list[EnvironmentConfig] = []
    for environment in played_environments(draft, task):
        if all(environment.options != other.options for other in settings):
            settings.append(environment)
    return settings


# --- cache of test episodes ----------------------------------------------------------------------------------------


def _cache_file(word: EnvironmentWord, draft: Config) -> Path | None:
    """Return the place of a file's test episodes; None for another environment, which may change at any time.

    Its name is a digest of all that the episodes depend on: the file with its neighbours, which it may import, and the
    options and limits.
    """
    if word.path is None:
        return None
    digest = hashlib.sha256(f"{importlib.metadata.version('starpod')}\n{word.path}\n{word.name}\n".encode())
    for file in sorted((word.path if word.path.is_dir() else word.path.parent).glob("*.py")):
        digest.update(hashlib.sha256(file.read_bytes()).digest())
    settings = [[each.version, each.options, each.max_turns, *each.serve] for each in _settings(draft)]
    digest.update(json.dumps(settings, sort_keys=True).encode())
    folder = Path(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")) / "starpod" / "explored"
    return folder / f"{digest.hexdigest()}.json"


def _read_cache(file: Path | None) -> Explored | None:
    try:
        return None if file is None else Explored.from_json(json.loads(file.read_text(encoding="utf-8")))
    except (OSError, LookupError, TypeError, ValueError):  # there is none, or another version wrote it
        return None


def _write_cache(file: Path | None, explored: Explored) -> None:
    if file is None:
        return
    with suppress(OSError):  # without a cache, the episodes are played again
        file.parent.mkdir(parents=True, exist_ok=True)
        temporary = file.with_name(f".{os.getpid()}-{file.name}")
        temporary.write_text(json.dumps(explored.to_json()), encoding="utf-8")
        temporary.replace(file)
        for old in sorted(file.parent.glob("*.json"), key=lambda path: path.stat().st_mtime)[:-_MOST_CACHED]:
            old.unlink(missing_ok=True)


# --- sizes -----------------------------------------------------------------------------------------------------------


def _values(word: EnvironmentWord, spec: pb.EnvironmentSpec, *, tiny: bool, single_turn: bool) -> dict[str, Any]:
    """Return the values of a job that do not depend on test episodes."""
    expert, listed = spec.capabilities.expert_action, bool(spec.action_space.names or spec.capabilities.valid_actions)
    values: dict[str, Any] = {
        "title": f"{'A tiny policy' if tiny else 'A pretrained model'} learns {spec.title or spec.id}",
        "environment": {"id": spec.id, "max_actions_per_turn": 1, **_servers(word)},
        "prompt": {},
        "algorithm": {
            "preset": "starpo-s",
            "advantage": "grpo" if single_turn else "gigpo",
            "filter": {"value": 0.5},
            "filter_loss_scaling": "linear",
            "entropy_coefficient": 0.0,
        },
        "evaluation": {"every": 5, "reference": ["random"] * listed + ["expert"] * expert},
    }
    if not tiny:
        return {**values, "model": {"dtype": "auto"}, "stop": {"iterations": 100}}
    # Once most groups have equal rewards, the few others would take full steps, and one run fell from 98 % to 44 %.
    # With an entropy bonus of 0.005, that bonus then outweighed the task: replies exceeded their limit, and a run
    # fell from 98 % to 47 %. A critic's head on a policy that has seen no rewards explains nothing for as long as
    # these runs last, so turns are compared with others from the same state instead.
    return {
        **values,
        "model": {"tiny": {"phrases": True}},
        "prompt": {"thinking": False},
        "algorithm": {**values["algorithm"], "mini_batch_size": 8},
        # Without slower first iterations, the share of well-formed replies fell from 99.7 % to 95 % at this rate.
        "optimizer": {"lr": 0.001, "warmup_iterations": 5},
        "warm_start": _imitation(spec, 0.0),
        "evaluation": {**values["evaluation"], "episodes": 128},
        "stop": {"iterations": 100, "minutes": 3, "success": 0.99},
    }


def _imitation(spec: pb.EnvironmentSpec, seconds: float) -> dict[str, Any]:
    """Return the values of `warm_start` for a policy from scratch. seconds: duration of the test episodes."""
    values: dict[str, Any] = {"steps": 320, "lr": 0.003}
    if not spec.capabilities.expert_action:
        episodes, best = (500, 0.5) if seconds > _SLOW else (3000, 0.1)
        return {**values, "episodes": episodes, "best": best, "actions": "random", "noise": 0.0}
    # Random moves need a list of actions.
    noise = _NOISE if spec.action_space.names or spec.capabilities.valid_actions else 0.0
    return {**values, "episodes": 1000, "best": 0.5 if noise else 1.0, "noise": noise, "imitate_noise": True}


def _job(word: EnvironmentWord, explored: Explored, draft: Config) -> Job:
    spec, demonstrations, limit = explored.spec, explored.demonstrations, draft.environment.max_turns
    expert, cap = spec.capabilities.expert_action, limit or spec.limits.max_turns
    lengths = [len(demo.episode.turns) for demo in demonstrations]
    longest = max(lengths)
    # Allow twice the expert's turns, because a policy that is still learning takes detours.
    turns = max(min(2 * longest, _MOST_TURNS), longest)
    turns = limit or min(cap or turns, max(4, turns) if expert else turns if longest > 1 else 1)
    tiny = draft.model.name == TINY
    values = _values(word, spec, tiny=tiny, single_turn=turns == 1)
    sized, seconds = (_size_tiny if tiny else _size_pretrained)(draft, explored, turns)
    values = {
        key: {**section, **sized.get(key, {})} if isinstance(section, dict) else section
        for key, section in {**sized, **values}.items()
    }
    values["environment"]["max_turns"] = turns
    successes = [demo.episode.success for demo in demonstrations if demo.episode.success is not None]
    return Job(values, word.source, spec, tuple(lengths), sum(successes) if successes else None, seconds)


def _size_tiny(draft: Config, explored: Explored, turns: int) -> tuple[dict[str, Any], float | None]:
    """Return values for a policy from scratch, and its estimated seconds per episode."""
    spec, demonstrations = explored.spec, explored.demonstrations
    warm_start = _imitation(spec, explored.seconds)
    reply, turn, mean_turn = _tokens(draft, spec, demonstrations)
    episode = turns * mean_turn  # an untrained policy uses all turns
    prompt, tokens = _chosen_prompt(draft, spec, turn, _rounded(1.25 * turns * turn))
    size = draft.collect.group_size if "group_size" in draft.collect.model_fields_set else 8
    groups = min(max(int(_COLLECTED / (size * episode)), 8), 32)
    batch = min(max(int(_IMITATED / episode), 4), 64)
    steps = min(max(int(_IMITATED_IN_ALL / (batch * episode)), 80), warm_start["steps"])
    values = {
        "base": "tiny",
        "prompt": prompt,
        "sampling": {"max_reply_tokens": reply, "max_episode_tokens": tokens},
        "collect": {"groups": groups, "group_size": size},
        # Use one slot per episode. With fewer, half of all prompts were read again, and collecting took ten times as
        # long.
        "engine": {"slots": max(groups * size, EngineConfig.model_fields["slots"].default)},
        "warm_start": {**warm_start, "batch_size": batch, "steps": steps},
    }
    played_turns = sum(len(demo.episode.turns) for demo in demonstrations)
    return values, episode / _SPEED + explored.seconds / played_turns * turns


def _size_pretrained(draft: Config, explored: Explored, turns: int) -> tuple[dict[str, Any], None]:
    """Return values for a pretrained model, whose replies may reason."""
    from starpod.trainer.models.hf import load_tokenizer
    from starpod.trainer.prompts.template import Template

    spec, given = explored.spec, draft.sampling.model_fields_set
    template = Template(load_tokenizer(draft.model), prefill=draft.prompt.opening)
    writer = DemonstrationWriter(draft.warm_start, draft.prompt, tuple(spec.action_space.names), draft.script)
    played = [turn for demo in explored.demonstrations for turn in asyncio.run(writer.episode(demo, template, 0)).turns]
    longest = max(len(turn.reply) for turn in played)
    reply = draft.sampling.max_reply_tokens
    if "max_reply_tokens" not in given and not draft.prompt.thinking:
        reply = max(32, 2 * longest)
    first = max((len(turn.prompt) for turn in played if turn.fresh), default=0)
    turn = max((len(turn.prompt) for turn in played if not turn.fresh), default=first) + reply
    prompt, tokens = _chosen_prompt(draft, spec, turn, _rounded(first + 1.25 * turns * turn))
    small = draft.model.name in PACKAGED
    rate = 2e-5 if small else 1e-5 if draft.model.lora.rank else 1e-6
    values: dict[str, Any] = {
        "prompt": prompt,
        "sampling": {"max_reply_tokens": reply, "max_episode_tokens": max(tokens, first + turn)},
        "collect": {"groups": 8, "group_size": 8},
        "optimizer": {"lr": rate},
    }
    if small:  # a model of this size does not keep to the format unasked
        actions = "expert" if spec.capabilities.expert_action else "random"
        values["warm_start"] = {"steps": 40, "lr": 3e-5, "episodes": 640, "batch_size": 16, "actions": actions}
    return values, None


def _chosen_prompt(draft: Config, spec: pb.EnvironmentSpec, turn: int, whole: int) -> tuple[dict[str, Any], int]:
    """Return the keys of `prompt` that choose the context of a reply, and that context's number of tokens.

    Args:
        draft: The user's configuration, whose context is kept.
        turn: Tokens of the longest turn.
        whole: Tokens of the longest episode.
    """
    if "context" in draft.prompt.model_fields_set:
        return {}, whole
    if spec.capabilities.fully_observed and whole > _MOST_TOKENS:
        return {"context": {"kind": "single_turn", "window": 1}}, _rounded(1.5 * turn)
    if whole <= _MOST_CONTEXT:
        return {}, whole
    turns = max(2, _MOST_CONTEXT // turn)
    return {"context": {"kind": "split", "window": turns, "overlap": turns // 2}}, _rounded(1.25 * turns * turn)


def _tokens(draft: Config, spec: pb.EnvironmentSpec, demonstrations: Sequence[Demonstration]) -> tuple[int, int, float]:
    """Return numbers of tokens: a reply's limit, the longest turn with its reply, and the mean turn with its reply."""
    writer = DemonstrationWriter(draft.warm_start, draft.prompt, tuple(spec.action_space.names), draft.script)
    from starpod.trainer.models.tiny import train_tokenizer  # imports torch

    texts, size = asyncio.run(writer.texts(demonstrations)), TinyConfig().vocabulary
    # Limits are for text without phrases, because new texts may have none.
    words, phrases = train_tokenizer(texts, size=size), train_tokenizer(texts, size=size, phrases=True)
    turns = [turn for demo in demonstrations for turn in demo.episode.turns]
    replies = [writer.reply(turn) for turn in turns]
    reply = max(16, round(1.5 * max(len(words.encode(text)) for text in replies)))
    if "max_reply_tokens" in draft.sampling.model_fields_set:
        reply = draft.sampling.max_reply_tokens
    # In style full, a message also repeats the task and the limits.
    messages = [turn.observation for turn in turns] if draft.prompt.style == "compact" else texts
    longest = max(len(words.encode(text)) for text in messages) + reply + 8
    total = sum(len(phrases.encode(text)) for text in (*replies, *messages))
    return reply, longest, total / len(turns) + 3


def _rounded(tokens: float) -> int:
    """Round up to a multiple of 64."""
    return -int(-tokens // 64) * 64
