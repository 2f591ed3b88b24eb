"""The environments as an Open Reward Standard server: tasks are seeds, and tool calls are turns.

A call's `task_id`, which the standard uses to request a lost reply again, is the turn's step index. A turn is therefore
executed once, however often its reply is requested.
"""

from __future__ import annotations

import asyncio
import json
import re
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any

from starpod.env_server.episodes import convert
from starpod.env_server.episodes.errors import CallError, bad_argument
from starpod.env_server.operation.tenants import Tenant
from starpod.env_server.sessions.worker import Worker
from starpod.env_server.transports.encoding import check_values, read_json, write_json
from starpod.env_server.transports.exchange import HTTPExchange, HTTPProtocol, RequestRefused
from starpod.env_server.transports.service import EnvironmentService, server_version
from starpod.env_server.transports.tools import (
    NamedSession,
    SessionNames,
    actions_of,
    block_of,
    turn_tools,
    whole_number,
)
from starpod.v1 import environment_pb2 as pb

SPLITS = {"train": range(1_000), "test": range(1_000_000, 1_000_200)}
"""Seeds of the tasks by split. A split's name is also its type."""

_SESSION = "x-session-id"
_NAME_BYTES = 128
_PING_SECONDS = 10.0
_CHUNK = re.compile(r".{1,4096} *")
"""Pattern of one piece of a reply. No piece begins with a space, because clients strip leading spaces."""
_INDEX = re.compile(r"[0-9]{1,10}")
_REASONS = {"EPISODE_OVER": "episode_finished", "BAD_ARGUMENT": "input_validation"}
"""The standard's names of errors that the policy caused, keyed by the contract's reason."""

Json = dict[str, Any]


@dataclass(eq=False)
class _ORSSession(NamedSession):
    """A session that a caller named by an id."""

    environment: str = ""
    prompt: Sequence[Json] = ()
    """The instructions and the first observation."""


class ORSService(HTTPProtocol):
    """The service of the standard's paths, which begin at the server's root."""

    name = "ORS"

    def __init__(self, service: EnvironmentService, worker: Worker) -> None:
        self._service = service
        self._worker = worker
        self._played = SessionNames[_ORSSession]()

    def admit(self, exchange: HTTPExchange) -> None:
        if (key := exchange.header("x-api-key")) and not exchange.header("authorization"):
            exchange.metadata.append(("authorization", f"Bearer {key}"))

    def has_body(self, exchange: HTTPExchange) -> bool:
        """Return whether a POST has a body. If not, it must have the session header, which no other site can send."""
        return not (exchange.header("content-length") in ("", "0") and exchange.header(_SESSION))

    async def answer(self, exchange: HTTPExchange, body: bytes, tenant: Tenant) -> None:
        """Answer a request. Raises CallError, or RequestRefused for a path outside the standard."""
        self._worker.count_received(tenant, len(body))
        tenant.take_calls(1, len(body))
        check_values(body.decode(errors="replace"))
        fields = _object(body)
        environment, _, last = exchange.path.strip("/").rpartition("/")
        match exchange.method, last:
            case "POST", "call":
                await self._call(exchange, tenant, fields)
                return
            case "POST", "create_session":
                await exchange.start_events()
                await exchange.send_event(uuid.uuid4().hex.encode(), "task_id")
                await exchange.send_event(b"", "end")
                await exchange.end_events()
                return
        await exchange.respond(json.dumps(await self._read(exchange, tenant, environment, last, fields)).encode())

    async def _read(self, exchange: HTTPExchange, tenant: Tenant, environment: str, last: str, values: Json) -> Any:
        """Return the reply to a request other than `call` and `create_session`."""
        match exchange.method, last:
            case "GET", "list_environments":
                return self._worker.registry.ids
            case "GET", "health":
                return {"status": "ok"}
            case "GET", "version":
                return {"version": server_version(), "build_sha": None}
            case "GET", "splits":
                return [{"name": name, "type": name} for name in SPLITS]
            case "GET", "tools" | "task_tools":
                return self._tools(environment or self._session(exchange, tenant).environment)
            case "GET", "prompt":
                return self._session(exchange, tenant).prompt
            case "POST", "tasks":
                return self._tasks(environment, [{"seed": seed} for seed in _split(values)])
            case "POST", "num_tasks":
                return {"num_tasks": len(_split(values))}
            case "POST", "task":
                return {"task": {"seed": _seed(values)}, "env_name": self._id(environment)}
            case "POST", "task_range":
                seeds = _split(values)[_place(values, "start") : _place(values, "stop")]
                return self._tasks(environment, [{"seed": seed} for seed in seeds])
            case "POST", "create":
                return await self._create(exchange, tenant, values)
            case "POST", "ping":
                played = self._session(exchange, tenant)
                if (await self._service.ask(tenant, pb.RenewRequest(session_ids=[played.session_id]))).missing:
                    raise CallError("UNKNOWN_SESSION", "the session is gone: its lease has expired, or it was deleted")
                return {"status": "ok"}
            case "POST", "delete" | "delete_session":
                id = _session_id(exchange)
                if last == "delete" and (old_session := self._played.pop((tenant.id, id), None)) is not None:
                    await self._service.ask(tenant, pb.CloseRequest(session_ids=[old_session.session_id]))
                return {"sid": id}
        problem = f"there is no {exchange.method} {exchange.path[:80]} here"
        raise RequestRefused(HTTPStatus.NOT_FOUND, bad_argument("path", problem))

    # --- tasks and tools ---------------------------------------------------------------------------------------------

    def _id(self, name: str) -> str:
        """Return the id of the environment in a path. If the path has none, it is the only environment."""
        if not name and len(ids := self._worker.registry.ids) == 1:
            name = ids[0]
        return self._worker.registry.find(name, "").spec.id

    def _tasks(self, environment: str, tasks: list[Json]) -> Json:
        return {"tasks": tasks, "env_name": self._id(environment)}

    def _tools(self, environment: str) -> Json:
        spec = convert.spec_to(self._worker.registry.find(self._id(environment), ""))
        tools = [
            {"name": name, "description": description, "input_schema": schema}
            for name, description, schema in turn_tools(spec)
        ]
        blocks = ["text", "image"]
        return {"tools": tools, "terminal_tool": None, "supports_score_group": False, "message_block_types": blocks}

    # --- sessions ----------------------------------------------------------------------------------------------------

    def _session(self, exchange: HTTPExchange, tenant: Tenant) -> _ORSSession:
        played = self._played.get((tenant.id, _session_id(exchange)))
        if played is None:
            raise CallError("UNKNOWN_SESSION", "there is no session with this id: create it first")
        return played

    async def _create(self, exchange: HTTPExchange, tenant: Tenant, values: Json) -> Json:
        id = _session_id(exchange)
        if values.get("toolset_name"):
            raise bad_argument("toolset_name", "names the caller's tools; only the environment's are supported")
        task = values.get("task_spec")
        if task is None:
            task = {"seed": _seed(values)}
        if not isinstance(task, dict) or not isinstance(task.get("options", {}), dict):
            raise bad_argument("task_spec", 'is not a task; a task is {"seed": 7}, perhaps with "options": {...}')
        name = values.get("env_name")
        if name is not None and not isinstance(name, str):
            raise bad_argument("env_name", "is not text")
        environment = self._id(name or "")
        # The id is the key of Open, so a repeated request gets the same session.
        fields = {"environment_id": environment, "seed": whole_number("seed", task.get("seed", 0), 2**64), "key": id}
        open_json = json.dumps({**fields, "options": task.get("options", {})}).encode()
        reply: pb.OpenResponse = await self._service.ask(
            tenant, read_json(pb.OpenRequest, open_json, self._worker.limits)
        )
        session = reply.sessions[0]
        if session.session_id not in self._service.tables[tenant.id]:  # keys outlive their sessions
            raise CallError("UNKNOWN_SESSION", "the session of this id was deleted, or its lease expired: use a new id")
        old_session = self._played.get((tenant.id, id))
        if old_session is None or old_session.session_id != session.session_id:
            self._played.make_room(self._service, self._worker.limits.max_sessions)
            texts = filter(None, [reply.instructions])
            prompt = [*({"type": "text", "text": text} for text in texts), *_blocks(session.observation)]
            played = _ORSSession(environment=environment, prompt=prompt)
            played.follow(session)
            self._played[tenant.id, id] = played
        return {"sid": id}

    # --- turns -------------------------------------------------------------------------------------------------------

    async def _call(self, exchange: HTTPExchange, tenant: Tenant, values: Json) -> None:
        played = self._session(exchange, tenant)
        name, arguments, call_index = values.get("name"), values.get("input"), _index(values)
        if not isinstance(name, str) or not isinstance(arguments, dict):
            raise bad_argument("name, input", "are not a tool call: a name and an object")
        await exchange.start_events()
        try:
            async with played.turn:
                index = played.step_index if call_index is None else call_index
                await exchange.send_event(str(index).encode(), "task_id")
                work = asyncio.get_running_loop().create_task(self._play(tenant, played, index, name, arguments))
                self._worker.keep(work)  # a caller that gives up cancels its wait, not the work
                while not (await asyncio.wait({work}, timeout=_PING_SECONDS))[0]:
                    await exchange.send_event(b"", "ping")
            pieces = _CHUNK.findall(json.dumps(work.result()))
        except Exception as error:  # the response has begun, so the error is an event, which is a single line
            error_text = " ".join(str(self._service.failure("ORS", error)).splitlines())
            await exchange.send_event(error_text.encode(errors="replace"), "error")
        else:
            for number, piece in enumerate(pieces, 1):
                await exchange.send_event(piece.encode(), "end" if number == len(pieces) else "chunk")
        await exchange.end_events()

    async def _play(
        self, tenant: Tenant, session: _ORSSession, index: int, name: str, arguments: Mapping[str, Any]
    ) -> Json:
        """Return a call's result, or a wrong call's error as its result. Raises CallError for other errors."""
        try:
            actions = actions_of(convert.spec_to(self._worker.registry.find(session.environment, "")), name, arguments)
            step = pb.StepRequest(session_id=session.session_id, epoch=session.epoch, step_index=index, actions=actions)
            reply: pb.StepResponse = await self._service.ask(tenant, step)
        except CallError as error:
            if error.reason not in _REASONS:
                raise
            unknown = any(path == "name" for path, _ in error.violations)
            return {"ok": False, "error": error.message, "reason": "not_found" if unknown else _REASONS[error.reason]}
        session.step_index = max(session.step_index, reply.next_step_index)
        transition = reply.transition
        metadata = json.loads(write_json(transition))
        metadata.pop("observation", None)
        output = {
            "blocks": _blocks(transition.observation),
            "metadata": metadata,
            "reward": transition.reward,
            "finished": transition.terminated or transition.truncated,
        }
        return {"ok": True, "output": output}


def _blocks(observation: pb.Observation) -> list[Json]:
    return [block_of(part) for part in observation.parts]


def _session_id(exchange: HTTPExchange) -> str:
    id = exchange.header(_SESSION).strip()
    if not 0 < len(id.encode()) <= _NAME_BYTES:
        raise bad_argument(_SESSION, f"is not an id of 1 to {_NAME_BYTES} bytes")
    return id


def _object(body: bytes) -> Json:
    try:
        fields = json.loads(body or b"{}")
    except (ValueError, RecursionError) as error:
        raise bad_argument("request", f"is not JSON: {error}") from error
    if not isinstance(fields, dict):
        raise bad_argument("request", "is not a JSON object")
    return fields


def _split(values: Json) -> range:
    name = values.get("split")
    if not isinstance(name, str) or name not in SPLITS:
        name_text = repr(name[:80]) if isinstance(name, str) else "not text"
        raise bad_argument("split", f"is {name_text}; there are {', '.join(SPLITS)}")
    return SPLITS[name]


def _seed(values: Json) -> int:
    seeds = _split(values)
    return seeds[whole_number("index", values.get("index"), len(seeds))]


def _place(values: Json, name: str) -> int | None:
    """Return the start or stop of a range of tasks, as in a slice."""
    value = values.get(name)
    if value is not None and (isinstance(value, bool) or not isinstance(value, int)):
        raise bad_argument(name, "is not a whole number")
    return value


def _index(values: Json) -> int | None:
    """Return the index of the turn that is requested again, or None for a new turn."""
    value = values.get("task_id")
    if value is None:
        return None
    if not isinstance(value, str) or not _INDEX.fullmatch(value) or int(value) >= 2**32:
        raise bad_argument("task_id", "is none that this server gave")
    return int(value)
