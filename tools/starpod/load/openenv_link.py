"""An OpenEnv server: a WebSocket for each session, JSON messages `reset` and `step`, as its own client sends them."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from typing import Any

import websockets.asyncio.client as websockets
from websockets.exceptions import ConnectionClosed, WebSocketException

from starpod.client.errors import (
    BadArgument,
    DeadlineExceeded,
    EnvironmentBug,
    Overloaded,
    SessionLost,
    StarpodError,
    Unreachable,
)
from starpod.load.link import Link, Player, clock

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


class OpenEnvLink(Link):
    """With OpenEnv a connection is a session: to open is to connect and to reset, to close is to hang up."""

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self._url = websocket_url(self.place.address)
        self._tasks: set[asyncio.Task[None]] = set()
        self._broken = asyncio.Event()

    def send(self, player: Player) -> None:
        task = self._loop.create_task(self._ask(player))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _serve(self, up: Callable[[], None]) -> None:
        self._broken.clear()
        socket = await self._connect()
        await socket.close()
        up()
        await self._broken.wait()
        raise self.error or Unreachable("the connection ended")

    def _drop(self, error: StarpodError) -> None:
        """Each call learns of it from its own connection."""

    async def _ask(self, player: Player) -> None:
        try:
            async with asyncio.timeout(self._plan.timeout):
                done = await self._exchange(player)
        except TimeoutError:
            error: StarpodError = DeadlineExceeded(f"no reply within {self._plan.timeout:g} s")
        except StarpodError as failure:
            error = failure
        except (ConnectionClosed, OSError, WebSocketException) as failure:
            error = Unreachable(str(failure) or type(failure).__name__)
        else:
            now = clock()
            if player.call == "step":
                self._director.stepped(player, done, now)
            else:
                self._director.answered(player, None, now)
            return
        if isinstance(error, Unreachable):
            self.ready, self.error = False, error
            self._broken.set()
        if player.socket is not None:
            # Replies carry no ids: after a failure it is unclear whose the next one is.
            await player.socket.close()
        self._director.failed(player, error, clock())

    async def _exchange(self, player: Player) -> bool:
        """Whether the episode is over."""
        if player.call == "close":
            socket, player.socket = player.socket, None
            if socket is not None:
                await socket.send('{"type": "close"}')
                await socket.close()
            return False
        if player.call == "open":
            player.socket = await self._connect()
        if player.call == "step":
            message = f'{{"type": "step", "data": {player.turn[0]}}}'
        else:
            message = json.dumps({"type": "reset", "data": player.request})
        await player.socket.send(message)
        reply = json.loads(await player.socket.recv())
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
