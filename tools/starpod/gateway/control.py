"""The HTTP API with which the owner of the gateway begins, rewards and ends sessions."""

from __future__ import annotations

import math
from collections.abc import Mapping
from http import HTTPStatus
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from starpod.gateway.app import Endpoint, Keys, key_of, read_json
from starpod.gateway.records import Record, Records
from starpod.gateway.requests import Rejected, bad_request, field
from starpod.v1.values import MAX_REWARD

_TEXTS = ("environment", "version", "task", "instructions")
_NUMBERS = ("group", "member", "seed")
_MOST_NUMBER = 2**53 - 1


def endpoints(records: Records, keys: Keys) -> dict[tuple[str, str], Endpoint]:
    """Return the endpoints under /sessions: begin, list, show, reward and end."""

    def require_token(request: Request) -> None:
        if not keys.admits(key_of(request)):
            raise Rejected(HTTPStatus.UNAUTHORIZED, "invalid_token", "send the gateway's token as a bearer token")

    async def begin(request: Request) -> Response:
        require_token(request)
        body = await read_json(request)
        values: dict[str, Any] = {name: value for name in _TEXTS if (value := field(body, name, str)) is not None}
        for name in _NUMBERS:
            if (number := field(body, name, int)) is not None:
                if not 0 <= number <= _MOST_NUMBER:
                    raise bad_request(f"`{name}` must be at least 0, and at most {_MOST_NUMBER}")
                values[name] = number
        return JSONResponse(_describe_record(records.begin(field(body, "name", str, ""), values), keys))

    async def count(request: Request) -> Response:
        require_token(request)
        return JSONResponse(records.counts())

    async def show(request: Request) -> Response:
        require_token(request)
        return JSONResponse(_describe_record(records.record(request.path_params["name"]), keys))

    async def reward(request: Request) -> Response:
        require_token(request)
        body = await read_json(request)
        value = field(body, "value", (int, float), math.nan)
        if not abs(value) <= MAX_REWARD:
            raise bad_request(f"`value` must be a number from -{MAX_REWARD:g} to {MAX_REWARD:g}")
        record = records.record(request.path_params["name"])
        record.reward(float(value), field(body, "key", str, ""))
        return JSONResponse(_describe_record(record, keys))

    async def end(request: Request) -> Response:
        require_token(request)
        body = await read_json(request)
        values: Mapping[str, Any] = {
            "end": field(body, "end", str, ""),
            "success": field(body, "success", bool),
            "error": field(body, "error", str, ""),
        }
        name = request.path_params["name"]
        return JSONResponse({"name": name, "over": True, "return": records.end(name, values)})

    return {
        ("POST", "/sessions"): begin,
        ("GET", "/sessions"): count,
        ("GET", "/sessions/{name}"): show,
        ("POST", "/sessions/{name}/reward"): reward,
        ("POST", "/sessions/{name}/end"): end,
    }


def _describe_record(record: Record, keys: Keys) -> dict[str, Any]:
    session, episode = record.session, record.episode
    return {
        "name": session.name,
        "api_key": keys.key(session.name),
        "group": episode.group,
        "member": episode.member,
        "replies": session.replies,
        "tokens": session.tokens,
        "return": episode.total_reward,
        "over": bool(session.over),
    }
