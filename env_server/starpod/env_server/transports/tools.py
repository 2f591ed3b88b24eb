"""Turns as tool calls, for protocols that have no other actions: MCP and the Open Reward Standard."""

from __future__ import annotations

import asyncio
import base64
import json
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

from starpod.env_server.episodes.errors import bad_argument, overloaded
from starpod.env_server.transports.encoding import write_json
from starpod.env_server.transports.service import EnvironmentService
from starpod.v1 import environment_pb2 as pb

Schema = dict[str, Any]

STEP = "step"
_RETRY_SECONDS = 0.5


def turn_tools(spec: pb.EnvironmentSpec, used_names: Collection[str] = (STEP,)) -> Iterator[tuple[str, str, Schema]]:
    """Yield name, description and JSON Schema of each tool: `step` for texts, then the environment's own tools.

    Args:
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
    """Return the actions of the turn that a tool call represents. Raises BAD_ARGUMENT, also for an unknown tool.

    Args:
        arguments: arguments of the tool. `step` has `actions`, a list of texts.
    """
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
    """Return an argument's value. Raises BAD_ARGUMENT if it is not an integer from 0 to `end` - 1.

    Args:
        end: number of valid values.
    """
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < end:
        raise bad_argument(name, f"is not a whole number from 0 to {end - 1}")
    return value


def block_of(part: pb.Part) -> dict[str, str]:
    """Return a part of an observation as a content block, which both protocols write alike."""
    match part.WhichOneof("kind"):
        case "image":
            return {"type": "image", "data": base64.b64encode(part.image.data).decode(), "mimeType": part.image.mime}
        case "tensor":
            return {"type": "text", "text": write_json(part.tensor).decode()}
        case "json":
            return {"type": "text", "text": part.json}
    return {"type": "text", "text": part.text}


@dataclass(eq=False)
class NamedSession:
    """A session that a caller named, and the position of its next turn."""

    session_id: str = ""
    epoch: int = 0
    step_index: int = 0
    turn: asyncio.Lock = field(default_factory=asyncio.Lock)
    """Lock that admits one call at a time, in the order of arrival."""

    def follow(self, session: pb.Session) -> None:
        """Name this session from now on."""
        self.session_id, self.epoch, self.step_index = session.session_id, session.epoch, session.step_index


Named = TypeVar("Named", bound=NamedSession)


class SessionNames(dict[tuple[str, ...], Named]):
    """The named sessions of all tenants, by tenant and name."""

    def make_room(self, service: EnvironmentService, limit: int) -> None:
        """Forget names whose session has ended, once there are `limit`. Raises OVERLOADED if none has."""
        if len(self) < limit:
            return
        live_ids = {session_id for table in service.tables.values() for session_id in table}
        for name, session in list(self.items()):
            if session.session_id not in live_ids and not session.turn.locked():
                del self[name]
        if len(self) >= limit:
            raise overloaded("max_sessions", "all sessions are in use", _RETRY_SECONDS)
