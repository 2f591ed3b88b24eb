"""Options for the sessions of a check: those that were given, and values for what an environment requires."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from starpod.client.catalog import options_schema, parse_options
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
    """An environment requires an option for which no value can be made of its schema. The message names it."""


def session_options(spec: pb.EnvironmentSpec, assignments: Sequence[str]) -> dict[str, Any]:
    """The options of every session: those of `assignments` (`name=JSON`) that the environment has, and made-up values
    for what else it requires. Raises Required and click.BadParameter.
    """
    try:
        schema = json.loads(spec.options_schema_json)
        properties = options_schema(spec)
    except (ValueError, AttributeError):
        return {}  # C-04 tells
    own = [each for each in assignments if each.partition("=")[0] in properties or "=" not in each]
    options = parse_options(spec, own)
    for name in schema.get("required", ()):
        if name in options:
            continue
        try:
            options[name] = made_up(properties.get(name, {}), schema)
        except Required:
            raise Required(f"{spec.id} requires the option {name}: give it with --option {name}=JSON") from None
    return options


def made_up(prop: Any, schema: Mapping[str, Any]) -> Any:
    """A value that the property's schema allows. Raises Required where it tells too little."""
    prop = resolved(prop, schema)
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
        return made_up(choice, schema)
    kind = prop.get("type")
    kind = kind[0] if isinstance(kind, list) and kind else kind
    if kind == "string":
        return OF_TYPE["string"] * max(1, prop.get("minLength", 1))
    if kind not in OF_TYPE:
        raise Required
    return OF_TYPE[kind]


def resolved(prop: Any, schema: Mapping[str, Any]) -> dict[str, Any]:
    """The property's schema, with a `$ref` followed; empty where there is none."""
    for _ in range(8):
        if not isinstance(prop, dict) or "$ref" not in prop:
            break
        place: Any = schema
        for key in str(prop["$ref"]).removeprefix("#/").split("/"):
            place = place.get(key, {})
        prop = place
    return prop if isinstance(prop, dict) else {}
