"""Form fields for an environment's options and a tool's arguments, made from JSON Schemas and read back."""

from __future__ import annotations

import html
import json
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

_MAX_DIGITS = 24
_MAX_NUMBER = 2.0**53
"""Maximum magnitude of a number. Larger ones lose digits, because JSON numbers and protobuf's Struct are doubles."""


@dataclass(frozen=True, slots=True)
class Field:
    """A form field for one option or argument."""

    name: str
    kind: str
    """Type of the field: choice, number, check or text."""
    description: str
    default: str
    """The default as text; empty without one."""
    choices: tuple[Any, ...] = ()
    """Values to choose from, such as 4, 9 and 16. A form sends them as text."""
    whole: bool = False
    """Whether only whole numbers are allowed."""


def fields(schema_json: str, *, first: Sequence[str] = (), hidden: Collection[str] = ()) -> list[Field]:
    """Return the form fields of a JSON Schema's properties. Properties that a plain form cannot hold are left out.

    Args:
        schema_json: JSON Schema of type object; empty: no properties.
        first: names of properties to put first, in this order.
        hidden: names of properties to leave out.
    """
    properties: Mapping[str, Any] = json.loads(schema_json or "{}").get("properties", {})
    all_fields = [_field(name, schema) for name, schema in properties.items() if name not in hidden]
    known_fields = [field for field in all_fields if field is not None]
    return sorted(known_fields, key=lambda field: first.index(field.name) if field.name in first else len(first))


def arguments(schema_json: str) -> list[Field] | None:
    """Return the fields of a tool's arguments, or None if a plain form cannot hold all of them."""
    all_fields = fields(schema_json)
    return all_fields if len(all_fields) == len(json.loads(schema_json or "{}").get("properties", {})) else None


def _field(name: str, schema: Mapping[str, Any]) -> Field | None:
    """Return the field for a schema, or None if a plain form cannot hold it."""
    default = schema.get("default")
    kinds = [kind for kind in schema.get("anyOf", [schema]) if kind.get("type") != "null"]
    if len(kinds) != 1:
        return None
    kind, text = kinds[0], "" if default is None else str(default)
    description = str(schema.get("description", ""))
    if "enum" in kind:
        return Field(name, "choice", description, text, tuple(kind["enum"]))
    match kind.get("type"):
        case "boolean":
            return Field(name, "check", description, "on" if default else "")
        case "integer" | "number":
            return Field(name, "number", description, text, whole=kind["type"] == "integer")
        case "string":
            return Field(name, "text", description, text)
    return None


def marked(text: str) -> str:
    """Return a description as HTML, with text between backticks as code."""
    return re.sub(r"`([^`]+)`", r"<code>\1</code>", html.escape(text))


def fill_in(fields: Sequence[Field], values: Mapping[str, str], *, whole: bool = False) -> list[Field]:
    """Return the fields with a form's values as defaults, to show the form again or to fill it in advance.

    Args:
        fields: the form's fields.
        values: values of the form, keyed `option-NAME`.
        whole: whether `values` is a complete form, in which a missing check box is one that is not ticked.
    """
    result = []
    for field in fields:
        text = values.get(f"option-{field.name}", "" if whole and field.kind == "check" else field.default)
        result.append(replace(field, default=text))
    return result


def changed_options(fields: list[Field], form: Mapping[str, str]) -> dict[str, Any]:
    """Return the options that differ from their defaults. Raise ValueError for a field with an invalid number."""
    options: dict[str, Any] = {}
    for field in fields:
        text = form.get(f"option-{field.name}", "").strip()
        if text == field.default or (field.kind in ("choice", "number") and not text):
            continue
        if field.kind == "check":
            options[field.name] = bool(text)
        elif field.kind == "number":
            options[field.name] = _number(field, text)
        elif field.kind == "choice":  # the environment explains a value that is not one of the choices
            options[field.name] = next((value for value in field.choices if str(value) == text), text)
        else:
            options[field.name] = text
    return options


def _number(field: Field, text: str) -> float:
    try:
        number = float(text)
        if text.isascii() and len(text) <= _MAX_DIGITS and abs(number) <= _MAX_NUMBER:
            return int(text) if field.whole else number
    except ValueError:
        pass
    kind = "whole number" if field.whole else "number"
    raise ValueError(f"{field.name}: {text[:_MAX_DIGITS]!r} is not a {kind} of at most {_MAX_DIGITS} characters")
