"""Layers of a configuration: values that are merged over others, section by section.

If values name another kind of a section than the layers below, or another base file, the keys of the old one go.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args, get_origin

from starpod.trainer.configuration.kinds import Kinds, kinds_of
from starpod.trainer.configuration.section import ConfigError, Section, packaged_configs
from starpod.trainer.configuration.yaml12 import YamlError, load_yaml
from starpod.v1.spelling import nearest


@dataclass(frozen=True, slots=True)
class ChangesTo:
    """Annotation of a mapping with some keys of a section."""

    section: type[Section]


def read_values(path: Path) -> dict[str, Any]:
    """Return the keys and values of a YAML file. Raises ConfigError, and FileNotFoundError if there is none."""
    try:
        values = load_yaml(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise
    except (OSError, UnicodeDecodeError, YamlError) as error:
        raise ConfigError(f"cannot read {path}: {error}") from None
    if not isinstance(values, dict):
        raise ConfigError(f"{path} does not contain keys and values")
    return values


def kind_below(kind: Any, key: object) -> Any:
    """Return what a key of a section holds: a section's class, Kinds, the type of a value, or None if unknown."""
    if (origin := get_origin(kind)) in (dict, tuple):  # sections by name, or in a list
        return get_args(kind)[origin is dict]
    classes = kind.classes.values() if isinstance(kind, Kinds) else [kind]
    fields = [fields[key] for each in classes if key in (fields := getattr(each, "model_fields", {}))]
    if not fields:
        return None
    changed = [note.section for note in fields[0].metadata if isinstance(note, ChangesTo)]
    return changed[0] if changed else kinds_of(fields[0]) or fields[0].annotation


def keys_of(kind: Any) -> list[str]:
    """Return the keys of a section, or of all kinds of a section."""
    classes = kind.classes.values() if isinstance(kind, Kinds) else [kind]
    return list(dict.fromkeys(key for each in classes for key in getattr(each, "model_fields", {})))


class Layers:
    """Values merged from layers, the lowest first.

    Attributes:
        values: The values, as plain mappings.
        origins: Where the value of each dotted key comes from.
    """

    def __init__(self, kind: Any) -> None:
        self._kind = kind
        self.values: dict[str, Any] = {}
        self.origins: dict[str, str] = {}

    def add(self, origin: str, values: Mapping[str, Any]) -> None:
        """Merge values over those of earlier layers. Raises ConfigError for an unknown base file of a section."""
        self.values = self._merge(self._kind, "", self.values, values, origin)

    def add_words(self, origin: str, words: Mapping[str, Any]) -> None:
        """Merge the values of dotted keys, in any order. A mapping replaces the whole section below.

        Raises ConfigError for an unknown base file, and for keys of something that is not a section.
        """
        layer: dict[str, Any] = {}
        for dotted_key, value in sorted(words.items(), key=lambda item: item[0].count(".")):
            *sections, last = dotted_key.split(".")
            kind, values, below = self._kind, layer, self.values
            for key in sections:
                kind = kind_below(kind, key)
                values[key] = spell_out(kind, values.get(key, {}))
                values, below = values[key], below.get(key, {}) if isinstance(below, dict) else {}
                if not isinstance(values, dict):
                    raise ConfigError(f"{dotted_key}: {key} is not a section")
            kind = kind_below(kind, last)
            values[last] = spell_out(kind, value)
            if (isinstance(value, Mapping) or _names_base(kind, value)) and isinstance(below, dict) and last in below:
                self._dropped(dotted_key)
                del below[last]
        self.add(origin, layer)

    def _merge(
        self, kind: Any, place: str, old: Mapping[str, Any], new: Mapping[str, Any], origin: str
    ) -> dict[str, Any]:
        if isinstance(kind, Kinds) and kind.key in new and kind.name_of(new) != kind.name_of(old):
            old = self._dropped(place)
        if folder := getattr(kind, "BASES", ""):
            name = new.get(kind.SHORTHAND, old.get(kind.SHORTHAND))
            if name != old.get(kind.SHORTHAND):
                old = self._dropped(place)
                for base, values in base_layers(folder, name):
                    old = self._merge(kind, place, old, values, f"{kind.SHORTHAND} {base}")
        merged = dict(old)
        for key, value in new.items():
            below, path = kind_below(kind, key), f"{place}.{key}".lstrip(".")
            before = spell_out(below, merged.get(key))
            if _names_base(below, value):
                before = self._dropped(path)
            value = spell_out(below, value)
            if isinstance(value, Mapping):
                merged[key] = self._merge(below, path, before if isinstance(before, Mapping) else {}, value, origin)
            else:
                self._dropped(path)
                merged[key], self.origins[path] = copy.copy(value), origin
        return merged

    def _dropped(self, place: str) -> dict[str, Any]:
        """Forget where the values of a section come from. Return an empty section."""
        self.origins = {key: origin for key, origin in self.origins.items() if not f"{key}.".startswith(f"{place}.")}
        return {}


def _names_base(kind: Any, value: Any) -> bool:
    """Return whether a section is given as a single word, which names its base file."""
    return isinstance(value, str) and bool(getattr(kind, "BASES", ""))


def spell_out(kind: Any, value: Any) -> Any:
    """Return the keys that a word alone sets, or another value unchanged."""
    if not isinstance(value, str):
        return value
    if isinstance(kind, Kinds):
        return kind.spell_out(value)
    shorthand = getattr(kind, "SHORTHAND", "")
    return {shorthand: value} if shorthand else value


def base_layers(folder: str, name: Any) -> list[tuple[str, dict[str, Any]]]:
    """Return the name and values of a section's base file in the package, after those of its own bases."""
    paths = packaged_configs(folder)
    if not isinstance(name, str) or name not in paths:
        containing = [each for each in paths if str(name).lower() in each]
        advice = f"; did you mean {' or '.join(containing)}?" if containing and name else nearest(str(name), [*paths])
        raise ConfigError(f"no {folder} preset {name!r}{advice}")
    values = read_values(paths[name])
    base = values.pop("base", None)
    return [*(base_layers(folder, base) if base else ()), (name, values)]


def difference(kind: Any, base: Mapping[str, Any], other: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return the dotted keys to set in `base` to make it equal to `other`, and their values.

    Args:
        kind: Type of the section, such as `Config`; see `kind_below`.
        other: Plain values of the same section. Keys that it lacks are left as in `base`.
        prefix: Dotted key of the section with a final ".", or "" for the whole configuration.
    """
    changes: dict[str, Any] = {}
    for key, value in other.items():
        old, below = base.get(key), kind_below(kind, key)
        if isinstance(value, Mapping) and isinstance(old, Mapping) and old and not _replaces(below, old, value):
            changes |= difference(below, old, value, f"{prefix}{key}.")
        elif value != old:
            changes[prefix + key] = value
    return changes


def _replaces(kind: Any, old: Mapping[str, Any], new: Mapping[str, Any]) -> bool:
    """Return whether a new section has another kind or base file, or lacks a key of the old one."""
    name = kind.key if isinstance(kind, Kinds) else getattr(kind, "SHORTHAND", "") if getattr(kind, "BASES", "") else ""
    return bool(name and old.get(name) != new.get(name)) or not set(old) <= set(new)
