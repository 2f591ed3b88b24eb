"""A connection over MCP: every call is a tool call. Fields without a tool argument travel in `_meta` (docs/mcp.md).

Requests are written by hand, because an MCP client library would make additional calls in between.
"""

from __future__ import annotations

import itertools
import json
import uuid
from collections.abc import Mapping, Sequence
from collections.abc import Set as Names
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import quote

from google.protobuf import json_format
from google.protobuf.message import Message
from google.rpc import status_pb2

from starpod.check.connection import Metadata, method_of
from starpod.check.expectations import NotShown, Unmet, expect, needs
from starpod.check.http_connection import HTTPConnection, read_reply, rpc_error_of
from starpod.client.transport import Transport
from starpod.v1 import environment_pb2 as pb

MCP = "mcp+"
"""Prefix of the addresses of MCP servers."""
VERSION = "2026-07-28"
"""Version of MCP: the first without protocol sessions, so that each request is independent."""
_CLIENT = {
    "io.modelcontextprotocol/protocolVersion": VERSION,
    "io.modelcontextprotocol/clientInfo": {"name": "starpod-check", "version": "1"},
    "io.modelcontextprotocol/clientCapabilities": {},
}
_REQUEST, _REPLY = "starpod.v1/request", "starpod.v1/reply"
_TOOLS = {"Open": "reset", "Reset": "reset", "Step": "step", "Render": "observe", "Fork": "fork", "Close": "close"}


@dataclass(slots=True)
class _ServerState:
    """Names that all connections to a server share."""

    environments: dict[str, str] = field(default_factory=dict)
    """Environment id by session name."""
    tools: set[str] = field(default_factory=set)
    """Names of tools that environments define."""


class MCPConnection(HTTPConnection):
    """A pool of connections to a server at mcp+http://host:port or mcp+https://host:port. Needs httpx.

    A session's id is the name in its URL. MCP has no Describe, so that call goes to the JSON API at the same address.
    """

    transport = "MCP"
    methods = ("Describe", *_TOOLS)

    def __init__(
        self,
        address: str,
        access: Transport,
        seconds: float,
        portion: int = 0,
        state: _ServerState | None = None,
    ) -> None:
        super().__init__(address.removeprefix(MCP), access, seconds, portion)
        self.address = address
        self._ids = itertools.count(1)
        self._state = state or _ServerState()

    def new_connection(self, address: str = "", options: Sequence[tuple[str, int]] = ()) -> MCPConnection:
        return MCPConnection(address or self.address, self.access, self.seconds, self.portion, self._state)

    async def send(self, request: Message, seconds: float, metadata: Metadata) -> tuple[Any, Any]:
        method = method_of(request)
        needs(method in self.methods, f"MCP has no {method}")
        if isinstance(request, pb.CloseRequest):
            for name in request.session_ids or ["none"]:  # a Close without ids must be sent too
                await self._call(name, pb.CloseRequest(session_ids=[name]), {}, seconds, metadata)
            return pb.CloseResponse(), ()
        if not isinstance(request, pb.OpenRequest | pb.ForkRequest):
            if isinstance(request, pb.DescribeRequest):
                server, trailer = await super().send(request, seconds, metadata)
                self._state.tools |= {tool.name for spec in server.environments for tool in spec.action_space.tools}
                return server, trailer
            name = request.session_id  # type: ignore[attr-defined]
            reply, trailer = await self._call(name, request, {}, seconds, metadata)
            if isinstance(reply, pb.ResetResponse):
                reply.session.session_id = name
            return reply, trailer
        needs(request.count <= 1, "MCP makes one session by a call")
        needs(not request.key, "MCP has no keys: a reset that is repeated begins another episode")
        new_name = uuid.uuid4().hex
        if isinstance(request, pb.OpenRequest):
            self._state.environments[new_name] = request.environment_id or "-"  # a URL must name one
            reply, trailer = await self._call(new_name, request, {}, seconds, metadata)
        else:
            self._state.environments[new_name] = self._environment(request.session_id)
            reply, trailer = await self._call(request.session_id, request, {"name": new_name}, seconds, metadata)
        for session in reply.sessions:
            session.session_id = new_name
        return reply, trailer

    async def trailer(self, request: Message) -> Any:
        raise NotShown("MCP has no trailer")

    async def send_unknown_field(self, request: Message) -> None:
        raise NotShown("MCP has no fields but arguments of tools, which an environment may refuse")

    async def send_garbage(self, method: str) -> None:
        raise NotShown("MCP has its own error for bytes that are not a message")

    async def _call(
        self, name: str, request: Message, arguments: Mapping[str, Any], seconds: float, metadata: Metadata
    ) -> tuple[Any, Any]:
        """Call the request's tool on the session with this name, and return the reply and the trailer."""
        method = method_of(request)
        tool = _TOOLS[method]
        fields = json_format.MessageToDict(request, preserving_proto_field_name=True)
        for field_name in ("session_id", "session_ids", "environment_id"):
            fields.pop(field_name, None)
        if isinstance(request, pb.ResetRequest | pb.StepRequest):  # the server fills in an absent epoch
            fields["epoch"] = request.epoch
        if isinstance(request, pb.StepRequest):
            tool, arguments = _turn(request, self._state.tools)
            if tool != "step" or "actions" in arguments:
                fields.pop("actions", None)
            fields.pop("step_index", None)
        if isinstance(request, pb.ForkRequest):
            fields |= {"epoch": request.epoch, "step_index": request.step_index}
        if isinstance(request, pb.RenderRequest):
            fields["mode"] = request.mode
        meta = {**_CLIENT, _REQUEST: fields}
        params = {"name": tool, "arguments": arguments, "_meta": meta}
        body = {"jsonrpc": "2.0", "id": next(self._ids), "method": "tools/call", "params": params}
        headers = [
            *metadata,
            ("accept", "application/json, text/event-stream"),
            ("mcp-protocol-version", VERSION),
            ("mcp-method", "tools/call"),
            ("mcp-name", tool),
        ]
        path = f"/mcp/{quote(self._environment(name), safe='')}/{quote(name, safe='')}"
        response = await self._send("POST", path, json.dumps(body).encode(), seconds, headers)
        trailer = tuple(response.headers.items())
        answer = response.json()
        result = answer.get("result")
        if result is None:
            raise Unmet(f"a result of the tool {tool}", str(answer.get("error"))[:200])
        structured = result.get("structuredContent")
        if result.get("isError"):
            status = json_format.ParseDict(structured or {}, status_pb2.Status(), ignore_unknown_fields=True)
            raise rpc_error_of(status, trailer)
        if _REPLY not in result.get("_meta", {}):
            raise Unmet(
                f"the reply of {method} in _meta, under {_REPLY}", "none", "send it to who sends a request there"
            )
        reply = read_reply(method, result["_meta"][_REPLY])
        if isinstance(reply, pb.StepResponse):
            _expect_shown(reply.transition, structured, [part.get("text") for part in result["content"]])
        return reply, trailer

    def _environment(self, name: str) -> str:
        """Return the environment of a session, or any environment if the session is unknown."""
        environments = self._state.environments
        return environments.get(name) or next(iter(environments.values()), "unknown")


def _turn(request: pb.StepRequest, tools: Names[str]) -> tuple[str, dict[str, Any]]:
    """Return the tool that plays a turn, and its arguments. Actions that do not fit into arguments are left out.

    tools: names of tools that environments define.
    """
    index = {"step_index": request.step_index}
    kinds = [action.WhichOneof("kind") for action in request.actions]
    if kinds == ["tool_call"] and request.actions[0].tool_call.name in tools - set(_TOOLS.values()):
        call = request.actions[0].tool_call
        try:
            arguments = json.loads(call.arguments_json or "{}")
        except ValueError:
            arguments = None
        if isinstance(arguments, dict) and "step_index" not in arguments:
            return call.name, {**arguments, **index}
    if all(kind == "text" for kind in kinds):
        return "step", {"actions": [action.text for action in request.actions], **index}
    return "step", index


def _expect_shown(transition: pb.Transition, structured: Any, texts: Sequence[str | None]) -> None:
    """Raise Unmet unless a tool result has the observation's texts as content, and the rest as structured content."""
    content = json_format.ParseDict(structured or {}, pb.Transition(), ignore_unknown_fields=True)
    facts = pb.Transition()
    facts.CopyFrom(transition)
    facts.ClearField("observation")
    expect(content == facts, f"structured content with {facts}", content, "show a transition as its ProtoJSON")
    for part in transition.observation.parts:
        if part.HasField("text"):
            expect(part.text in texts, f"content with the text {part.text[:80]!r}", texts)
