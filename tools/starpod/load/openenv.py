"""OpenEnv servers: a WebSocket for each session, JSON messages `reset` and `step`, as its own client sends them."""

from __future__ import annotations

import asyncio
import json
import urllib.error
import urllib.request
from collections.abc import Coroutine, Mapping, Sequence
from typing import Any

import click
import websockets.asyncio.client as websockets
from websockets.exceptions import ConnectionClosed, WebSocketException

from starpod.client.catalog import TIMEOUT_SECONDS
from starpod.client.errors import (
    BadArgument,
    DeadlineExceeded,
    EnvironmentBug,
    Overloaded,
    SessionLost,
    StarpodError,
    Unreachable,
)
from starpod.client.transport import Backoff
from starpod.load.plan import Place, Plan
from starpod.load.wire import LoadSession, Receiver, Server, clock

MAX_MESSAGE_BYTES = 100 * 1024 * 1024
"""What its own client takes."""

_ERRORS: dict[str, type[StarpodError]] = {
    "INVALID_JSON": BadArgument,
    "UNKNOWN_TYPE": BadArgument,
    "VALIDATION_ERROR": BadArgument,
    "EXECUTION_ERROR": EnvironmentBug,
    "CAPACITY_REACHED": Overloaded,
    "FACTORY_ERROR": EnvironmentBug,
    "SESSION_ERROR": SessionLost,
}


def websocket_url(url: str) -> str:
    """ws://host:port/ws for http://host:port. Raises ValueError if it is no URL."""
    scheme, separator, rest = url.rstrip("/").partition("://")
    if not separator or scheme not in ("http", "https", "ws", "wss") or not rest:
        raise ValueError(f"{url!r} is not the URL of an OpenEnv server, as in http://127.0.0.1:8000")
    return f"{scheme.replace('http', 'ws')}://{rest}/ws"


class OpenEnvServer(Server):
    """With OpenEnv a connection is a session: to open is to connect and to reset, to close is to disconnect."""

    def __init__(self, number: int, place: Place, plan: Plan, receiver: Receiver) -> None:
        super().__init__(number, place, plan, receiver)
        self._url = websocket_url(place.address)
        self._ready = False
        self._error: StarpodError | None = None
        self._lost = asyncio.Event()
        self._loop = asyncio.get_running_loop()
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def ready(self) -> bool:
        return self._ready

    @property
    def error(self) -> StarpodError | None:
        return self._error

    def start(self) -> None:
        self._spawn(self._connect_again())

    async def close(self) -> None:
        self._ready = False
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def send(self, session: LoadSession) -> None:
        self._spawn(self._ask(session))

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = self._loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _connect_again(self) -> None:
        backoff = Backoff(0.05, 0.5)
        while True:
            try:
                await (await self._connect()).close()
            except StarpodError as error:
                self._error = error
            else:
                backoff.reset()
                self._ready, self._error = True, None
                self._receiver.connected()
                self._lost.clear()
                await self._lost.wait()
            await asyncio.sleep(backoff.wait())

    async def _ask(self, session: LoadSession) -> None:
        try:
            async with asyncio.timeout(self._plan.timeout):
                done = await self._exchange(session)
        except TimeoutError:
            error: StarpodError = DeadlineExceeded(f"no reply within {self._plan.timeout:g} s")
        except StarpodError as failure:
            error = failure
        except (ConnectionClosed, OSError, WebSocketException) as failure:
            error = Unreachable(str(failure) or type(failure).__name__)
        else:
            if session.call == "step":
                self._receiver.stepped(self, [session], (0,) if done else (), clock())
            else:
                self._receiver.answered(session, None, clock())
            return
        if isinstance(error, Unreachable):
            self._ready, self._error = False, error
            self._lost.set()
        if session.socket is not None:
            # Replies carry no ids: after a failure it is unclear whose the next one is.
            await session.socket.close()
        self._receiver.failed(session, error, clock())

    async def _exchange(self, session: LoadSession) -> bool:
        """Whether the episode is over."""
        if session.call == "close":
            socket, session.socket = session.socket, None
            if socket is not None:
                await socket.send('{"type": "close"}')
                await socket.close()
            return False
        if session.call == "open":
            session.socket = await self._connect()
        if session.call == "step":
            message = f'{{"type": "step", "data": {session.actions[0]}}}'
        else:
            message = json.dumps({"type": "reset", "data": session.request})
        await session.socket.send(message)
        reply = json.loads(await session.socket.recv())
        data = reply.get("data", {})
        if reply.get("type") == "error":
            kind = _ERRORS.get(data.get("code", ""), SessionLost)
            raise kind(f"{data.get('message', 'no message')} ({data.get('code', 'no code')})")
        return bool(data.get("done"))

    async def _connect(self) -> websockets.ClientConnection:
        try:
            return await websockets.connect(
                self._url, open_timeout=self._plan.timeout, max_size=MAX_MESSAGE_BYTES, proxy=None
            )
        except (OSError, WebSocketException, TimeoutError) as error:
            raise Unreachable(f"no OpenEnv server answers at {self._url} ({error})") from None


# --- what a server says of itself -------------------------------------------------------------------------------------


def find_openenv(url: str) -> dict[str, Any]:
    """What an OpenEnv server says of itself, as far as it does. Raises ClickException if nothing answers."""
    try:
        websocket_url(url)
    except ValueError as error:
        raise click.BadParameter(str(error), param_hint="ADDRESS") from None
    base = url.rstrip("/").replace("ws://", "http://", 1).replace("wss://", "https://", 1)
    schema, metadata = _get(f"{base}/schema"), _get(f"{base}/metadata")
    return {
        "kind": "openenv",
        "name": metadata.get("name") or "",
        "version": metadata.get("version") or "",
        "replicas": [base],
        "action_schema": schema.get("action") or {},
    }


def _get(url: str) -> dict[str, Any]:
    """The JSON object at a URL; empty where the server has none there. Raises ClickException if nothing answers."""
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(url, timeout=TIMEOUT_SECONDS) as response:
            value = json.load(response)
    except (urllib.error.HTTPError, ValueError):
        value = {}
    except OSError as error:
        raise click.ClickException(f"no OpenEnv server answers at {url.rpartition('/')[0]} ({error})") from None
    return value if isinstance(value, dict) else {}


def openenv_actions(actions: Sequence[str], schema: Mapping[str, Any]) -> tuple[str, ...]:
    """The actions as JSON objects. Raises UsageError if there is none, or one is not an object."""
    if not actions:
        fields = ", ".join(name for name in schema.get("properties", {}) if name not in ("metadata",))
        raise click.UsageError(
            f"an OpenEnv server lists no actions: give some with --action JSON (its fields: {fields or 'none'})"
        )
    for action in actions:
        try:
            fine = isinstance(json.loads(action), dict)
        except ValueError:
            fine = False
        if not fine:
            raise click.BadParameter(
                f'{action!r} is not a JSON object, as in {{"name": "Left"}}', param_hint="--action"
            )
    return tuple(actions)
