"""Errors that suggest what the caller probably meant."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any

from starpod.client.errors import BadArgument, UnknownEnvironment, UnknownVersion
from starpod.v1 import environment_pb2 as pb
from starpod.v1.spelling import near


def unknown_environment(environment_id: str, hosted: Iterable[str]) -> UnknownEnvironment:
    """Return the error for an environment that no server of the fleet hosts."""
    names = sorted(set(hosted))
    # The most common mistake is another version, such as sokoban-v2 for sokoban-v1.
    base = environment_id.rpartition("-v")[0] or environment_id
    nearest = [name for name in names if name.rpartition("-v")[0] == base] or near(environment_id, names)
    hint = f"did you mean {', '.join(nearest)}?" if nearest else f"there are {', '.join(names) or 'none'}."
    return UnknownEnvironment(
        f"No environment {environment_id!r} is hosted: {hint}",
        metadata={"advice": "give_up", "nearest": ",".join(nearest)},
    )


def unknown_version(environment_id: str, version_range: str, hosted: Iterable[str]) -> UnknownVersion:
    """Return the error for an environment that is hosted, but not in a version within a range such as ">=2.0"."""
    available = ",".join(hosted)
    return UnknownVersion(
        f"No hosted version of {environment_id} fits {version_range!r}: there are {available}.",
        metadata={"advice": "give_up", "available": available},
    )


def explain_options(error: BadArgument, spec: pb.EnvironmentSpec, options: Mapping[str, Any] | None) -> BadArgument:
    """Return the error with a message that suggests and describes options.

    If an option is unknown, the message describes all options of the environment; otherwise it describes the options
    with wrong values. An error that does not concern options is returned unchanged.
    """
    if error.violations and not any(path.startswith("options") for path, _ in error.violations):
        return error
    schema: dict[str, Any] = json.loads(spec.options_schema_json) if spec.options_schema_json else {}
    schemas: dict[str, Any] = schema.get("properties", {})
    unknown = [name for name in options or {} if name not in schemas]
    lines, wrong = [] if error.violations else [error.message], []
    for path, text in error.violations:
        name = path.removeprefix("options.").partition(".")[0]
        if name not in unknown:  # the server's sentence about an unknown option has no suggestion
            lines.append(f"{path}: {text.rstrip('.')}.")
            wrong.append(name)
    for name in unknown:
        suggestions = near(name, schemas)
        hint = f": did you mean {', '.join(suggestions)}?" if suggestions else "."
        lines.append(f"{spec.id} has no option {name!r}{hint}")
    subset = schemas if unknown or not error.violations else {name: schemas[name] for name in wrong if name in schemas}
    if options and (subset or not schemas):
        listing = "; ".join(f"{name}: {option_type(option)}" for name, option in subset.items()) or "none"
        lines.append(f"Options of {spec.id}: {listing}.")
    detailed_error = BadArgument(
        "\n".join(lines), code=error.code, reason=error.reason, metadata=error.metadata, violations=error.violations
    )
    detailed_error.options_schema = schema
    return detailed_error


def option_type(schema: dict[str, Any]) -> str:
    """Return one option's schema in short form: type or choices, bounds and default, such as `integer 1..8 = 4`."""
    alternatives = schema.get("anyOf") or schema.get("oneOf")
    if "enum" in schema:
        kind = " | ".join(map(str, schema["enum"]))
    elif "const" in schema:
        kind = str(schema["const"])
    elif alternatives:
        kind = " | ".join(option_type(alternative) for alternative in alternatives)
    else:
        kind = str(schema.get("type", "object" if "$ref" in schema else "any"))
    low, high = schema.get("minimum", schema.get("exclusiveMinimum")), schema.get("maximum")
    if low is not None or high is not None:
        kind += f" {'' if low is None else low}..{'' if high is None else high}"
    if "default" in schema:
        kind += f" = {json.dumps(schema['default'], ensure_ascii=False)}"
    return kind
