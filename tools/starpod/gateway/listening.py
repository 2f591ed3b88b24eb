"""The gateway's socket in an event loop that has other work too, such as a trainer's."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, closing
from typing import Any

import uvicorn

from starpod.report.idle import IDLE_SECONDS, IdleBoundProtocol
from starpod.report.site import link, listen

_STARTED_SECONDS = 0.01


class _Server(uvicorn.Server):
    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Do not handle signals: the owner of the event loop does."""
        yield


@asynccontextmanager
async def listening(app: Any, host: str = "127.0.0.1", port: int = 0) -> AsyncIterator[str]:
    """Serve an ASGI application while the context lasts. Yield its URL, without a slash at the end."""
    config = uvicorn.Config(
        app,
        loop="none",
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        server_header=False,
        proxy_headers=False,
        backlog=1_024,
        http=IdleBoundProtocol,
        timeout_keep_alive=IDLE_SECONDS,
        timeout_graceful_shutdown=1,
    )
    with closing(listen(host, port)) as listener:
        server = _Server(config)
        task = asyncio.create_task(server.serve([listener]))
        while not server.started and not task.done():
            await asyncio.sleep(_STARTED_SECONDS)
        try:
            yield link(listener, host).rstrip("/")
        finally:
            server.should_exit = True
            await task
