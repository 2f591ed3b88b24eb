"""The tools of the desk: their descriptions, and the parsing of calls."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from starpod.env_server import Tool, ToolCall, read_untrusted_json

from .office import CLOSES, DAYS, OPENS

MAX_TEXT = 2_000
"""Maximum number of characters of a text argument."""

_DAY = {"type": "string", "enum": list(DAYS)}
_HOUR = {"type": "integer", "minimum": OPENS, "maximum": CLOSES - 1}
_HOURS = {"type": "integer", "minimum": 1, "maximum": CLOSES - OPENS}
_TEXT = {"type": "string", "maxLength": MAX_TEXT}
_ID = {"type": "integer"}


def _tool(name: str, description: str, /, **parameters: Mapping[str, Any]) -> Tool:
    schema = {
        "type": "object",
        "properties": parameters,
        "required": list(parameters),
        "additionalProperties": False,
    }
    return Tool(name, description, schema)


TOOLS = (
    _tool("list_events", "Lists the meetings of a day with their numbers.", day=_DAY),
    _tool(
        "add_event",
        "Adds a meeting, which may not overlap another one.",
        title=_TEXT,
        day=_DAY,
        start=_HOUR,
        hours=_HOURS,
        attendee=_TEXT,
    ),
    _tool("delete_event", "Deletes a meeting by its number.", id=_ID),
    _tool("list_files", "Lists the names of all files."),
    _tool("read_file", "Shows a file.", name=_TEXT),
    _tool("write_file", "Writes a file, in place of one of that name.", name=_TEXT, text=_TEXT),
    _tool("list_mail", "Lists the mails of the inbox with their numbers."),
    _tool("read_mail", "Shows a mail by its number.", id=_ID),
    _tool("send_mail", "Sends a mail.", to=_TEXT, subject=_TEXT, body=_TEXT),
    _tool("find_contact", "Finds the mail address of a person.", name=_TEXT),
    _tool("finish", "Says that all is done, which ends the episode."),
)
_BY_NAME = {tool.name: tool for tool in TOOLS}
_WRITTEN = re.compile(r"\s*([a-z_]+)\s*(\{.*\})?\s*", re.DOTALL)


class BadCall(ValueError):
    """A call is invalid; the message says why."""


def read_call(action: Any) -> tuple[str, dict[str, Any]]:
    """Parse a tool call or a text `name {"argument": "value"}` into name and checked arguments. Raises BadCall."""
    if isinstance(action, str):
        action = _read_text(action)
    if not isinstance(action, ToolCall):
        raise BadCall("call a tool")
    tool = _BY_NAME.get(action.name)
    if tool is None:
        raise BadCall(f"there is no tool {action.name[:40]!r}; there are {', '.join(_BY_NAME)}")
    properties: Mapping[str, Mapping[str, Any]] = tool.parameters["properties"]
    if unknown := [name for name in action.arguments if name not in properties]:
        raise BadCall(f"{tool.name} has no argument {unknown[0][:40]!r}; it has {', '.join(properties) or 'none'}")
    if missing_names := [name for name in properties if name not in action.arguments]:
        raise BadCall(f"{tool.name} needs {', '.join(missing_names)}")
    return tool.name, {name: _check(name, action.arguments[name], schema) for name, schema in properties.items()}


def _read_text(text: str) -> ToolCall:
    match = _WRITTEN.fullmatch(text) if len(text) <= 4 * MAX_TEXT else None
    if match is None:
        raise BadCall('write a call as name {"argument": "value"}')
    try:
        arguments = read_untrusted_json(match[2] or "{}")
    except ValueError as error:
        raise BadCall(f"the arguments are not JSON: {str(error)[:80]}") from None
    return ToolCall(match[1], arguments)


def _check(name: str, value: Any, schema: Mapping[str, Any]) -> str | int:
    if schema["type"] == "integer":
        if not isinstance(value, int) or isinstance(value, bool):
            raise BadCall(f"{name} must be a whole number")
        low, high = schema.get("minimum", 0), schema.get("maximum", 10**6)
        if not low <= value <= high:
            raise BadCall(f"{name} must be from {low} to {high}")
        return value
    if not isinstance(value, str):
        raise BadCall(f"{name} must be a text")
    if "enum" in schema and value not in schema["enum"]:
        raise BadCall(f"{name} must be one of {', '.join(schema['enum'])}")
    if len(value) > MAX_TEXT:
        raise BadCall(f"{name} has more than {MAX_TEXT} characters")
    return value


def write_call(name: str, arguments: Mapping[str, Any]) -> str:
    """Return a call as text."""
    return f"{name} {json.dumps(dict(arguments), ensure_ascii=False)}"
