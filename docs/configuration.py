"""Writes docs/configuration.md from the sections of the configuration.

python docs/configuration.py
"""

from __future__ import annotations

import json
import types
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from starpod.trainer.algorithms.config import DEFAULT_PRESET, PRESETS, AlgorithmConfig
from starpod.trainer.config import Config
from starpod.trainer.section import Section

PAGE = Path(__file__).with_name("configuration.md")

HEAD = """\
# Configuration

Every key of `starpod train`, written from the code by `python docs/configuration.py`; a test compares them. See
[training.md](training.md#configurations) for how files and command lines are combined. The shipped configurations
change some defaults. Where a default is that of starpo-s, [other presets](algorithms.md#presets) differ. Other choices
follow the default; without them a value has the default's type, an integer for `1` and any number for `1.0`.
"""


def page() -> str:
    """The whole page."""
    presets = [dict(sections(Config(algorithm=AlgorithmConfig(preset=name)))) for name in PRESETS]
    tables = []
    for prefix, section in sections(Config()):
        differ = {name for name, value in section if any(getattr(other[prefix], name) != value for other in presets)}
        tables.append(table(prefix, section, differ - {"preset"}))
    return "\n".join([HEAD, *tables])


def sections(section: Section, prefix: str = "") -> Iterator[tuple[str, Section]]:
    """A section as it is by default and all below it, each with its dotted key, in the order of their fields."""
    yield prefix, section
    for name, value in section:
        if isinstance(value, Section):
            yield from sections(value, f"{prefix}.{name}" if prefix else name)


def table(prefix: str, section: Section, differ: Collection[str]) -> str:
    """One section: its heading, what it is, its own keys. Sections below it have tables of their own.

    differ: names of keys to which presets give different values.
    """
    rows = []
    for name, value in section:
        if not isinstance(value, Section):
            field = type(section).model_fields[name]
            cells = f"`{name}`", choices(field.annotation, value, name in differ), field.description or ""
            rows.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    title = f"{'##' if '.' not in prefix else '###'} {prefix or 'Top level'}"
    about = " ".join((type(section).__doc__ or "").partition("\n\n")[0].split())
    head = ["| Key | Default | Meaning |", "|---|---|---|"] if rows else []
    return "\n".join([title, "", about, "", *head, *rows, *([""] if rows else [])])


def choices(annotation: Any, default: Any, differs: bool) -> str:
    """A default, and after it what else may be given, where there is a choice."""
    shown = show(default) + (f" in {DEFAULT_PRESET}" if differs else "")
    found = kinds(annotation)
    others = [kind for kind in found if kind not in (show(default), *kinds(type(default)))] if len(found) > 1 else []
    return "; ".join([shown, *([", ".join(others)] if others else [])])


def kinds(annotation: Any) -> list[str]:
    """Describes the values that a type accepts."""
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return kinds(arguments[0])
    if origin is Literal:
        return [f"`{value}`" for value in arguments]
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
    return [{bool: "boolean", int: "integer", float: "number", str: "text", type(None): "`null`"}[annotation]]


def show(value: Any) -> str:
    """As YAML takes it. A float has a point or an exponent."""
    if isinstance(value, float):
        text = f"{value:g}"
        return f"`{text}`" if {".", "e"} & set(text) else f"`{text}.0`"
    return f"`{value}`" if isinstance(value, str) and value else f"`{json.dumps(value)}`"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
