"""The environment of an agent's episode as an MCP server at /mcp, for the session that its API key names.

Tools: `observe` and `step`. Who opened the episode begins and ends it, so there is no `reset`.
"""

from __future__ import annotations

import asyncio
import importlib.util
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

from starlette.types import ASGIApp

from starpod.gateway.app import Keys, key_of
from starpod.gateway.played import OutsideAgent
from starpod.gateway.requests import Refused

PATH = "/mcp"
_STEP_INDEX = "The turn's number, `step_index` of the last result: the same again has the same result."


def installed() -> bool:
    """Whether the package of the protocol is."""
    return importlib.util.find_spec("mcp") is not None and importlib.util.find_spec("mcp_types") is not None


@asynccontextmanager
async def served(playing: Callable[[str], OutsideAgent], keys: Keys | None = None) -> AsyncIterator[ASGIApp]:
    """The server as an ASGI application, while the context lasts. playing: the episode of a name; raises Refused."""
    from mcp.server.lowlevel import Server
    from mcp.server.streamable_http_manager import StreamableHTTPSessionManager
    from mcp_types import (
        CallToolRequestParams,
        CallToolResult,
        ListToolsResult,
        PaginatedRequestParams,
        TextContent,
        Tool,
    )

    names = keys or Keys()

    def episode(context: Any) -> OutsideAgent:
        return playing(names.name(key_of(context.request)))

    async def list_tools(context: Any, _: PaginatedRequestParams | None) -> ListToolsResult:
        told = episode(context).observe()
        item: dict[str, Any] = {"type": "string", **({"enum": told["actions"]} if told["actions"] else {})}
        properties = {
            "actions": {"type": "array", "items": item},
            "step_index": {"type": "integer", "minimum": 0, "description": _STEP_INDEX},
        }
        schema = {"type": "object", "properties": properties, "required": ["actions"]}
        nothing: dict[str, Any] = {"type": "object", "properties": {}}
        return ListToolsResult(
            tools=[
                Tool(name="observe", description="Shows the present state.", input_schema=nothing),
                Tool(name="step", description=f"Plays one turn. {told['instructions']}", input_schema=schema),
            ]
        )

    async def call_tool(context: Any, params: CallToolRequestParams) -> CallToolResult:
        given = params.arguments or {}
        try:
            playing = episode(context)
            match params.name:
                case "observe":
                    result = playing.observe()
                case "step":
                    result = await playing.step(_texts(given.get("actions")), _index(given.get("step_index")))
                case _:
                    raise ValueError(f"there is no tool {params.name[:80]!r}; use observe or step")
        except (Refused, ValueError) as error:
            return CallToolResult(content=[TextContent(text=str(error))], is_error=True)
        facts = {name: value for name, value in result.items() if name != "observation"}
        content = [TextContent(text=result["observation"]), TextContent(text=json.dumps(facts))]
        return CallToolResult(content=list(content), structured_content=result)

    server: Server[Any] = Server("starpod", on_list_tools=list_tools, on_call_tool=call_tool)
    manager = StreamableHTTPSessionManager(server, json_response=True, stateless=True)
    running, over = asyncio.Event(), asyncio.Event()

    async def run() -> None:
        async with manager.run():
            running.set()
            await over.wait()

    # A task of its own: a task group here would wrap what the caller's block raises.
    task = asyncio.create_task(run())
    await running.wait()
    try:
        yield manager.handle_request
    finally:
        over.set()
        await task


def _texts(actions: object) -> list[str]:
    if isinstance(actions, str):
        return [actions]
    if not isinstance(actions, list) or not all(isinstance(each, str) for each in actions):
        raise ValueError("`actions` is no list of texts")
    return actions


def _index(value: object) -> int | None:
    if value is not None and (isinstance(value, bool) or not isinstance(value, int)):
        raise ValueError("`step_index` is no whole number")
    return value
