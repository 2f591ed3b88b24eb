"""The interface of a dialect, and functions that dialects share."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Mapping
from typing import Any, Protocol

from starpod.gateway.requests import Answer, Ask, Rejected
from starpod.gateway.streams import LiveReply


class Dialect(Protocol):
    """One API, whose requests are posted to `path`."""

    path: str

    def read(self, body: Mapping[str, Any]) -> Ask:
        """Parse the body of a request. Raise Rejected if it is invalid or not supported."""

    def write(self, ask: Ask, answer: Answer) -> dict[str, Any]:
        """Return the body of the response for a reply."""

    def events(self, ask: Ask, live: LiveReply) -> AsyncIterator[bytes]:
        """Yield the server-sent events of a reply while it is sampled. Raise Rejected if it fails."""

    def failure(self, refusal: Rejected) -> dict[str, Any]:
        """Return the body of an error response."""

    def failure_event(self, refusal: Rejected, number: int) -> bytes:
        """Return the event for an error in a stream that has begun. number: how many events it has had."""


def event(data: Mapping[str, Any] | str, name: str = "") -> bytes:
    """Encode a server-sent event."""
    text = data if isinstance(data, str) else json.dumps(data, ensure_ascii=False, separators=(",", ":"))
    return f"{f'event: {name}' + chr(10) if name else ''}data: {text}\n\n".encode()
