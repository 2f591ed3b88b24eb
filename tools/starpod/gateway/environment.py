"""HTTP endpoints with which an agent plays its episode: GET /environment and POST /environment/step."""

from __future__ import annotations

from collections.abc import Callable

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from starpod.gateway.app import Endpoint, Keys, key_of, read_json
from starpod.gateway.played import OutsideAgent
from starpod.gateway.requests import bad_request, field


def endpoints(playing: Callable[[str], OutsideAgent], keys: Keys | None = None) -> dict[tuple[str, str], Endpoint]:
    """Return the two endpoints. playing: returns the agent of the named session, or raises Rejected."""
    names = keys or Keys()

    async def observe(request: Request) -> Response:
        return JSONResponse(playing(names.name(key_of(request))).observe())

    async def step(request: Request) -> Response:
        body = await read_json(request)
        value = field(body, "actions", (list, str), [])
        actions = [value] if isinstance(value, str) else value
        if not all(isinstance(action, str) for action in actions):
            raise bad_request("`actions` must be a list of texts", "invalid_type")
        index = field(body, "step_index", int)
        return JSONResponse(await playing(names.name(key_of(request))).step(actions, index))

    return {("GET", "/environment"): observe, ("POST", "/environment/step"): step}
