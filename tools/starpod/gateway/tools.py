"""Tool calls as text: how a prompt describes tools and their results, and how calls in a reply are parsed.

Tool calls are recognized in the format of Hermes and Qwen: a JSON object with name and arguments between <tool_call>
tags. Most chat templates with tools use it. A reply that consists only of such an object (Llama) is a call, too.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from starpod.gateway.requests import Message, ReplyCall
from starpod.trainer.prompts.grammar import CALL_TAGS, THINK, THINK_END

_OPEN, _CLOSE = CALL_TAGS
_LONE_SURROGATE = re.compile("[\ud800-\udfff]")
"""Half of a surrogate pair. A model may write one as a JSON escape, but it cannot be encoded and sent."""
_BLANKS = re.compile(r"\s*")
_DECODER = json.JSONDecoder(strict=False)
"""Decoder that accepts raw newlines in strings, because models write them."""
_MOST_BROKEN = 64
"""Maximum number of opening tags without a valid call. The text after these is not parsed, to keep the time linear."""
_INCOMPLETE_VALUE = re.compile(r"\s*|-|\.|[eE][-+]?|t|tr|tru|f|fa|fal|fals|n|nu|nul")
"""Matches the end of a JSON text that is cut outside of a string: between two values, in a number or in a literal."""


class ReplyParts(NamedTuple):
    """The parts of a reply."""

    thought: str | None
    text: str
    """The reply without thought and calls."""
    calls: tuple[ReplyCall, ...]
    end: int = 0
    """Number of characters of the reply up to the end of the last call; 0 without calls."""


def parse_reply(raw: str, *, tools: bool, most_calls: int | None = None) -> ReplyParts:
    """Split a reply into its parts. A malformed call remains text.

    Decoding begins at a call's opening tag and ends with its JSON, so that a tag inside an argument belongs to the
    argument. If the reply is cut within the JSON of its last call, that call is dropped.

    Args:
        raw: the reply, from its beginning.
        tools: whether to look for calls.
        most_calls: number of calls after which the rest is not parsed; None: no limit.
    """
    thought, text = None, raw
    head, think_end, tail = raw.partition(THINK_END)
    if think_end and (beginning := head.lstrip()).startswith(THINK):
        thought, text = beginning.removeprefix(THINK).strip(), tail.lstrip()
    if not tools:
        return ReplyParts(thought, text, ())
    start = len(raw) - len(text)
    if text.lstrip().startswith("{"):
        only_call, call_end, _ = _read_call(text, 0)
        if only_call is not None and not text[call_end:].strip():
            return ReplyParts(thought, "", (only_call,), start + call_end)
    calls: list[ReplyCall] = []
    texts: list[str] = []
    position = end = failures = 0
    while failures < _MOST_BROKEN and (most_calls is None or len(calls) < most_calls):
        open_index = text.find(_OPEN, position)
        if open_index < 0:
            break
        call, call_end, cut = _read_call(text, open_index + len(_OPEN))
        if cut:
            texts.append(text[end:open_index])
            end = len(text)
            break
        close_index = _skip_blanks(text, call_end)
        if call is None or not (close_index == len(text) or text.startswith(_CLOSE, close_index)):
            failures += 1
            position = open_index + len(_OPEN)
            continue
        calls.append(call)
        texts.append(text[end:open_index])
        position = end = min(close_index + len(_CLOSE), len(text))
    if not texts:
        return ReplyParts(thought, text, ())
    texts.append(text[end:])
    return ReplyParts(thought, "".join(texts).strip(), tuple(calls), start + position if calls else 0)


def _read_call(text: str, start: int) -> tuple[ReplyCall | None, int, bool]:
    """Decode a call. Return the call (None if malformed), the end index of its JSON, and whether its JSON is cut."""
    start = _skip_blanks(text, start)
    if not text.startswith("{", start):
        return None, start, start == len(text)
    try:
        value, end = _DECODER.raw_decode(text, start)
    except json.JSONDecodeError as error:
        tail = text[error.pos :]
        open_string = error.msg.startswith(("Unterminated string", "Invalid \\")) and '"' not in tail[1:]
        cut = open_string or _INCOMPLETE_VALUE.fullmatch(tail) is not None
        return None, start, cut and text.find(_CLOSE, start) < 0
    except (ValueError, RecursionError):
        return None, start, False
    return _as_call(value), end, False


def _as_call(value: Any) -> ReplyCall | None:
    """Return a decoded object as a call, with arguments as JSON text, or None if it is not a valid call."""
    if (
        not isinstance(value, dict)
        or not isinstance(name := value.get("name"), str)
        or not name
        or _LONE_SURROGATE.search(name)
    ):
        return None
    arguments = value.get("arguments", value.get("parameters", {}))
    try:
        if isinstance(arguments, str):  # already text
            arguments = _DECODER.decode(arguments)
        if not isinstance(arguments, dict):
            return None
        written = json.dumps(arguments, ensure_ascii=False, allow_nan=False)
    except (ValueError, RecursionError):
        return None
    return ReplyCall(name, _LONE_SURROGATE.sub("\N{REPLACEMENT CHARACTER}", written))


def _skip_blanks(text: str, start: int) -> int:
    """Return the index of the first character from `start` that is not blank."""
    blanks = _BLANKS.match(text, start)
    return blanks.end() if blanks else start


def begin_call(tools: Sequence[Mapping[str, Any]], name: str) -> str:
    """Return the beginning of a reply that must call a tool, up to the arguments.

    If several tools may be called, the beginning stops before the name. It never ends with a blank: tokenizers join a
    blank with the brace after it, and a small model that gets the blank as a separate token writes no object.
    """
    if not name and len(tools) > 1:
        return f'{_OPEN}\n{{"name": "'
    return f'{_OPEN}\n{{"name": {json.dumps(name or tools[0]["function"]["name"])}, "arguments":'


def write_reply(message: Message) -> str:
    """Return an assistant's message as a policy would write it."""
    no_arguments = "{}"
    calls = [
        f'{_OPEN}\n{{"name": {json.dumps(call.name)}, "arguments": {call.arguments.strip() or no_arguments}}}\n{_CLOSE}'
        for call in message.calls
    ]
    return "\n".join([message.text, *calls] if message.text else calls)


def describe_tools(tools: Sequence[Mapping[str, Any]]) -> str:
    """Return a system text that describes tools, worded as in Hermes, for a chat template without tools.

    The example between the tags is deliberately not valid JSON, so that it is no call when a small model repeats it.
    """
    lines = "\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools)
    return (
        "You may call one or more of these functions, described as JSON:\n"
        f"<tools>\n{lines}\n</tools>\n"
        f'To call one, write: {_OPEN}\n{{"name": <function-name>, "arguments": <args-json-object>}}\n{_CLOSE}'
    )


def describe_results(results: Iterable[str]) -> str:
    """Return a user message with tools' results, for a chat template without a tool role."""
    return "\n".join(f"<tool_response>\n{result}\n</tool_response>" for result in results)
