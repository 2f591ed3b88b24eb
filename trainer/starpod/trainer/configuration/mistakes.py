"""Sentences about mistakes in a configuration."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pydantic import ValidationError

from starpod.trainer.configuration.kinds import USERS, Kinds
from starpod.trainer.configuration.layers import keys_of, kind_below
from starpod.trainer.configuration.section import Section
from starpod.v1.spelling import nearest


def explain(section: type[Section], error: ValidationError, prefix: str = "") -> str:
    """Return an error's mistakes as sentences, joined by semicolons.

    Args:
        prefix: Dotted key of the section; "": the whole configuration.
    """
    items = [item for item in error.errors() if item["type"] != "default_factory_not_called"]
    return "; ".join(_sentence(section, item, prefix) for item in items)


def unknown_key(key: str, known: Sequence[str]) -> str:
    """Return the sentence about a dotted key that does not exist. known: keys of its section."""
    return f"no key {key!r}{nearest(key.rpartition('.')[2], known)}"


def _sentence(section: type[Section], item: Any, prefix: str) -> str:
    kind: Any = section
    kinds, name = None, ""
    names = [prefix] if prefix else []
    for part in item["loc"]:
        if isinstance(kind, Kinds) and part in kind.classes:  # pydantic names the kind between two keys
            kinds, name, kind = kind, part, kind.classes[part]
        elif kind is None or isinstance(part, int) or keys_of(kind) or kind_below(kind, part):
            above, kind = kind, kind_below(kind, part)
            names.append(str(part))
    key, last = ".".join(names), names[-1] if names else ""
    if item["type"] == "extra_forbidden":
        if kinds is not None and above is kinds.classes[name] and (owners := kinds.owners(last)):
            place = ".".join(names[:-1])
            return (
                f"{key} belongs to {', '.join(owners)}, and {place} is {name}: drop it, or set {place} to {owners[0]}"
            )
        return unknown_key(key, keys_of(above))
    if item["type"] == "missing":
        return f"{key} must be given: {above.model_fields[last].description}"
    if item["type"] == "union_tag_invalid":
        known = [each for each in kind.classes if each != USERS]
        own = f"; one of your own is {USERS}" if USERS in kind.classes else ""
        return f"{key}: no {kind.key} {item['ctx']['tag']!r}{nearest(item['ctx']['tag'], known)}{own}"
    if item["type"] == "model_type":
        return f"{key}: is a section of keys, such as {key}.{keys_of(kind)[0]}, and cannot be {item['input']!r}"
    message = item["msg"].removeprefix("Value error, ")
    suffix = "" if item["type"] == "value_error" or isinstance(item["input"], dict) else f", not {item['input']!r}"
    # Sections' own messages already name their keys.
    return f"{key}: {message}{suffix}" if key and f"{key}." not in message else f"{message}{suffix}"
