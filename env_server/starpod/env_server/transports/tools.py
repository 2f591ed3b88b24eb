"""Turns as calls of tools, for protocols that have no other actions: MCP and the Open Reward Standard."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Mapping
from typing import Any

from starpod.env_server.errors import bad_argument
from starpod.v1 import environment_pb2 as pb

Schema = dict[str, Any]

STEP = "step"


def turn_tools(spec: pb.EnvironmentSpec, taken: Collection[str] = (STEP,)) -> Iterator[tuple[str, str, Schema]]:
    """Name, description and JSON Schema of each: `step` for texts, then the environment's own.

    taken: names that mean something else; an environment's own tool of such a name is left to `step`.
    """
    space = spec.action_space
    if space.names or space.grammar or not space.tools:
        item: Schema = {"type": "string"}
        if space.names and not space.grammar:
            item["enum"] = list(space.names)
        most = spec.limits.max_actions_per_turn
        actions: Schema = {"type": "array", "items": item, **({"maxItems": most} if most else {})}
        schema = {"type": "object", "properties": {"actions": actions}, "required": ["actions"]}
        yield STEP, f"Play one turn: actions in their order. {space.grammar}".strip(), schema
    for tool in space.tools:
        if tool.name not in taken:
            schema = json.loads(tool.parameters_schema_json or "{}")
            yield tool.name, tool.description, {"type": "object", **schema}


def actions_of(spec: pb.EnvironmentSpec, tool: str, arguments: Mapping[str, Any]) -> list[pb.Action]:
    """The turn that a call of a tool means. Raises BAD_ARGUMENT: for `name` where it is no tool of the environment."""
    if tool == STEP:
        actions = arguments.get("actions")
        if not isinstance(actions, list) or not all(isinstance(each, str) for each in actions):
            raise bad_argument("actions", "is no list of texts")
        try:
            return [pb.Action(text=each) for each in actions]
        except UnicodeEncodeError as error:  # JSON can spell it, and so can a model
            raise bad_argument("actions", "holds half of a surrogate pair") from error
    if tool in (each.name for each in spec.action_space.tools):
        return [pb.Action(tool_call=pb.ToolCall(name=tool, arguments_json=json.dumps(dict(arguments))))]
    raise bad_argument("name", f"is {tool[:80]!r}, which is no tool of {spec.id}")


def whole_number(name: str, value: object, end: int) -> int:
    """Return the value of an argument that is a whole number from 0 to below `end`. Raises BAD_ARGUMENT."""
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < end:
        raise bad_argument(name, f"is no whole number from 0 to {end - 1}")
    return value
