"""Reading of configurations: files over their bases, and `key=value` words over them."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, get_args, get_origin

from pydantic import ValidationError

from starpod.client.spelling import nearest
from starpod.trainer.algorithms.config import without_unused_keys
from starpod.trainer.configuration.config import Config
from starpod.trainer.configuration.rules import Case, refuse_broken
from starpod.trainer.configuration.section import ConfigError, packaged_configs
from starpod.trainer.configuration.stages import MAY_CHANGE, may_change
from starpod.trainer.configuration.strict_yaml import YamlError, load_yaml
from starpod.trainer.prompts.prompt import without_old_window
from starpod.v1.environment_word import EnvironmentWord, WordError, installed_ids

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
        config = Config.model_validate(values)
    except ValidationError as error:
        raise ConfigError("; ".join(_explain(item) for item in error.errors())) from None
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
    merged = copy.deepcopy({key: value for key, value in values.items() if key != "stages"})
    for key, value in sorted(settings.items(), key=lambda item: item[0].count(".")):
        if not may_change(key):
            raise ConfigError(f"{label}.set names {key}, which cannot differ between stages{nearest(key, MAY_CHANGE)}")
        try:
            _set(merged, key.split("."), value)
        except ConfigError as error:
            raise ConfigError(f"{label}.set: {error}") from None
    if isinstance(algorithm := merged.get("algorithm"), dict):
        merged["algorithm"] = _without_old_method(algorithm, _algorithm_keys(settings))
    try:
        stage = parse_config(merged)
    except ConfigError as error:
        raise ConfigError(f"{label}: {error}") from None
    kinds = [(item.algorithm.needs_critic, item.algorithm.value_heads) for item in (stage, config)]
    if kinds[0] != kinds[1]:
        raise ConfigError(
            f"{label}.set changes algorithm.advantage from {config.algorithm.advantage} to "
            f"{stage.algorithm.advantage}, which needs a different critic: choose one with the same critic"
        )
    return stage


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
