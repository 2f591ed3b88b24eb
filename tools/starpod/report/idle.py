"""A time limit for idle HTTP connections. It is longer than the limit of clients' connection pools."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from uvicorn.protocols.http.h11_impl import H11Protocol as Protocol
else:
    from uvicorn.protocols.http.auto import AutoHTTPProtocol as Protocol

IDLE_SECONDS = 75
"""Clients' pools drop idle connections after 5 to 60 s. If the server closes one at that moment, a request is lost."""


class IdleBoundProtocol(Protocol):
    """Closes a connection if no request begins within `timeout_keep_alive` seconds after its opening or last reply.

    uvicorn itself waits forever for the first request and for the rest of an incomplete head.
    """

    _deadline = 0.0

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._wait_for_request()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        waits = self.cycle is None or self.cycle.response_complete
        if waits and self.timeout_keep_alive_task is None and not self.transport.is_closing():
            self._arm()  # an incomplete head does not extend the deadline

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self.timeout_keep_alive_task is not None:
            self._wait_for_request()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._unset_keepalive_if_required()

    def _wait_for_request(self) -> None:
        self._deadline = self.loop.time() + self.timeout_keep_alive
        self._arm()

    def _arm(self) -> None:
        self._unset_keepalive_if_required()
        self.timeout_keep_alive_task = self.loop.call_at(self._deadline, self.timeout_keep_alive_handler)
