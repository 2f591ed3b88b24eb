"""The interface of a dialect, and functions that dialects share."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any, Protocol

from starpod.gateway.requests import Answer, Ask, Rejected

PIECE = 256
"""Maximum number of characters of text in one event."""


class Dialect(Protocol):
    """One API, whose requests are posted to `path`."""

    path: str

    def read(self, body: Mapping[str, Any]) -> Ask:
        """Parse the body of a request. Raise Rejected if it is invalid or not supported."""

    def write(self, ask: Ask, answer: Answer) -> dict[str, Any]:
        """Return the body of the response for a reply."""

    def events(self, ask: Ask, answer: Answer) -> Iterator[bytes]:
        """Yield the server-sent events of a reply."""

    def failure(self, refusal: Rejected) -> dict[str, Any]:
        """Return the body of an error response."""

    def failure_event(self, refusal: Rejected) -> bytes:
        """Return the event for an error in a stream that has begun."""


def event(data: Mapping[str, Any] | str, name: str = "") -> bytes:
    """Encode a server-sent event."""
    text = data if isinstance(data, str) else json.dumps(data, ensure_ascii=False, separators=(",", ":"))
    return f"{f'event: {name}' + chr(10) if name else ''}data: {text}\n\n".encode()


def pieces(text: str) -> Iterator[str]:
    """Split a text into pieces, one per event. An empty text has one empty piece."""
    yield text[:PIECE]
    for start in range(PIECE, len(text), PIECE):
        yield text[start : start + PIECE]
