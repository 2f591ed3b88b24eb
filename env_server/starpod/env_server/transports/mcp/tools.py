"""The tools of an environment, and the results of calling them, in MCP's types."""

from __future__ import annotations

import base64
import json
from typing import Any

from google.protobuf.message import Message
from mcp_types import CallToolResult, ContentBlock, ImageContent, TextContent, Tool

from starpod.env_server.episodes.errors import CallError
from starpod.env_server.transports import tools as turns
from starpod.env_server.transports.encoding import write_json
from starpod.env_server.transports.tools import Schema, block_of, turn_tools
from starpod.v1 import environment_pb2 as pb

_STEP_INDEX: Schema = {
    "type": "integer",
    "minimum": 0,
    "description": "Index of the turn: next_step_index of the last result. Repeating a call with its step_index "
    "plays nothing and returns the same result.",
}
_RESET, _OBSERVE, _FORK, _CLOSE = "reset", "observe", "fork", "close"
_REPLY = "starpod.v1/reply"
OWN = (_RESET, turns.STEP, _OBSERVE, _FORK, _CLOSE)


def list_tools(spec: pb.EnvironmentSpec) -> list[Tool]:
    """Return the tools for an environment. Its own tools with a reserved name must be called through `step`."""
    options = json.loads(spec.options_schema_json or "{}")
    definitions = options.pop("$defs", {})  # options refer to them from the schema's root
    pictures = "png" in spec.render_modes
    properties: Schema = {
        "seed": {"type": "integer", "minimum": 0, "description": "Fixes the start."},
        "options": options,
        **({"image": {"type": "boolean", "description": "Also return images."}} if pictures else {}),
    }
    image_properties: Schema = {"image": {"type": "boolean", "description": "As a picture."}} if pictures else {}
    tools = [
        _tool(_RESET, f"Begin a new episode of {spec.title}. {spec.instructions}", properties, definitions=definitions),
        _tool(_OBSERVE, "Show the present state.", image_properties),
        _tool(_CLOSE, "End the session and free its resources.", {}),
    ]
    tools += [
        Tool(name=name, description=description, input_schema=_with_step_index(schema))
        for name, description, schema in turn_tools(spec, OWN)
    ]
    if spec.capabilities.fork:
        name = {"type": "string", "description": "Name of the copy, with which this server's URL ends."}
        tools.append(_tool(_FORK, "Copy the session in its present state.", {"name": name}, "name"))
    return tools


def result_of(
    observation: pb.Observation | None, facts: dict[str, Any], message: Message | None = None, text: str = ""
) -> CallToolResult:
    """Return the result of a tool call, with the observation's parts as content.

    The facts are added both as a line of JSON and as structured content.

    Args:
        facts: values for programs, by name.
        message: a message whose fields, except the observation, are added to the facts; facts take precedence.
        text: text before the observation, such as the instructions; by default none.
    """
    if message is not None:
        facts = {**json.loads(write_json(message)), **facts}
        facts.pop("observation", None)
    content: list[ContentBlock] = [TextContent(text=text)] if text else []
    content += [_content(part) for part in observation.parts] if observation else []
    shown_facts = {key: value for key, value in facts.items() if value not in ([], {}, "")}
    content.append(TextContent(text=json.dumps(shown_facts)))
    return CallToolResult(content=content, structured_content=facts)


def meta_of(reply: Message) -> dict[str, Any]:
    """Return a reply of the contract as a result's `_meta`."""
    return {_REPLY: json.loads(write_json(reply))}


def picture_of(reply: pb.RenderResponse) -> CallToolResult:
    if reply.mime.startswith("text/"):
        return CallToolResult(content=[TextContent(text=reply.data.decode(errors="replace"))])
    return CallToolResult(content=[ImageContent(data=base64.b64encode(reply.data).decode(), mime_type=reply.mime)])


def failure_of(error: CallError) -> CallToolResult:
    """Return an error with the contract's details as a result."""
    status = json.loads(write_json(error.status()))
    return CallToolResult(content=[TextContent(text=str(error))], structured_content=status, is_error=True)


def _content(part: pb.Part) -> ContentBlock:
    block = block_of(part)
    return (ImageContent if block["type"] == "image" else TextContent).model_validate(block)


def _tool(name: str, description: str, properties: Schema, *required: str, definitions: Schema | None = None) -> Tool:
    schema = {"type": "object", "properties": properties, "required": list(required)}
    if definitions:
        schema["$defs"] = definitions
    return Tool(name=name, description=description, input_schema=schema)


def _with_step_index(schema: Schema) -> Schema:
    return {**schema, "properties": {"step_index": _STEP_INDEX, **schema.get("properties", {})}}
