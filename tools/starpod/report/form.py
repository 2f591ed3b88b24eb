"""Options of an environment and arguments of a tool as fields of a form: from the JSON Schema that Describe gives, and
read back."""

from __future__ import annotations

import html
import json
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

_MAX_DIGITS = 24
_MAX_NUMBER = 2.0**53
"""Beyond it numbers do not travel unchanged."""


@dataclass(frozen=True, slots=True)
class Field:
    """One option or argument. kind: choice, number, check or text. default: as text, empty where there is none."""

    name: str
    kind: str
    description: str
    default: str
    choices: tuple[str, ...] = ()
    whole: bool = False


def fields(schema_json: str, *, first: Sequence[str] = (), hidden: Collection[str] = ()) -> list[Field]:
    """The fields of all options but those that are hidden; those of `first` come first."""
    properties: Mapping[str, Any] = json.loads(schema_json or "{}").get("properties", {})
    found = [_field(name, schema) for name, schema in properties.items() if name not in hidden]
    known = [field for field in found if field is not None]
    return sorted(known, key=lambda field: first.index(field.name) if field.name in first else len(first))


def arguments(schema_json: str) -> list[Field] | None:
    """The fields of a tool's arguments; None where a plain form cannot hold all of them."""
    found = fields(schema_json)
    return found if len(found) == len(json.loads(schema_json or "{}").get("properties", {})) else None


def _field(name: str, schema: Mapping[str, Any]) -> Field | None:
    """None for what a plain form cannot hold."""
    default = schema.get("default")
    kinds = [one for one in schema.get("anyOf", [schema]) if one.get("type") != "null"]
    if len(kinds) != 1:
        return None
    kind, text = kinds[0], "" if default is None else str(default)
    description = str(schema.get("description", ""))
    if "enum" in kind:
        return Field(name, "choice", description, text, tuple(map(str, kind["enum"])))
    match kind.get("type"):
        case "boolean":
            return Field(name, "check", description, "on" if default else "")
        case "integer" | "number":
            return Field(name, "number", description, text, whole=kind["type"] == "integer")
        case "string":
            return Field(name, "text", description, text)
    return None


def marked(text: str) -> str:
    """A description as html, with what stands between backticks as code."""
    return re.sub(r"`([^`]+)`", r"<code>\1</code>", html.escape(text))


def filled(known: Sequence[Field], given: Mapping[str, str], *, whole: bool = False) -> list[Field]:
    """The fields with the values that are given, for a form that is shown again or filled in for somebody.

    whole: `given` is all of a form, in which a box without its mark is not named.
    """
    found = []
    for field in known:
        text = given.get(f"option-{field.name}", "" if whole and field.kind == "check" else field.default)
        found.append(replace(field, default=text))
    return found


def chosen(known: list[Field], form: Mapping[str, str]) -> dict[str, Any]:
    """The options that differ from their defaults. Raises ValueError naming a field that is no number."""
    options: dict[str, Any] = {}
    for field in known:
        text = form.get(f"option-{field.name}", "").strip()
        if text == field.default or (field.kind in ("choice", "number") and not text):
            continue
        if field.kind == "check":
            options[field.name] = bool(text)
        elif field.kind == "number":
            options[field.name] = _number(field, text)
        else:
            options[field.name] = text
    return options


def _number(field: Field, text: str) -> float:
    """Raises ValueError."""
    try:
        number = float(text)
        if text.isascii() and len(text) <= _MAX_DIGITS and abs(number) <= _MAX_NUMBER:
            return int(text) if field.whole else number
    except ValueError:
        pass
    kind = "whole number" if field.whole else "number"
    raise ValueError(f"{field.name}: {text[:_MAX_DIGITS]!r} is not a {kind} of at most {_MAX_DIGITS} characters")
