"""`starpod train --keys`: the configuration's keys, printed from its sections."""

from __future__ import annotations

import json
import types
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import click

from starpod.trainer.algorithms.config import DEFAULT_PRESET, AlgorithmConfig
from starpod.trainer.configuration.config import Config
from starpod.trainer.configuration.kinds import kinds_of
from starpod.trainer.configuration.section import ConfigError, Section, packaged_configs
from starpod.v1.spelling import near, nearest


def explain(dotted_name: str = "") -> str:
    """Return a description of configuration keys: their meaning, default and choices.

    dotted_name: dotted name of a key or a section; "" describes all keys. Raises ConfigError if there is no such key.
    """
    formatter = click.HelpFormatter(max_width=120)
    presets = [
        {(prefix, type(section)): section for prefix, section in sections(AlgorithmConfig(preset=name), "algorithm")}
        for name in packaged_configs(AlgorithmConfig.BASES)
    ]
    known_keys: list[str] = []
    introductions: dict[tuple[str, type[Section]], str] = {}
    for prefix, section in sections(Config()):
        rows = []
        for name in own_keys(section):
            field, value = type(section).model_fields[name], own_value(section, name)
            key = f"{prefix}.{name}".lstrip(".")
            known_keys += [key, prefix] if prefix else [key]
            classes = kinds.classes if (kinds := kinds_of(field)) else {}
            for kind in classes.values():
                kind_names = " or ".join(each for each in classes if classes[each] is kind)
                introductions[key, kind] = f"{key}={kind_names}: "
            if isinstance(value, Section) and field.description:
                introductions[key, type(value)] = f"{key}: {field.description} "
            if isinstance(value, Section) or not f"{key}.".startswith(f"{dotted_name}.".lstrip(".")):
                continue
            differs = name != "preset" and any(
                own_value(preset.get((prefix, type(section)), section), name) != value for preset in presets
            )
            is_required = field.is_required() and value == ""
            default = (
                "required" if is_required else choices(field.annotation, value, differs, [*classes] or field.examples)
            )
            rows.append((key, f"{field.description} [{default}]"))
        if rows:
            introduction = introductions.get((prefix, type(section)), f"{prefix}: " if prefix else "")
            description = introduction + " ".join((type(section).__doc__ or "").partition("\n\n")[0].split())
            formatter.write_text(description)
            with formatter.indentation():
                formatter.write_dl(rows, col_max=42)
            formatter.write_paragraph()
    if not (text := formatter.getvalue()):
        same_ending = [key for key in known_keys if key.endswith(f".{dotted_name}")]
        outermost = [key.partition(".")[0] for key in known_keys]
        names = same_ending or (known_keys if near(dotted_name, known_keys) else outermost)
        advice = nearest(dotted_name, list(dict.fromkeys(names)))
        raise ConfigError(
            f"no key {dotted_name!r}{advice}{';' * (advice[-1] != '?')} `starpod train --keys` prints all"
        )
    return text


def sections(section: Section, prefix: str = "") -> Iterator[tuple[str, Section]]:
    """Yield (dotted key, section) for a section and all sections below it, in field order.

    All kinds of a section are yielded. Sections whose names the user chooses are represented by one default section
    named NAME. The sections in a list are represented by one named [].
    """
    yield prefix, section
    for name, value in section:
        key, field = f"{prefix}.{name}".lstrip("."), type(section).model_fields[name]
        if kinds := kinds_of(field):
            for kind in dict.fromkeys(kinds.classes.values()):
                yield from sections(value if type(value) is kind else default_of(kind), key)
        elif isinstance(value, Section):
            yield from sections(value, key)
        for kind in get_args(field.annotation):
            if isinstance(value, dict | tuple) and isinstance(kind, type) and issubclass(kind, Section):
                yield from sections(default_of(kind), f"{key}.NAME" if isinstance(value, dict) else f"{key}[]")


def default_of(kind: type[Section]) -> Section:
    """Return a section with default values, and "" for keys without a default."""
    required: dict[str, Any] = {name: "" for name, field in kind.model_fields.items() if field.is_required()}
    return kind.model_construct(**required)


def own_keys(section: Section) -> list[str]:
    """Return the keys to list under a section. The key that names its kind is listed with the section above."""
    fields = type(section).model_fields
    return [name for name in fields if fields[name].description or isinstance(getattr(section, name), Section)]


def own_value(section: Section, name: str) -> Any:
    """Return the value of a key; for a section with several kinds, the name of its kind."""
    value = getattr(section, name)
    kinds = kinds_of(type(section).model_fields[name])
    return kinds.name_of(value) if kinds else value


def choices(annotation: Any, default: Any, differs: bool, named: Sequence[str] | None = None) -> str:
    """Return a text with a key's default and, if there is a choice, its other possible values.

    differs: whether the default depends on the preset. named: the possible values; None derives them from the type.
    """
    text = show(default) + (f" in {DEFAULT_PRESET}" if differs else "")
    names = list(named or types_of(annotation))
    others = [kind for kind in names if kind not in (show(default), *types_of(type(default)))] if len(names) > 1 else []
    return "; ".join([f"default: {text}", *([f"or {', '.join(others)}"] if others else [])])


def types_of(annotation: Any) -> list[str]:
    """Return descriptions of the values that a type accepts."""
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return types_of(arguments[0])
    if origin is Literal:
        return [str(value) for value in arguments]
    if origin in (Union, types.UnionType):
        return [kind for argument in arguments for kind in types_of(argument)]
    if origin is tuple:
        return [f"list of {types_of(arguments[0])[0]}s"]
    if (
        annotation in (dict, tuple)
        or origin is dict
        or (isinstance(annotation, type) and issubclass(annotation, Section))
    ):
        return ["mapping"]
    return [{bool: "boolean", int: "integer", float: "number", str: "text", type(None): "null"}[annotation]]


def show(value: Any) -> str:
    """Return the value as YAML. A float has a point or an exponent."""
    if isinstance(value, float):
        text = f"{value:g}"
        return text if {".", "e"} & set(text) else f"{text}.0"
    return value if isinstance(value, str) and value else json.dumps(value)


def annotate(values: Mapping[str, Any], origins: Mapping[str, str], above: str = "") -> Iterator[str]:
    """Yield the lines of a configuration as YAML, with comments on where the values come from.

    Args:
        origins: Origin of each value that was set, by dotted key.
        above: Dotted key of the section; "": the whole configuration.
    """
    from starpod.trainer.configuration.yaml12 import dump_yaml

    for key, value in values.items():
        place = f"{above}.{key}".lstrip(".")
        if isinstance(value, Mapping) and value:
            yield dump_yaml({key: {}}).replace(": {}\n", ":")
            yield from (f"  {line}" for line in annotate(value, origins, place))
        else:
            first, *others = dump_yaml({key: value}).splitlines()
            comment = f"# {origins[place]}" if place in origins else ""
            yield from [comment] if comment and others else []
            yield f"{first}  {comment}" if comment and not others else first
            yield from others
