"""The MCP server of a worker: tool calls become the contract's calls. Each name in the URL has its own session.

Programs may set further fields of the contract's request, which no tool argument covers, as ProtoJSON in `_meta`. The
reply is then in the result's `_meta`.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from google.protobuf.message import Message
from mcp.server.lowlevel import Server
from mcp.server.streamable_http_manager import StreamableHTTPSessionManager
from mcp_types import (
    CallToolRequestParams,
    CallToolResult,
    ListToolsResult,
    PaginatedRequestParams,
)
from starlette.types import Message as Sent

from starpod.env_server.episodes import convert
from starpod.env_server.episodes.errors import CallError, bad_argument
from starpod.env_server.operation.tenants import Tenant
from starpod.env_server.sessions.worker import Worker
from starpod.env_server.transports.encoding import check_values, read_json
from starpod.env_server.transports.exchange import HTTPExchange, HTTPProtocol
from starpod.env_server.transports.mcp.tools import failure_of, list_tools, meta_of, picture_of, result_of
from starpod.env_server.transports.service import EnvironmentService, server_version
from starpod.env_server.transports.tools import NamedSession, SessionNames, actions_of, whole_number
from starpod.v1 import environment_pb2 as pb

PATH = "/mcp"
_NAME_CHARACTERS = 128
_CALLER = "starpod.caller"
_MCP_SESSION = "mcp-session-id"
_TOOL_CALL, _INITIALIZE = b'"tools/call"', b'"initialize"'
_REQUEST = "starpod.v1/request"
"""Key in `_meta` of further fields of the contract's request."""
Fields = Mapping[str, Any]
M = TypeVar("M", bound=Message)


def _method(body: bytes) -> object:
    """Return the method of a message, or None if the body is not a message. The SDK then reports this to the caller."""
    try:
        message = json.loads(body)
    except (ValueError, RecursionError):
        return None
    return message.get("method") if isinstance(message, dict) else None


@dataclass(eq=False)
class _MCPSession(NamedSession):
    """A named session and its last result."""

    last: bytes = b""
    """Digest of the last call, including its MCP session and request id."""
    result: CallToolResult | None = None
    """Result of the last call."""
    forked: tuple[pb.ForkRequest, pb.ForkResponse] | None = None
    """Fork that created the session, and its reply."""

    def is_at(self, session: pb.Session) -> bool:
        return (self.session_id, self.epoch, self.step_index) == (session.session_id, session.epoch, session.step_index)


@dataclass(frozen=True)
class _Caller:
    """A caller, its environment and the name of its session. `mcp_session` is MCP's session id, if any."""

    tenant: Tenant
    environment: str
    name: str
    mcp_session: str


class MCPService(HTTPProtocol):
    """The MCP service (streamable HTTP) at /mcp/ENVIRONMENT and /mcp/ENVIRONMENT/NAME.

    It answers requests while `run` is running.
    """

    name = "MCP"
    paths = (PATH, f"{PATH}/{{rest:path}}")

    def __init__(self, service: EnvironmentService, worker: Worker) -> None:
        self._service = service
        self._worker = worker
        self._played = SessionNames[_MCPSession]()
        # The SDK logs each request of the older protocol as the end of a session.
        logging.getLogger("mcp.server.streamable_http").setLevel(logging.WARNING)
        server: Server[Any] = Server(
            "starpod", version=server_version(), on_list_tools=self._list_tools, on_call_tool=self._call_tool
        )
        # Stateless, because these tools do not need the SDK's sessions, which would need a limit per token besides the
        # limit on environments' sessions.
        self._manager = StreamableHTTPSessionManager(
            server, json_response=True, stateless=True, max_request_body_size=worker.limits.max_message_bytes
        )

    async def run(self, ready: asyncio.Event) -> None:
        """Serve until cancelled."""
        async with self._manager.run():
            ready.set()
            await asyncio.Event().wait()

    async def answer(self, exchange: HTTPExchange, body: bytes, tenant: Tenant) -> None:
        """Answer a request whose body has been received. Raises OVERLOADED, UNKNOWN_ENVIRONMENT or BAD_ARGUMENT."""
        scope, send = exchange.scope, exchange.send
        if _TOOL_CALL not in body:  # tool calls are counted as the contract's calls that they become
            self._worker.count_received(tenant, len(body))
            tenant.take_calls(1, len(body))
        check_values(body.decode(errors="replace"))
        environment, _, name = exchange.path.removeprefix(PATH).strip("/").partition("/")
        mcp_session = exchange.header(_MCP_SESSION)
        name = name or mcp_session
        if len(name) > _NAME_CHARACTERS:
            raise bad_argument("name", f"has {len(name)} characters; use at most {_NAME_CHARACTERS}")
        if not environment and len(ids := self._worker.registry.ids) == 1:
            environment = ids[0]
        environment_class = self._worker.registry.find(environment, "")
        scope[_CALLER] = _Caller(tenant, environment_class.spec.id, name, mcp_session)
        is_sent = False

        async def receive() -> dict[str, Any]:
            nonlocal is_sent
            if is_sent:
                await asyncio.Event().wait()  # until cancelled: the connection is not watched
            is_sent = True
            return {"type": "http.request", "body": body, "more_body": False}

        async def send_named(message: Sent) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message["headers"], (_MCP_SESSION.encode(), uuid.uuid4().hex.encode())]
            await send(message)

        # A client of the older protocol gets a session id at the start and sends it with later requests. The id serves
        # as the session's name if the URL has no NAME.
        is_start = not mcp_session and _INITIALIZE in body and _method(body) == "initialize"
        await self._manager.handle_request(scope, receive, send_named if is_start else send)

    # --- handlers of the SDK -----------------------------------------------------------------------------------------

    async def _list_tools(self, context: Any, _: PaginatedRequestParams | None) -> ListToolsResult:
        caller: _Caller = context.request.scope[_CALLER]
        return ListToolsResult(tools=list_tools(self._spec(caller)))

    async def _call_tool(self, context: Any, params: CallToolRequestParams) -> CallToolResult:
        caller: _Caller = context.request.scope[_CALLER]
        work = asyncio.get_running_loop().create_task(self._play(caller, context.request_id, params))
        self._worker.keep(work)  # a caller that gives up cancels its wait, not the work
        return await asyncio.shield(work)

    async def _play(self, caller: _Caller, request_id: Any, params: CallToolRequestParams) -> CallToolResult:
        tool, arguments = params.name, params.arguments or {}
        try:
            more = (params.meta or {}).get(_REQUEST)
            if more is not None and not isinstance(more, dict):
                raise bad_argument(_REQUEST, "is not an object")
            if not caller.name:
                raise bad_argument(
                    "url", f"names no session; call {PATH}/{caller.environment}/NAME, with a NAME of yours"
                )
            played = self._find(caller.tenant, caller.environment, caller.name)
            async with played.turn:
                digest = hashlib.sha256(repr((caller.mcp_session, request_id, tool, arguments, more)).encode()).digest()
                if caller.mcp_session and digest == played.last and played.result is not None:
                    return played.result
                reply, result = await self._call(caller, played, tool, arguments, more or {})
                if more is not None:
                    result.meta = meta_of(reply)
                played.last, played.result = digest, result
                return result
        except Exception as error:
            return failure_of(self._service.failure("MCP", error))

    # --- calls -------------------------------------------------------------------------------------------------------

    async def _call(
        self, caller: _Caller, played: _MCPSession, tool: str, arguments: Fields, request_fields: Fields
    ) -> tuple[Message, CallToolResult]:
        """Execute a tool call, and return the contract's reply and the tool's result.

        `request_fields` holds further fields of the contract's request.
        """
        match tool:
            case "reset":
                return await self._reset(caller, played, arguments, request_fields)
            case "observe":
                mode = "png" if arguments.get("image") else "text"
                frame = await self._ask(caller, self._read(pb.RenderRequest, played, {"mode": mode, **request_fields}))
                return frame, picture_of(frame)
            case "fork":
                return await self._fork(caller, played, arguments, request_fields)
            case "close":
                close_reply = await self._ask(caller, pb.CloseRequest(session_ids=[played.session_id]))
                played.session_id = ""
                return close_reply, result_of(None, {"closed": True})
        tool_arguments = {name: value for name, value in arguments.items() if name != "step_index"}
        actions = [] if "actions" in request_fields else actions_of(self._spec(caller), tool, tool_arguments)
        index = whole_number("step_index", arguments.get("step_index", played.step_index), 2**32)
        step = self._read(pb.StepRequest, played, {"epoch": played.epoch, "step_index": index, **request_fields})
        step.actions.extend(actions)
        reply: pb.StepResponse = await self._ask(caller, step)
        played.step_index = reply.next_step_index
        facts = {"next_step_index": reply.next_step_index}
        return reply, result_of(reply.transition.observation, facts, reply.transition)

    def _read(self, kind: type[M], played: _MCPSession, fields: Fields) -> M:
        """Return a request for the session with the given fields. Raises BAD_ARGUMENT if a field is wrong."""
        return read_json(kind, json.dumps({**fields, "session_id": played.session_id}).encode(), self._worker.limits)

    async def _reset(
        self, caller: _Caller, played: _MCPSession, arguments: Fields, request_fields: Fields
    ) -> tuple[Message, CallToolResult]:
        fields = dict(request_fields)
        want = request_fields.get("want") or {}
        if not isinstance(want, dict):
            raise bad_argument("want", "is not an object")
        if not request_fields or "image" in arguments:
            fields["want"] = {**want, "image": arguments.get("image") is True}
        if arguments.get("seed") is not None:
            fields["seed"] = whole_number("seed", arguments["seed"], 2**64)
        options = arguments.get("options")
        if options is not None:
            if not isinstance(options, dict):
                raise bad_argument("options", "is not an object")
            fields["options"] = options
        is_alive = "epoch" in request_fields or await self._alive(caller, played)
        if is_alive:
            request: Message = self._read(pb.ResetRequest, played, {"epoch": played.epoch, **fields})
        else:
            request = self._read(pb.OpenRequest, played, {**fields, "environment_id": caller.environment})
            _expect_one(request)
        reply = await self._ask(caller, request)
        session = reply.session if is_alive else reply.sessions[0]
        played.follow(session)
        facts = {"seed": str(session.seed), "next_step_index": session.step_index}
        return reply, result_of(session.observation, facts, text=reply.instructions)

    async def _fork(
        self, caller: _Caller, played: _MCPSession, arguments: Fields, request_fields: Fields
    ) -> tuple[Message, CallToolResult]:
        name = arguments.get("name")
        if not isinstance(name, str) or not name or "/" in name or len(name) > _NAME_CHARACTERS:
            raise bad_argument("name", f"is not a name of at most {_NAME_CHARACTERS} characters without a slash")
        copy = self._find(caller.tenant, caller.environment, name)
        position = {"epoch": played.epoch, "step_index": played.step_index}
        fork_request = _expect_one(self._read(pb.ForkRequest, played, {**position, **request_fields}))
        in_use = bad_argument("name", f"is {name!r}, which is in use; choose another one, or close it")
        if copy.turn.locked():  # Waiting could last forever: two sessions may fork to each other's names.
            raise in_use
        async with copy.turn:
            if await self._alive(caller, copy):
                # A repeated Fork, for example after a lost reply, returns the existing copy while nobody has played it.
                if copy.forked is None or copy.forked[0] != fork_request:
                    raise in_use
                reply = copy.forked[1]
                if not copy.is_at(reply.sessions[0]):
                    raise in_use
            else:
                reply = await self._ask(caller, fork_request)
                copy.follow(reply.sessions[0])
                copy.forked = fork_request, reply
        return reply, result_of(
            None, {"url": f"{PATH}/{caller.environment}/{name}", "next_step_index": copy.step_index}
        )

    async def _alive(self, caller: _Caller, played: _MCPSession) -> bool:
        session_ids = [played.session_id]
        return (
            bool(played.session_id) and not (await self._ask(caller, pb.RenewRequest(session_ids=session_ids))).missing
        )

    async def _ask(self, caller: _Caller, request: Message) -> Any:
        """Return the reply to a call of the contract, which takes the same path as over gRPC."""
        if getattr(request, "session_id", "-") == "":
            raise CallError("UNKNOWN_SESSION", "no episode has begun: call reset")

        return await self._service.ask(caller.tenant, request)

    def _spec(self, caller: _Caller) -> pb.EnvironmentSpec:
        return convert.spec_to(self._worker.registry.find(caller.environment, ""))

    def _find(self, tenant: Tenant, environment: str, name: str) -> _MCPSession:
        key = (tenant.id, environment, name)
        played = self._played.get(key)
        if played is None:
            self._played.make_room(self._service, self._worker.limits.max_sessions)
            played = self._played[key] = _MCPSession()
        return played


def _expect_one(request: Any) -> Any:
    """Return the Open or Fork request unchanged. Raises BAD_ARGUMENT if it asks for several sessions."""
    if request.count > 1:
        raise bad_argument("count", f"is {request.count}; a name is that of one session")
    return request
