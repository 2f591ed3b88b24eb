"""What is asked of a server: a turn, which a Session asks itself, or any other call; and the same asked again."""

from __future__ import annotations

import asyncio
from typing import Any, Protocol

from google.protobuf.message import Message

from starpod.client.errors import BadArgument, ServerBug, StarpodError
from starpod.client.observation import Transition


class Entry(Protocol):
    """Something that is asked of a server: a turn (the Session itself) or any other call (a Request)."""

    def _encode(self) -> tuple[str, Any]: ...
    def _answer(self, kind: str, response: Any) -> None: ...
    def _refuse(self, error: StarpodError) -> None: ...


class Request:
    """One call other than a turn, with the future of its reply."""

    __slots__ = ("future", "kind", "message")

    def __init__(self, kind: str, message: Message, future: asyncio.Future[Any]) -> None:
        self.kind = kind
        self.message = message
        self.future = future

    def _encode(self) -> tuple[str, Message]:
        return self.kind, self.message

    def _answer(self, kind: str, response: Any) -> None:
        if self.future.done():
            return
        if kind == self.kind:
            self.future.set_result(response)
        else:
            self.future.set_exception(ServerBug(f"The server answered a {self.kind} call with {kind or 'nothing'}."))

    def _refuse(self, error: StarpodError) -> None:
        if not self.future.done():
            self.future.set_exception(error)


class Repeated:
    """A call that is asked again for want of a reply. since: the loop time at which it was first asked, about."""

    __slots__ = ("entry", "since")

    # Where the reply comes in a row of columns, it is settled by `_settle`.
    _checkpoints = True
    _show_key = True

    def __init__(self, entry: Entry, since: float) -> None:
        self.entry = entry
        self.since = since

    def _settle(self, transition: Transition, key: bytes, digest: int) -> None:
        session: Any = self.entry
        transition._key = key if session._show_key else b""
        session._settle(transition, key, digest)

    def _encode(self) -> tuple[str, Any]:
        return self.entry._encode()

    def _answer(self, kind: str, response: Any) -> None:
        self.entry._answer(kind, response)

    def _refuse(self, error: StarpodError) -> None:
        self.entry._refuse(error)


def unwanted(entry: Entry) -> bool:
    """Nobody waits for its reply any more."""
    entry = entry.entry if isinstance(entry, Repeated) else entry
    return isinstance(entry, Request) and entry.future.done()


def unsendable(error: Exception) -> BadArgument:
    return BadArgument(
        f"The call cannot be sent: {error}. Texts must be Unicode (no half of a surrogate pair), values must be JSON."
    )
