"""Turns as tool calls, for protocols that have no other actions: MCP and the Open Reward Standard."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Mapping
from typing import Any

from starpod.env_server.episodes.errors import bad_argument
from starpod.v1 import environment_pb2 as pb

Schema = dict[str, Any]

STEP = "step"


def turn_tools(spec: pb.EnvironmentSpec, used_names: Collection[str] = (STEP,)) -> Iterator[tuple[str, str, Schema]]:
    """Yield name, description and JSON Schema of each tool: `step` for texts, then the environment's own tools.

    Args:
        spec: the environment.
        used_names: names with another meaning. Tools of the environment with these names must be called through `step`.
    """
    space = spec.action_space
    if space.names or space.grammar or not space.tools:
        item_schema: Schema = {"type": "string"}
        if space.names and not space.grammar:
            item_schema["enum"] = list(space.names)
        max_actions = spec.limits.max_actions_per_turn
        actions: Schema = {"type": "array", "items": item_schema, **({"maxItems": max_actions} if max_actions else {})}
        schema = {"type": "object", "properties": {"actions": actions}, "required": ["actions"]}
        yield STEP, f"Play one turn: actions in their order. {space.grammar}".strip(), schema
    for tool in space.tools:
        if tool.name not in used_names:
            schema = json.loads(tool.parameters_schema_json or "{}")
            yield tool.name, tool.description, {"type": "object", **schema}


def actions_of(spec: pb.EnvironmentSpec, tool: str, arguments: Mapping[str, Any]) -> list[pb.Action]:
    """Return the actions of the turn that a tool call represents. Raises BAD_ARGUMENT, also for an unknown tool."""
    if tool == STEP:
        actions = arguments.get("actions")
        if not isinstance(actions, list) or not all(isinstance(action, str) for action in actions):
            raise bad_argument("actions", "is not a list of texts")
        try:
            return [pb.Action(text=action) for action in actions]
        except UnicodeEncodeError as error:  # JSON, and so a model, can spell it
            raise bad_argument("actions", "holds half of a surrogate pair") from error
    if tool in (own_tool.name for own_tool in spec.action_space.tools):
        return [pb.Action(tool_call=pb.ToolCall(name=tool, arguments_json=json.dumps(dict(arguments))))]
    raise bad_argument("name", f"is {tool[:80]!r}, which is not a tool of {spec.id}")


def whole_number(name: str, value: object, end: int) -> int:
    """Return an argument's value, which must be an integer from 0 to `end` - 1. Raises BAD_ARGUMENT."""
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < end:
        raise bad_argument(name, f"is not a whole number from 0 to {end - 1}")
    return value
