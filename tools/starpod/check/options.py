"""Options for the sessions of a check: values from the command line, and made-up values for required options."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from starpod.remote.catalog import options_schema, parse_options
from starpod.v1 import environment_pb2 as pb

OF_TYPE: Mapping[str, Any] = {
    "integer": 1,
    "number": 1.0,
    "string": "x",
    "boolean": True,
    "array": [],
    "object": {},
    "null": None,
}


class Required(Exception):
    """An environment requires an option and its schema suggests no value. The message names the option."""


def session_options(spec: pb.EnvironmentSpec, assignments: Sequence[str]) -> dict[str, Any]:
    """Return the options of every session.

    These are the assignments (`name=JSON`) for options that the environment has, and made-up values for other required
    options.

    Raises:
        Required: No value can be made up for a required option.
        click.BadParameter: An assignment is malformed or not allowed.
    """
    try:
        schema = json.loads(spec.options_schema_json)
        properties = options_schema(spec)
    except (ValueError, AttributeError):
        return {}  # requirement C-04 reports it
    spec_assignments = [
        assignment for assignment in assignments if assignment.partition("=")[0] in properties or "=" not in assignment
    ]
    options = parse_options(spec, spec_assignments)
    for name in schema.get("required", ()):
        if name in options:
            continue
        try:
            options[name] = make_value(properties.get(name, {}), schema)
        except Required:
            raise Required(f"{spec.id} requires the option {name}: give it with --option {name}=JSON") from None
    return options


def make_value(prop: Any, schema: Mapping[str, Any]) -> Any:
    """Return a value that the property's schema allows. Raise Required if the schema does not say enough."""
    prop = resolve_references(prop, schema)
    for key in ("const", "default"):
        if key in prop:
            return prop[key]
    for key in ("enum", "examples"):
        if prop.get(key):
            return prop[key][0]
    for key, step in (("minimum", 0), ("exclusiveMinimum", 1), ("maximum", 0), ("exclusiveMaximum", -1)):
        if key in prop:
            return prop[key] + step
    for choice in (*prop.get("anyOf", ()), *prop.get("oneOf", ())):
        return make_value(choice, schema)
    kind = prop.get("type")
    kind = kind[0] if isinstance(kind, list) and kind else kind
    if kind == "string":
        return OF_TYPE["string"] * max(1, prop.get("minLength", 1))
    if kind not in OF_TYPE:
        raise Required
    return OF_TYPE[kind]


def resolve_references(prop: Any, schema: Mapping[str, Any]) -> dict[str, Any]:
    """Return the property's schema with `$ref` followed; empty if the property has no schema."""
    for _ in range(8):
        if not isinstance(prop, dict) or "$ref" not in prop:
            break
        target: Any = schema
        for key in str(prop["$ref"]).removeprefix("#/").split("/"):
            target = target.get(key, {})
        prop = target
    return prop if isinstance(prop, dict) else {}
