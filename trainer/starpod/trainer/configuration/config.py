"""The configuration of a run: one frozen, validated tree from YAML files and `key=value` words."""

from __future__ import annotations

import copy
import functools
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, get_args, get_origin

from pydantic import (
    Field,
    ModelWrapValidatorHandler,
    PrivateAttr,
    SerializeAsAny,
    ValidationError,
    field_validator,
    model_validator,
)

from starpod.client.spelling import nearest
from starpod.trainer.agents.config import SamplingConfig, ScriptConfig
from starpod.trainer.algorithms.config import AlgorithmConfig, without_unused_keys
from starpod.trainer.algorithms.terms import PROCESS
from starpod.trainer.checkpoints.config import CheckpointConfig
from starpod.trainer.configuration.optimizer import OptimizerConfig
from starpod.trainer.configuration.section import ConfigError as ConfigError
from starpod.trainer.configuration.section import Section, packaged_configs
from starpod.trainer.configuration.seeds import PURPOSES, SeedsConfig
from starpod.trainer.configuration.stages import MAY_CHANGE, StageConfig, difference, may_change
from starpod.trainer.configuration.strict_yaml import YamlError, load_yaml
from starpod.trainer.configuration.tasks import MixedEnvironment, TaskConfig, merged
from starpod.trainer.data.replay import ReplayConfig
from starpod.trainer.diagnostics.config import MonitorConfig
from starpod.trainer.engines.config import EngineConfig
from starpod.trainer.evaluation.config import EvaluationConfig
from starpod.trainer.models.config import TINY, ModelConfig
from starpod.trainer.prompts.prompt import PromptConfig, without_old_window
from starpod.trainer.rewards.reward import RewardConfig
from starpod.trainer.rollout.config import CollectConfig, EnvironmentConfig
from starpod.trainer.scorers.config import ScorerConfig
from starpod.trainer.warm_start.config import WarmStartConfig
from starpod.v1.environment_word import EnvironmentWord, WordError, installed_ids


class StopConfig(Section):
    """Conditions that end a run; the first one that is met counts."""

    iterations: int = Field(default=200, ge=0, description="Iterations: collection and updates.")
    minutes: float | None = Field(
        default=None, gt=0, description="Minutes of training, counted from the first iteration; null: no limit."
    )
    tokens: int | None = Field(
        default=None, ge=1, description="Tokens sampled in training, including those of a search; null: no limit."
    )
    success: float | None = Field(
        default=None, gt=0, le=1, description="Success at which an evaluation ends the run; null: never."
    )


class Config(Section):
    """The configuration of a run."""

    title: str = Field(default="", description="Title of the report.")
    seed: int = Field(default=1, ge=0, description="Seed of every random stream.")
    threads: int = Field(default=1, ge=1, description="CPU threads of torch; services share the cores.")
    device: str = Field(default="auto", description="cpu, cuda, cuda:1, ...; auto: the GPU if there is one.")
    seeds: SeedsConfig = SeedsConfig()
    environment: EnvironmentConfig = EnvironmentConfig()
    environments: dict[str, MixedEnvironment] = Field(
        default={}, description="Several environments under names of your choice, instead of `environment`."
    )
    prompt: PromptConfig = PromptConfig()
    sampling: SamplingConfig = SamplingConfig()
    script: ScriptConfig = ScriptConfig()
    collect: CollectConfig = CollectConfig()
    model: ModelConfig = ModelConfig()
    engine: EngineConfig = EngineConfig()
    algorithm: AlgorithmConfig = AlgorithmConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    rewards: RewardConfig = RewardConfig()
    scorer: SerializeAsAny[ScorerConfig] = ScorerConfig()
    replay: ReplayConfig = ReplayConfig()
    warm_start: WarmStartConfig = WarmStartConfig()
    evaluation: EvaluationConfig = EvaluationConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    monitor: MonitorConfig = MonitorConfig()
    stop: StopConfig = StopConfig()
    stages: tuple[StageConfig, ...] = Field(
        default=(),
        description="Stages with other settings, in order. After the last one, the configuration itself applies.",
    )
    _in_stages: tuple[Config, ...] = PrivateAttr(default=())

    @field_validator("device")
    @classmethod
    def _known_device(cls, device: str) -> str:
        if not re.fullmatch(r"auto|cpu|cuda(:\d+)?", device):
            raise ValueError(f"{device!r} is not supported; give auto, cpu, cuda, or cuda:0 and so on")
        return device

    @model_validator(mode="wrap")
    @classmethod
    def _with_stages(cls, values: Any, handler: ModelWrapValidatorHandler[Config]) -> Config:
        config = handler(values)
        if config.model.dtype == "auto":
            from starpod.trainer.models.precision import fast_dtype  # imports torch

            # Resolve "auto" here, so that the run folder records the dtype.
            config = config.model_copy(update={"model": config.model.in_dtype(fast_dtype(config.device))})
        if config.stages and isinstance(values, Mapping):
            config._in_stages = tuple(_stage(config, values, number) for number in range(len(config.stages)))
        return config

    @model_validator(mode="after")
    def _fits_together(self) -> Config:
        size = self.collect.group_size
        if self.algorithm.credit_terms and size < 2:
            raise ValueError(
                f"algorithm.advantage {self.algorithm.advantage} compares the members of a group; "
                "set collect.group_size to at least 2"
            )
        bound = self.collect.max_staleness
        if 0 < bound < self.replay.reuse:
            raise ValueError(
                f"collect.max_staleness {bound} is less than replay.reuse {self.replay.reuse}: each collection "
                "raises the policy version by that much, so no collection could begin early; raise max_staleness, "
                "or set it to 0"
            )
        if bound and self.replay.offline:
            raise ValueError(
                f"collect.max_staleness {bound} lets episodes continue during updates, but replay.offline collects "
                "none: drop one of them"
            )
        if bound and self.engine.sleep:
            raise ValueError(
                f"collect.max_staleness {bound} samples during updates, but engine.sleep gives updates the GPU: drop "
                "one of them"
            )
        strategy = self.collect.search.strategy
        for key in ("expert_moves_left", "starts"):
            if strategy != "none" and any(getattr(task.environment, key) for task in self.tasks):
                raise ValueError(
                    f"collect.search.strategy {strategy} begins at the environment's start states, but "
                    f"environment.{key} at others: drop one of them"
                )
        if self.algorithm.order != "together" and strategy not in ("none", "best_of"):
            raise ValueError(
                f"algorithm.order {self.algorithm.order} takes a step for each turn of whole episodes, but "
                f"collect.search.strategy {strategy} gives branches: set it to none or best_of, or order to together"
            )
        terms = self.algorithm.credit_terms
        gains, trees = any(term.score == "gain" for term in terms), any("tree" in term.key for term in terms)
        if gains != (strategy == "values"):
            raise ValueError(
                f"collect.search.strategy {strategy} does not go with algorithm.advantage "
                f"{self.algorithm.advantage}: only vineppo and terms with score gain use values of states, and they "
                "need them"
            )
        if trees and strategy != "tree":
            raise ValueError(
                f"algorithm.advantage {self.algorithm.advantage} compares the episodes of a tree, but there are no "
                "trees: set collect.search.strategy to tree"
            )
        for term in self.algorithm.credit_terms:
            if term.min_peers > (term.most_peers(size) or term.min_peers):
                raise ValueError(
                    f"algorithm.advantage {self.algorithm.advantage} needs at least {term.min_peers} peers, but "
                    f"groups have {size}: set collect.group_size to at least {term.min_peers}"
                )
        filter_config = self.algorithm.filter
        compares = filter_config.strategy != "none" or self.algorithm.dynamic_sampling.enabled
        if self.collect.group_size < 2 and compares:
            raise ValueError(
                "algorithm.filter and algorithm.dynamic_sampling choose groups by how their members differ, so they "
                "would drop every group of one; set collect.group_size to at least 2, or set algorithm.filter.strategy "
                "to none"
            )
        if (self.optimizer.schedule_iterations or self.stop.iterations) < self.stop.iterations:
            raise ValueError(
                f"optimizer.schedule_iterations {self.optimizer.schedule_iterations} is less than stop.iterations "
                f"{self.stop.iterations}: later updates would have a rate of 0"
            )
        for purpose in PURPOSES:
            self.seeds.held_out(purpose, self.evaluation.episodes)
        return self

    @model_validator(mode="after")
    def _one_form_of_environments(self) -> Config:
        if not self.environments:
            return self
        if self.environment != EnvironmentConfig():
            raise ValueError(
                "environment and environments are both given: environment is for runs with a single one; move it to "
                "environments.NAME"
            )
        if self.evaluation.options:
            raise ValueError(
                "evaluation.options is for runs with one environment: with several, give "
                "environments.NAME.evaluation.options"
            )
        for name in self.environments:
            if not re.fullmatch(r"[a-z0-9][a-z0-9_-]*", name):
                raise ValueError(
                    f"environments.{name}: the name is used in metrics and on the command line; write it in "
                    "lower-case letters, digits, _ and -"
                )
        for task in self.tasks:
            for purpose in PURPOSES:
                self.seeds.held_out(purpose, task.evaluation.episodes)
        return self

    @model_validator(mode="after")
    def _script_is_followed(self) -> Config:
        name, search = self.script.name, self.collect.search.strategy
        if name != "solo" and search != "none":
            raise ValueError(f"collect.search.strategy {search} is for episodes of one agent: set script to solo")
        if name != "solo" and self.collect.agent.command:
            raise ValueError(f"script {name} decides who speaks, but a program plays alone: drop collect.agent.command")
        if name == "attempts" and any(task.environment.expert_moves_left for task in self.tasks):
            raise ValueError("script attempts begins at a start state: drop environment.expert_moves_left")
        for key, script in (
            ("verdict", "solver_verifier"),
            ("improvement", "attempts"),
            ("zero_sum", "self_play"),
        ):
            if name != script and any(getattr(task.rewards, key) for task in self.tasks):
                raise ValueError(f"rewards.{key} belongs to {script}, and script.name is {name}: set it, or drop it")
        terms = self.algorithm.credit_terms
        over_all_agents = self.algorithm.needs_critic or any(term.score not in ("reward", "met") for term in terms)
        if over_all_agents and any(task.rewards.zero_sum for task in self.tasks):
            raise ValueError(
                "rewards.zero_sum makes the rewards of an episode cancel, but algorithm.advantage "
                f"{self.algorithm.advantage} adds up those of all agents, so that the winner's earlier moves earn "
                "nothing: set algorithm.advantage to attempts, or to terms with score reward, such as "
                "[{unit: agent, score: reward, key: [agent]}]"
            )
        return self

    @model_validator(mode="after")
    def _each_agent_can_have_a_policy(self) -> Config:
        if not self.script.policies:
            return self
        fact = "script.policies gives each agent a policy"
        if self.algorithm.needs_critic:
            raise ValueError(
                f"{fact}, but algorithm.advantage {self.algorithm.advantage} needs a critic, which these do not "
                "have: choose one without, such as dr_mas"
            )
        for key, value, setting in (
            ("engine.name", self.engine.name, "torch"),
            ("algorithm.order", self.algorithm.order, "together"),
            ("scorer.kind", self.scorer.kind, "off"),
            ("monitor.information.every", self.monitor.information.every, 0),
        ):
            if value != setting:
                raise ValueError(f"{fact}, but {key} {value} is for one policy: set it to {setting}")
        return self

    @model_validator(mode="after")
    def _images_are_seen(self) -> Config:
        observation = next((task.prompt.observation for task in self.tasks if task.prompt.shows_images), None)
        if observation is None:
            return self
        fact = f"prompt.observation {observation} shows images"
        if self.model.name == TINY and not self.model.tiny.image.rows:
            raise ValueError(
                f"{fact}, but the model has no image input: set model.tiny.image.rows and columns, or set "
                "prompt.observation to text"
            )
        for key, value, *options in (
            ("engine.name", self.engine.name, "torch", *(() if self.model.name == TINY else ("vllm",))),
            ("script.name", self.script.name, "solo"),
            ("algorithm.order", self.algorithm.order, "together"),
        ):
            if value not in options:
                raise ValueError(f"{fact}, but {key} {value} does not support them: set it to {' or '.join(options)}")
        if self.collect.agent.command:
            raise ValueError(f"{fact}, but programs do not see them: drop collect.agent.command")
        return self

    @model_validator(mode="after")
    def _replies_are_valued(self) -> Config:
        if self.evaluation.best_of > 1 and self.scorer.kind != "q":
            raise ValueError(
                f"evaluation.best_of {self.evaluation.best_of} chooses replies by their values, but scorer.kind is "
                f"{self.scorer.kind}: set scorer.kind to q, or evaluation.best_of to 1"
            )
        if self.evaluation.best_of > 1 and (self.script.name != "solo" or self.collect.agent.command):
            raise ValueError(
                "evaluation.best_of above 1 is for one agent without a program: drop it, or script and collect.agent"
            )
        return self

    @model_validator(mode="after")
    def _critic_is_weighed(self) -> Config:
        detached = self.model.detach_critic or self.model.critic == "separate"
        critic = self.algorithm.critic
        if critic and detached and critic.value_coefficient != type(critic).model_fields["value_coefficient"].default:
            raise ValueError(
                "algorithm.value_coefficient weighs the critic's loss against the policy's, but this critic shares "
                "no trained weights with the policy: drop it (optimizer.critic_lr sets how fast the critic learns), "
                "or set model.critic to shared and model.detach_critic to false"
            )
        return self

    @model_validator(mode="after")
    def _parts_are_paid(self) -> Config:
        parts = {name for term in self.algorithm.credit_terms for name in (*term.parts, *term.without, *term.strata)}
        for task in self.tasks if parts else ():
            if PROCESS in parts and self.scorer.kind == "off":
                raise ValueError(
                    f"algorithm.advantage {self.algorithm.advantage} scores the reward part {PROCESS}, which a turn "
                    "scorer pays, but there is no scorer: set scorer.kind to implicit or q"
                )
            if unpaid := sorted(parts - task.rewards.names - {PROCESS} - self.script.parts):
                raise ValueError(
                    f"algorithm.advantage {self.algorithm.advantage} scores the reward part {unpaid[0]}, which "
                    f"nothing pays{nearest(unpaid[0], sorted(task.rewards.names))}; a part is paid if "
                    f"rewards.{unpaid[0]} has a weight or a penalty, or if it is in rewards.shaping"
                )
        return self

    @model_validator(mode="after")
    def _blocks_are_asked_for(self) -> Config:
        for task in self.tasks:
            blocks = {*task.prompt.blocks, "answer", *(["think"] if task.prompt.thinking else [])}
            if missing := sorted(self.algorithm.blocks - blocks):
                advice = (
                    "set prompt.thinking to true" if missing[0] == "think" else f"add {missing[0]} to prompt.blocks"
                )
                raise ValueError(
                    f"algorithm.advantage {self.algorithm.advantage} credits the block {missing[0]}, which replies do "
                    f"not have: {advice}"
                )
            names = [block for block in ("description", "prediction") if getattr(task.rewards.relations, block)]
            if block := next((name for name in names if name not in blocks), None):
                raise ValueError(
                    f"rewards.relations.{block} pays for the block {block}, which replies do not have: add it to "
                    "prompt.blocks"
                )
            first = self.algorithm.estimator.first_blocks
            if task.prompt.blocks[: len(first)] != first:
                raise ValueError(
                    f"algorithm.advantage {self.algorithm.advantage} reads a reply as {', '.join(first)}, action: let "
                    f"prompt.blocks begin with [{', '.join(first)}]"
                )
        return self

    @property
    def tasks(self) -> tuple[TaskConfig, ...]:
        """Environments of the run in order, each with the sections that apply to it.

        Raises ValueError if a section of one environment among several is wrong.
        """
        if not self.environments:
            return (TaskConfig("", 1.0, self.environment, self.prompt, self.rewards, self.warm_start, self.evaluation),)
        return tuple(
            TaskConfig(
                name,
                environment.weight,
                environment,
                merged(self.prompt, name, "prompt", environment.prompt),
                merged(self.rewards, name, "rewards", environment.rewards),
                merged(self.warm_start, name, "warm_start", environment.warm_start),
                merged(self.evaluation, name, "evaluation", environment.evaluation),
            )
            for name, environment in self.environments.items()
        )

    @property
    def criteria_weights(self) -> dict[str, Mapping[str, float]]:
        """Weights of criteria by task name, which is "" in a run with one environment."""
        return {task.name: task.rewards.criteria.weights for task in self.tasks}

    @property
    def in_stages(self) -> tuple[Config, ...]:
        """Configuration of each stage in order, then the unchanged configuration that applies after the last stage."""
        return (*self._in_stages, self)

    @property
    def needs_reference(self) -> bool:
        """Whether any stage uses a frozen reference policy."""
        return any(stage.algorithm.needs_reference for stage in self.in_stages)

    @property
    def needs_state_key(self) -> bool:
        """Whether any stage needs the environments to send a digest of each state."""
        return any(stage.algorithm.needs_state_key for stage in self.in_stages)

    def to_dict(self) -> dict[str, Any]:
        """Return plain values, with either `environment` or `environments`, and with stages if there are any.

        The settings of a stage are written in full, including derived ones.
        """
        values = super().to_dict()
        for task in self.tasks if self.environments else ():
            differing = values["environments"][task.name]
            for name in ("prompt", "rewards", "warm_start"):
                differing[name] = _validated(differing[name], getattr(task, name).to_dict())
        del values["environment" if self.environments else "environments"]
        stages = values.pop("stages")
        if stages:
            values["stages"] = [
                {"until": section["until"], "set": difference(values, stage.to_dict())}
                for section, stage in zip(stages, self._in_stages, strict=True)
            ]
        return values


def _validated(given: Mapping[str, Any], section: Mapping[str, Any]) -> dict[str, Any]:
    """Return the given keys with their values in a validated section, whose paths are absolute."""
    found = {key: section.get(key, value) for key, value in given.items()}
    return {
        key: _validated(given[key], value) if isinstance(given[key], Mapping) and isinstance(value, Mapping) else value
        for key, value in found.items()
    }


def _stage(config: Config, values: Mapping[str, Any], number: int) -> Config:
    """Return the whole configuration of a stage. values: the run's values as given. Raises ValueError."""
    settings, until = config.stages[number].set, config.stages[number].until
    label = f"stages[{number}]"
    if problem := until.problem():
        raise ValueError(f"{label} {problem}")
    ends = [stage.until.iteration for stage in config.stages[:number] if stage.until.iteration is not None]
    if until.iteration is not None and ends and until.iteration <= ends[-1]:
        raise ValueError(
            f"{label}.until.iteration {until.iteration} must be above that of an earlier stage, {ends[-1]}"
        )
    merged = copy.deepcopy({key: value for key, value in values.items() if key != "stages"})
    for key, value in sorted(settings.items(), key=lambda item: item[0].count(".")):
        if not may_change(key):
            raise ValueError(f"{label}.set names {key}, which cannot differ between stages{nearest(key, MAY_CHANGE)}")
        try:
            _set(merged, key.split("."), value)
        except ConfigError as error:
            raise ValueError(f"{label}.set: {error}") from None
    if isinstance(algorithm := merged.get("algorithm"), dict):
        merged["algorithm"] = _without_old_method(algorithm, _algorithm_keys(settings))
    try:
        stage = parse_config(merged)
    except ConfigError as error:
        raise ValueError(f"{label}: {error}") from None
    kinds = [(item.algorithm.needs_critic, item.algorithm.value_heads) for item in (stage, config)]
    if kinds[0] != kinds[1]:
        raise ValueError(
            f"{label}.set changes algorithm.advantage from {config.algorithm.advantage} to "
            f"{stage.algorithm.advantage}, which needs a different critic: choose one with the same critic"
        )
    return stage


SHORTHANDS = {
    name: word for name, field in Config.model_fields.items() if (word := getattr(field.annotation, "SHORTHAND", ""))
}
"""Sections that may be given as one word, and the field that the word sets."""


Complete = Callable[[Mapping[str, Any]], Config]
"""Function that merges the user's files and words over values, and parses the result. Raises ConfigError."""
Explore = Callable[[str, Complete], Mapping[str, Any]]
"""Function that chooses values for the environment that a word names. `complete` shows what the user makes of them."""


def names_environment(source: str) -> bool:
    """Return whether a source is an environment's word, and not a YAML file or a configuration of the package."""
    prefix, path = source.partition(":")[0], Path(source)
    if source in packaged_configs() or path.suffix in (".yaml", ".yml") or (path.is_file() and path.suffix != ".py"):
        return False
    try:
        word = EnvironmentWord.parse(source)
    except WordError:
        return "=" not in prefix and (":" in source or prefix.endswith(".py"))
    return word.id != source or any(source in (id, id.rpartition("-v")[0]) for id in installed_ids())


def load_config(source: str, words: Sequence[str] = (), *, explore: Explore | None = None) -> Config:
    """Read a configuration.

    A file may extend another one with `base: NAME`, or with `base: FILE` relative to its own folder. A word that sets a
    whole section is applied before words that set its keys, regardless of their order.

    Args:
        source: A YAML file, the name of a configuration of the package, or an environment (see `names_environment`).
        words: Changes, as `key=value`.
        explore: Chooses a configuration for an environment; None: environments are refused.

    Raises:
        ConfigError: The configuration cannot be used.
    """
    texts: dict[str, str] = {}
    for word in words:
        key, equals, text = word.partition("=")
        if not equals or not key:
            raise ConfigError(f"{word!r} is not key=value, e.g. stop.iterations=50")
        if key in texts:
            raise ConfigError(f"{key} is given twice: {key}={texts[key]} and {word}")
        texts[key] = text
    environment, layers = _read(source)

    def complete(first: Mapping[str, Any]) -> Config:
        base, own = first.get("base"), {key: value for key, value in first.items() if key != "base"}
        values = copy.deepcopy(functools.reduce(_merge, [*(_read(str(base))[1] if base else ()), own, *layers]))
        if isinstance(prompt := values.get("prompt"), dict) and "prompt.context" in texts:
            values["prompt"] = without_old_window(prompt, texts["prompt.context"])
        for key in sorted(texts, key=lambda key: key.count(".")):
            _set(values, key.split("."), _value(key, texts[key]))
        if isinstance(algorithm := values.get("algorithm"), dict):
            values["algorithm"] = _without_old_method(algorithm, _algorithm_keys(texts))
        return parse_config(values)

    if environment and explore is None:
        raise ConfigError(f"{source} is an environment: name a YAML file, or use `starpod train {source}`")
    return complete(explore(environment, complete) if environment and explore else {})


def _algorithm_keys(keys: Iterable[str]) -> set[str]:
    """Return the keys of the section `algorithm` among these dotted keys: `filter` for `algorithm.filter.value`."""
    return {key.split(".")[1] for key in keys if key.startswith("algorithm.")}


def _without_old_method(algorithm: Mapping[str, Any], changed_keys: Collection[str]) -> dict[str, Any]:
    """Return the values of `algorithm` without keys of the old estimator or loss, if the changed keys choose another.

    The changed keys themselves are kept, so that a mistake in them is reported.
    """
    chooses = any(key in changed_keys for key in ("preset", "advantage", "loss"))
    return without_unused_keys(algorithm, changed_keys) if chooses else dict(algorithm)


def _value(key: str, text: str) -> Any:
    """Parse the value of `key=` as YAML, or as plain text if the key takes text. Raises ConfigError."""
    *sections, last = key.split(".")
    section = _section(sections)
    wants_text = section is not None and last in section.model_fields and section.model_fields[last].annotation is str
    try:
        value = load_yaml(text)
    except YamlError as error:
        if wants_text:
            return text
        raise ConfigError(f"{f'{key}={text}'!r}: the value is not YAML: {error}") from None
    return text if wants_text and not isinstance(value, str) else value


def parse_config(values: Mapping[str, Any]) -> Config:
    """Validate plain values. Raises ConfigError with one sentence per mistake."""
    try:
        return Config.model_validate(values)
    except ValidationError as error:
        raise ConfigError("; ".join(_explain(item) for item in error.errors())) from None


def _read(source: str, visited: tuple[str, ...] = ()) -> tuple[str, list[dict[str, Any]]]:
    """Return the environment that a source is based on, or "", and the values of its files, those of the base first."""
    if names_environment(source):
        return source, []
    paths = packaged_configs()
    path = paths.get(source, Path(source))
    try:
        values = load_yaml(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(
            f"no configuration {source!r}{nearest(source, list(paths))} (a YAML file of your own works, too)"
        ) from None
    except (OSError, UnicodeDecodeError, YamlError) as error:
        raise ConfigError(f"cannot read {path}: {error}") from None
    if not isinstance(values, dict):
        raise ConfigError(f"{path} does not contain keys and values")
    base = values.pop("base", None)
    if base is None:
        return "", [values]
    base = str(base)
    is_file = base.partition(":")[0].endswith(".py") or not names_environment(base)
    if base not in paths and is_file:
        base = str(path.parent / base)
    if base in (*visited, source):
        raise ConfigError(f"{path}: base {base!r} leads back to this file")
    environment, layers = _read(base, (*visited, source))
    return environment, [*layers, values]


def _merge(base: dict[str, Any], values: Mapping[str, Any]) -> dict[str, Any]:
    """Return `values` merged over `base`, section by section."""
    merged = dict(base)
    for key, value in values.items():
        if key in SHORTHANDS and isinstance(value, str):
            value = {SHORTHANDS[key]: value}
        old = merged.get(key)
        if isinstance(old, dict) and isinstance(value, Mapping):
            # Drop the changes to a preset if another preset is chosen.
            old = without_old_window(old, value.get("context")) if key == "prompt" else old
            another = key == "algorithm" and value.get("preset", old.get("preset")) != old.get("preset")
            if not another:
                joined = _merge(old, value)
                value = _without_old_method(joined, value) if key == "algorithm" else joined
        merged[key] = value
    return merged


def _set(values: dict[str, Any], keys: Sequence[str], value: Any) -> None:
    """Set `a.b.c` to a value, where `keys` are the parts of the dotted key."""
    name = ".".join(keys)
    for depth, key in enumerate(keys[:-1]):
        section = values.setdefault(key, {})
        if isinstance(section, str) and depth == 0 and key in SHORTHANDS:
            section = values[key] = {SHORTHANDS[key]: section}
        if not isinstance(section, dict):
            raise ConfigError(f"{name}: {'.'.join(keys[: depth + 1])} is not a section")
        values = section
    last = keys[-1]
    if len(keys) == 1 and last in SHORTHANDS and isinstance(value, str):
        # One word sets the section's main field and keeps its other keys, except for the algorithm: changes to one
        # preset make no sense in another.
        old = values.get(last)
        old_values = old if isinstance(old, dict) and last != "algorithm" else {}
        value = {**old_values, SHORTHANDS[last]: value}
    values[last] = value


def _explain(item: Any) -> str:
    """Return one of pydantic's errors as a sentence."""
    key = ".".join(str(part) for part in item["loc"])
    if item["type"] == "extra_forbidden":
        return f"no key {key!r}{nearest(str(item['loc'][-1]), _siblings(item['loc']))}"
    if item["type"] == "model_type":
        first, *_ = _section(item["loc"]).all_fields()
        return f"{key}: is a section of keys, such as {key}.{first}, and cannot be {item['input']!r}"
    message = item["msg"].removeprefix("Value error, ")
    suffix = "" if item["type"] == "value_error" or isinstance(item["input"], dict) else f", not {item['input']!r}"
    # Sections' own messages already name their keys.
    return f"{key}: {message}{suffix}" if key and f"{key}." not in message else f"{message}{suffix}"


def _siblings(place: Sequence[int | str]) -> list[str]:
    """Return the valid keys of the section that has an unknown key."""
    section = _section(place[:-1])
    return list(section.all_fields()) if section is not None else []


def _section(place: Sequence[int | str]) -> Any:
    """Return the class of the section at a place in the tree; None if there is none."""
    section: Any = Config
    for part in place:
        if (kind := get_origin(section)) in (dict, tuple):  # sections by name, or in a list
            section = get_args(section)[kind is dict]
            continue
        field = section.all_fields().get(str(part)) if hasattr(section, "all_fields") else None
        section = field.annotation if field is not None else None
    return section if hasattr(section, "model_fields") else None
