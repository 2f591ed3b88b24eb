"""Replies of a process of class `process`, which are parsed without trust, because the process may be compromised.

A frame is a length of four bytes and a body. A reply's body is one letter and its value. Nothing is nested, so the cost
of a reply is proportional to its bytes. Requests are encoded as states, because the child trusts the server.
"""

from __future__ import annotations

import asyncio
import json
import struct
from typing import Any

LENGTH = struct.Struct("<I")
MAX_REPLY = 64 * 2**20
"""Maximum bytes of one reply, large enough for a message of the default maximum size."""
_MAX_ERROR = 2**16
_MAX_TEXT = 2_000


class BadProcessReply(ValueError):
    """Bytes that are not a valid reply."""


class ResultTooLarge(ValueError):
    """A result that is too large for a reply."""


def frame(body: bytes) -> bytes:
    """Return the body with its length in front."""
    return LENGTH.pack(len(body)) + body


def pack_result(value: str | bytes | None) -> bytes:
    """Encode the result of a call. Raises ResultTooLarge."""
    match value:
        case None:
            return b"n"
        case bytes():
            reply = b"b" + value
        case str():
            reply = b"s" + value.encode()
        case _:
            raise TypeError(f"{type(value).__name__} cannot be sent; str, bytes and None can")
    if len(reply) > MAX_REPLY:
        raise ResultTooLarge(f"{len(reply) - 1} bytes; at most {MAX_REPLY - 1} leave an environment's process")
    return reply


def pack_error(kind: str, message: str, detail: Any = None) -> bytes:
    """Encode the failure of a call.

    Args:
        kind: type of the failure, such as "state" or "busy".
        message: what happened; shortened to 2000 characters.
        detail: a JSON value that depends on the kind, such as the seconds after which to retry.
    """
    return b"e" + json.dumps([kind, message[:_MAX_TEXT], detail]).encode()


def unpack(body: bytes) -> tuple[str, Any, Any]:
    """Return ("ok", result, None), or a failure's kind, message and detail. Raises BadProcessReply."""
    letter, payload = body[:1], body[1:]
    try:
        match letter:
            case b"n" if not payload:
                return "ok", None, None
            case b"b":
                return "ok", payload, None
            case b"s":
                return "ok", payload.decode(), None
            case b"e" if len(payload) <= _MAX_ERROR:
                kind, message, detail = json.loads(payload)
                if isinstance(kind, str) and isinstance(message, str) and isinstance(detail, str | int | float | None):
                    return kind, message[:_MAX_TEXT], detail[:_MAX_TEXT] if isinstance(detail, str) else detail
    except (ValueError, TypeError, RecursionError) as error:
        raise BadProcessReply(f"its bytes cannot be read: {error}") from error
    raise BadProcessReply("its bytes are not a reply")


async def read_frame(reader: asyncio.StreamReader) -> bytes:
    """Return the next body. Raises BadProcessReply if its length exceeds MAX_REPLY."""
    (length,) = LENGTH.unpack(await reader.readexactly(LENGTH.size))
    if length > MAX_REPLY:
        raise BadProcessReply(f"it says to have {length} bytes; at most {MAX_REPLY} are read")
    return await reader.readexactly(length)
