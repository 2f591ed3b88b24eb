"""The environment of an agent's episode over HTTP: GET /environment, POST /environment/step, with its API key."""

from __future__ import annotations

from collections.abc import Callable

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from starpod.gateway.app import Endpoint, Keys, key_of, read_json
from starpod.gateway.played import OutsideAgent
from starpod.gateway.requests import bad_request, field


def endpoints(playing: Callable[[str], OutsideAgent], keys: Keys | None = None) -> dict[tuple[str, str], Endpoint]:
    """The two endpoints. playing: the episode of a name; raises Refused."""
    names = keys or Keys()

    async def observe(request: Request) -> Response:
        return JSONResponse(playing(names.name(key_of(request))).observe())

    async def step(request: Request) -> Response:
        body = await read_json(request)
        given = field(body, "actions", (list, str), [])
        actions = [given] if isinstance(given, str) else given
        if not all(isinstance(action, str) for action in actions):
            raise bad_request("`actions` must be a list of texts", "invalid_type")
        index = field(body, "step_index", int)
        return JSONResponse(await playing(names.name(key_of(request))).step(actions, index))

    return {("GET", "/environment"): observe, ("POST", "/environment/step"): step}
