"""Interface of a dialect, and the parts that they share."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any, Protocol

from starpod.gateway.requests import Answer, Ask, Refused

PIECE = 256
"""Characters of a text in one event."""


class Dialect(Protocol):
    """One API. path: where its requests are posted to."""

    path: str

    def read(self, body: Mapping[str, Any]) -> Ask:
        """The request in a body. Raises Refused."""

    def write(self, ask: Ask, answer: Answer) -> dict[str, Any]:
        """The reply."""

    def events(self, ask: Ask, answer: Answer) -> Iterator[bytes]:
        """The same as server-sent events."""

    def failure(self, refused: Refused) -> dict[str, Any]:
        """An error."""

    def failure_event(self, refused: Refused) -> bytes:
        """An error in a response that has begun."""


def event(data: Mapping[str, Any] | str, name: str = "") -> bytes:
    """One server-sent event."""
    text = data if isinstance(data, str) else json.dumps(data, ensure_ascii=False, separators=(",", ":"))
    return f"{f'event: {name}' + chr(10) if name else ''}data: {text}\n\n".encode()


def pieces(text: str) -> Iterator[str]:
    """A text in pieces that make one event each; at least one."""
    yield text[:PIECE]
    for first in range(PIECE, len(text), PIECE):
        yield text[first : first + PIECE]
