"""`starpod train --keys`: the configuration's keys, printed from its sections."""

from __future__ import annotations

import json
import types
from collections.abc import Iterator, Sequence
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import click
from pydantic.fields import FieldInfo

from starpod.client.spelling import near, nearest
from starpod.trainer.algorithms.config import DEFAULT_PRESET, METHODS, PRESETS, AlgorithmConfig
from starpod.trainer.configuration.config import Config
from starpod.trainer.configuration.section import ConfigError, Kinds, Section


def explain(dotted_name: str = "") -> str:
    """Return a description of configuration keys: their meaning, default and choices.

    dotted_name: dotted name of a key or a section; "" describes all keys. Raises ConfigError if there is no such key.
    """
    formatter = click.HelpFormatter(max_width=120)
    presets = [
        {(prefix, type(section)): section for prefix, section in sections(AlgorithmConfig(preset=name), "algorithm")}
        for name in PRESETS
    ]
    known_keys: list[str] = []
    for prefix, section in sections(Config()):
        rows = []
        for name in own_keys(section):
            field, value = type(section).model_fields[name], getattr(section, name)
            key = f"{prefix}.{name}".lstrip(".")
            known_keys += [key, prefix] if prefix else [key]
            if isinstance(value, Section) or not f"{key}.".startswith(f"{dotted_name}.".lstrip(".")):
                continue
            differs = name != "preset" and any(
                getattr(preset.get((prefix, type(section)), section), name) != value for preset in presets
            )
            default = "required" if field.is_required() else choices(field.annotation, value, differs, field.examples)
            rows.append((key, f"{field.description} [{default}]"))
        if rows:
            description = " ".join((type(section).__doc__ or "").partition("\n\n")[0].split())
            formatter.write_text(f"{prefix}: {description}" if prefix else description)
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

    Sections whose names the user chooses are represented by one default section named NAME. The sections in a list are
    represented by one named [].
    """
    yield prefix, section
    if isinstance(section, AlgorithmConfig):
        for method in METHODS:
            config = next((part for part in (section.estimator, section.objective) if isinstance(part, method)), None)
            values = {name: getattr(config, name) for name in method.model_fields} if config else {}
            yield from sections(method.model_construct(**values), prefix)
    for name, value in section:
        key = f"{prefix}.{name}".lstrip(".")
        if isinstance(value, Kinds):
            root = type(section).model_fields[name].annotation
            for kind in root.kinds() if root else ():
                yield from sections(value if type(value) is kind else kind(), key)
        elif isinstance(value, Section):
            yield from sections(value, key)
        kind = get_args(type(section).model_fields[name].annotation)
        if isinstance(value, dict) and issubclass(kind[1], Section):
            required = {field_name: "" for field_name, field in kind[1].model_fields.items() if field.is_required()}
            yield f"{key}.NAME", kind[1](**required)
        if isinstance(value, tuple) and isinstance(kind[0], type) and issubclass(kind[0], Section):
            yield f"{key}[]", kind[0]()


def own_keys(section: Section) -> list[str]:
    """Return the keys to list under a section. Keys that it inherits with the same default are omitted."""
    bases = [base for base in type(section).__bases__ if issubclass(base, Section)]
    return [
        name
        for name, field in type(section).model_fields.items()
        if name != getattr(section, "KIND", "") or "KIND" in vars(type(section))
        if field.is_required() or not any(_same(field, base.model_fields.get(name)) for base in bases)
    ]


def _same(field: FieldInfo, other: FieldInfo | None) -> bool:
    return other is not None and field.default == other.default


def choices(annotation: Any, default: Any, differs: bool, named: Sequence[str] | None = None) -> str:
    """Return a text with a key's default and, if there is a choice, its other possible values.

    differs: whether the default depends on the preset. named: the possible values; None derives them from the type.
    """
    text = show(default) + (f" in {DEFAULT_PRESET}" if differs else "")
    names = list(named or kinds(annotation))
    others = [kind for kind in names if kind not in (show(default), *kinds(type(default)))] if len(names) > 1 else []
    return "; ".join([f"default: {text}", *([f"or {', '.join(others)}"] if others else [])])


def kinds(annotation: Any) -> list[str]:
    """Return descriptions of the values that a type accepts."""
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return kinds(arguments[0])
    if origin is Literal:
        return [str(value) for value in arguments]
    if origin in (Union, types.UnionType):
        return [kind for argument in arguments for kind in kinds(argument)]
    if origin is tuple:
        return [f"list of {kinds(arguments[0])[0]}s"]
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
