"""Reading of configurations: files over their bases, and `key=value` words over them."""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from starpod.trainer.algorithms.config import DEFAULT_PRESET
from starpod.trainer.configuration.case import Case
from starpod.trainer.configuration.config import Config
from starpod.trainer.configuration.layers import Layers, kind_below, read_values
from starpod.trainer.configuration.mistakes import explain
from starpod.trainer.configuration.rules import refuse_broken
from starpod.trainer.configuration.section import ConfigError, packaged_configs
from starpod.trainer.configuration.stages import MAY_CHANGE, may_change
from starpod.trainer.configuration.yaml12 import YamlError, load_yaml
from starpod.v1.environment_word import TASK_FILES, TASKS, EnvironmentWord, WordError, installed_ids
from starpod.v1.spelling import nearest

Complete = Callable[[Mapping[str, Any]], Config]
"""Function that merges the user's files and words over values, and parses the result. Raises ConfigError."""
Explore = Callable[[str, Complete], Mapping[str, Any]]
"""Function that chooses values for the environment that a word names. `complete` shows what the user makes of them."""


def names_environment(source: str) -> bool:
    """Return whether a source is an environment's word, and not a YAML file or a configuration of the package."""
    prefix, path = re.split("[:?]", source, maxsplit=1)[0], Path(source)
    if source in packaged_configs() or path.suffix in (".yaml", ".yml"):
        return False
    try:
        word = EnvironmentWord.parse(source)
    except WordError:
        return "=" not in prefix and (":" in source or prefix.endswith((".py", *TASK_FILES)))
    if os.path.isfile(source) and not (word.path or word.family):
        return False
    return word.id != source or any(source in (id, id.rpartition("-v")[0]) for id in installed_ids())


def load_config(source: str, words: Sequence[str] = ()) -> Config:
    """Return the configuration that `read_config` reads."""
    return read_config(source, words)[0]


def read_config(
    source: str, words: Sequence[str] = (), *, explore: Explore | None = None
) -> tuple[Config, dict[str, str]]:
    """Read a configuration, and where the value of each key that was set comes from, by dotted key.

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
    environment, files = read_files(source)

    def merge(first: Mapping[str, Any]) -> Layers:
        base, own = first.get("base"), {key: value for key, value in first.items() if key != "base"}
        layers = Layers(Config)
        layers.add("default", {"algorithm": DEFAULT_PRESET})
        chosen = [*(read_files(str(base))[1] if base else ()), (f"chosen for {environment}", own)]
        for number, (name, values) in enumerate([*chosen, *files], start=1):
            layers.add(name if number == len(chosen) + len(files) or values is own else f"base {name}", values)
        layers.add_words("command line", {key: _value(key, text) for key, text in texts.items()})
        return layers

    if environment and explore is None:
        raise ConfigError(f"{source} is an environment: name a YAML file, or use `starpod train {shlex.quote(source)}`")
    job = explore(environment, lambda first: parse_config(merge(first).values)) if environment and explore else {}
    layers = merge(job)
    return parse_config(layers.values), layers.origins


def _value(key: str, text: str) -> Any:
    """Parse the value of `key=` as YAML. For a key that takes text, this is only done to quoted text.

    Raises ConfigError.
    """
    kind: Any = Config
    for part in key.split("."):
        kind = kind_below(kind, part)
    wants_text = kind is str or (kind == str | None and text not in ("", "null", "~"))
    if wants_text and not text.startswith(("'", '"')):
        return text  # YAML would cut it at a comment
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
        config = Config.model_validate(values)
    except ValidationError as error:
        raise ConfigError(explain(Config, error)) from None
    if config.model.dtype == "auto":
        from starpod.trainer.models.precision import fast_dtype  # imports torch

        # Resolve "auto" here, so that the run folder records the dtype.
        config = config.model_copy(update={"model": config.model.in_dtype(fast_dtype(config.device))})
    for task in config.tasks:
        refuse_broken(Case(config, task))
    return config.with_stages([_stage(config, values, number) for number in range(len(config.stages))])


def _stage(config: Config, values: Mapping[str, Any], number: int) -> Config:
    """Return the whole configuration of a stage. values: the run's values as given. Raises ConfigError."""
    settings, until = config.stages[number].set, config.stages[number].until
    label = f"stages[{number}]"
    if problem := until.problem():
        raise ConfigError(f"{label} {problem}")
    ends = [stage.until.iteration for stage in config.stages[:number] if stage.until.iteration is not None]
    if until.iteration is not None and ends and until.iteration <= ends[-1]:
        raise ConfigError(
            f"{label}.until.iteration {until.iteration} must be above that of an earlier stage, {ends[-1]}"
        )
    layers = Layers(Config)
    layers.add("", {"algorithm": DEFAULT_PRESET})
    layers.add("", {key: value for key, value in values.items() if key != "stages"})
    for key in settings:
        if not may_change(key):
            raise ConfigError(f"{label}.set names {key}, which cannot differ between stages{nearest(key, MAY_CHANGE)}")
    try:
        layers.add_words("", settings)
        stage = parse_config(layers.values)
    except ConfigError as error:
        raise ConfigError(f"{label}: {error}") from None
    kinds = [(item.algorithm.needs_critic, item.algorithm.value_heads) for item in (stage, config)]
    if kinds[0] != kinds[1]:
        raise ConfigError(
            f"{label}.set changes algorithm.advantage from {config.algorithm.advantage.kind} to "
            f"{stage.algorithm.advantage.kind}, which needs a different critic: choose one with the same critic"
        )
    return stage


def read_files(source: str, visited: tuple[str, ...] = ()) -> tuple[str, list[tuple[str, dict[str, Any]]]]:
    """Return the environment that a source is based on, or "", and its files with their values, bases first."""
    if names_environment(source):
        return source, []
    paths = packaged_configs()
    path = paths.get(source, Path(source))
    try:
        values = read_values(path)
    except FileNotFoundError:
        raise ConfigError(
            f"no configuration {source!r}{nearest(source, list(paths))} (a YAML file of your own works, too)"
        ) from None
    name, base = source if source in paths else str(path), values.pop("base", None)
    if base is None:
        return "", [(name, values)]
    base = str(base)
    family = f"{TASKS}:" if base.startswith(f"{TASKS}:") else ""
    file, question_mark, settings = base.removeprefix(family).partition("?")
    is_file = family or file.partition(":")[0].endswith((".py", *TASK_FILES)) or not names_environment(base)
    if base not in paths and is_file:
        base = f"{family}{path.parent / file}{question_mark}{settings}"
    if base in (*visited, source):
        raise ConfigError(f"{path}: base {base!r} leads back to this file")
    environment, files = read_files(base, (*visited, source))
    return environment, [*files, (name, values)]
