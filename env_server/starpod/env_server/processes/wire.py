"""What a process of class `process` may say to the server: read without trust, whatever the process has become.

A frame is four bytes of length and a body; a reply's body is one letter and what it stands for. Nothing nests, so that
a reply costs the server what its bytes cost. (Requests are state-encoded: the child trusts the server.)
"""

from __future__ import annotations

import asyncio
import json
import struct
from typing import Any

LENGTH = struct.Struct("<I")
MAX_REPLY = 64 * 2**20
"""Bytes of one reply: as much as a message holds by default."""
_MAX_ERROR = 2**16
_MAX_TEXT = 2_000


class BadReply(ValueError):
    """These bytes are no reply."""


class TooLarge(ValueError):
    """A result that no reply can hold."""


def frame(body: bytes) -> bytes:
    """With the length in front."""
    return LENGTH.pack(len(body)) + body


def pack_result(value: str | bytes | None) -> bytes:
    """A call that succeeded. Raises TooLarge."""
    match value:
        case None:
            return b"n"
        case bytes():
            reply = b"b" + value
        case str():
            reply = b"s" + value.encode()
        case _:
            raise TypeError(f"{type(value).__name__} cannot travel; str, bytes and None can")
    if len(reply) > MAX_REPLY:
        raise TooLarge(f"{len(reply) - 1} bytes; at most {MAX_REPLY - 1} leave an environment's process")
    return reply


def pack_error(kind: str, message: str, detail: Any = None) -> bytes:
    """A call that failed; `kind` says how."""
    return b"e" + json.dumps([kind, message[:_MAX_TEXT], detail]).encode()


def unpack(body: bytes) -> tuple[str, Any, Any]:
    """("ok", result, None), or a failure's kind, message and detail. Raises BadReply."""
    letter, rest = body[:1], body[1:]
    try:
        match letter:
            case b"n" if not rest:
                return "ok", None, None
            case b"b":
                return "ok", rest, None
            case b"s":
                return "ok", rest.decode(), None
            case b"e" if len(rest) <= _MAX_ERROR:
                kind, message, detail = json.loads(rest)
                if isinstance(kind, str) and isinstance(message, str) and isinstance(detail, str | int | float | None):
                    return kind, message[:_MAX_TEXT], detail[:_MAX_TEXT] if isinstance(detail, str) else detail
    except (ValueError, TypeError, RecursionError) as error:
        raise BadReply(f"its bytes cannot be read: {error}") from error
    raise BadReply("its bytes are no reply")


async def read_frame(reader: asyncio.StreamReader) -> bytes:
    """The next body. Raises BadReply if it says to be larger than any reply."""
    (length,) = LENGTH.unpack(await reader.readexactly(LENGTH.size))
    if length > MAX_REPLY:
        raise BadReply(f"it says to have {length} bytes; at most {MAX_REPLY} are read")
    return await reader.readexactly(length)
