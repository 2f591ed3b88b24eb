"""An MCP server at /mcp with which an agent plays the episode of the session that its API key names.

Its tools are `observe` and `step`. There is no `reset`, because the trainer begins and ends the episode.
"""

from __future__ import annotations

import asyncio
import importlib.util
import json
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from typing import Any

from starlette.types import ASGIApp

from starpod.gateway.app import Keys, key_of
from starpod.gateway.played import OutsideAgent
from starpod.gateway.requests import Rejected

PATH = "/mcp"
_STEP_INDEX = "Index of the turn: `step_index` of the last result. Repeating a step returns the same result."


def installed() -> bool:
    """Return whether the packages of MCP are installed."""
    return importlib.util.find_spec("mcp") is not None and importlib.util.find_spec("mcp_types") is not None


@asynccontextmanager
async def served(playing: Callable[[str], OutsideAgent], keys: Keys | None = None) -> AsyncIterator[ASGIApp]:
    """Yield the MCP server as an ASGI application. playing: returns a session's agent, or raises Rejected."""
    from mcp.server.lowlevel import Server
    from mcp.server.streamable_http_manager import StreamableHTTPASGIApp, StreamableHTTPSessionManager
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
        return ListToolsResult(tools=[Tool(**fields) for fields in _describe_tools(episode(context).observe())])

    async def call_tool(context: Any, params: CallToolRequestParams) -> CallToolResult:
        arguments = params.arguments or {}
        try:
            agent = episode(context)
            match params.name:
                case "observe":
                    result = agent.observe()
                case "step":
                    result = await agent.step(_texts(arguments.get("actions")), _index(arguments.get("step_index")))
                case _:
                    raise ValueError(f"there is no tool {params.name[:80]!r}; use observe or step")
        except (Rejected, ValueError) as error:
            return CallToolResult(content=[TextContent(text=str(error))], is_error=True)
        facts = {name: value for name, value in result.items() if name != "observation"}
        content = [TextContent(text=result["observation"]), TextContent(text=json.dumps(facts))]
        return CallToolResult(content=list(content), structured_content=result)

    server: Server[Any] = Server("starpod", on_list_tools=list_tools, on_call_tool=call_tool)
    manager = StreamableHTTPSessionManager(server, json_response=True, stateless=True)
    running, stop = asyncio.Event(), asyncio.Event()

    async def run() -> None:
        async with manager.run():
            running.set()
            await stop.wait()

    # A task group here would wrap exceptions of the caller's block, so this uses a plain task.
    task = asyncio.create_task(run())
    await running.wait()
    try:
        yield StreamableHTTPASGIApp(manager)
    finally:
        stop.set()
        await task


def _describe_tools(state: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the fields of the tools of an episode, given its state."""
    item: dict[str, Any] = {"type": "string", **({"enum": state["actions"]} if state["actions"] else {})}
    properties = {
        "actions": {"type": "array", "items": item},
        "step_index": {"type": "integer", "minimum": 0, "description": _STEP_INDEX},
    }
    schema = {"type": "object", "properties": properties, "required": ["actions"]}
    no_arguments = {"type": "object", "properties": {}}
    return [
        {"name": "observe", "description": "Show the present state.", "input_schema": no_arguments},
        {"name": "step", "description": f"Play one turn. {state['instructions']}", "input_schema": schema},
    ]


def _texts(actions: object) -> list[str]:
    if isinstance(actions, str):
        return [actions]
    if not isinstance(actions, list) or not all(isinstance(action, str) for action in actions):
        raise ValueError("`actions` must be a list of texts")
    return actions


def _index(value: object) -> int | None:
    if value is not None and (isinstance(value, bool) or not isinstance(value, int)):
        raise ValueError("`step_index` must be a whole number")
    return value
