"""Reading of what untrusted programs, models, servers and files say. The results can be sent, stored and shown."""

from __future__ import annotations

import json
import re
import time
from email.utils import parsedate_to_datetime
from typing import Any, NamedTuple

_HALF_PAIR = re.compile("[\ud800-\udfff]")


def read_untrusted_json(data: bytes | str) -> Any:
    """Return the value of a JSON text that untrusted code or a model wrote.

    JSON can spell an unpaired surrogate, which no message can hold. It becomes U+FFFD. Raw newlines in texts are
    accepted, because models write them.

    Raises:
        ValueError: the text is not JSON, is not UTF-8, or is nested too deeply.
    """
    text = data.decode() if isinstance(data, bytes) else data
    try:
        value = json.loads(text, strict=False)
        return _with_whole_pairs(value) if "\\ud" in text.lower() else value
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def _with_whole_pairs(value: Any) -> Any:
    if isinstance(value, str):
        return _HALF_PAIR.sub("\N{REPLACEMENT CHARACTER}", value)
    if isinstance(value, dict):
        return {_with_whole_pairs(name): _with_whole_pairs(item) for name, item in value.items()}
    if isinstance(value, list):
        return [_with_whole_pairs(item) for item in value]
    return value


class Completion(NamedTuple):
    """The first choice of a chat completion."""

    text: str
    """Content of the message; a list of parts is joined, and a message without content has an empty text."""
    finish: str | None
    """Reason why the model stopped, such as "stop" or "length"."""
    usage: Any
    """The reply's `usage`, not checked."""


def read_completion(data: bytes | str) -> Completion:
    """Return what an API for chat completions like OpenAI's replied. Raises ValueError if it is malformed."""
    try:
        reply = read_untrusted_json(data)
    except ValueError as error:
        raise ValueError(f"the reply is not JSON ({error}): {data[:80]!r}") from None
    match reply:
        case {"choices": [{"message": dict(message), **choice}, *_]}:
            content, finish = message.get("content"), choice.get("finish_reason")
        case _:
            raise ValueError(f"the reply has no message: {data[:200]!r}")
    if isinstance(content, list):
        texts = [part.get("text") for part in content if isinstance(part, dict)]
        content = "".join(text for text in texts if isinstance(text, str))
    if not isinstance(content, str | None):
        raise ValueError(f"the reply's message has no text: {data[:200]!r}")
    if not isinstance(finish, str | None):
        raise ValueError(f"the reply has the finish reason {finish!r:.80}")
    return Completion(content or "", finish, reply.get("usage"))


def wait_seconds(retry_after: str) -> float:
    """Return the seconds to wait by a Retry-After header, which is a number or a date; 1 if it is neither."""
    if retry_after.isascii() and retry_after.isdigit():
        return float(retry_after)
    try:
        return max(0.0, parsedate_to_datetime(retry_after).timestamp() - time.time())
    except ValueError:
        return 1.0
