"""Tool calls in text: how a prompt describes tools and their results, and how a reply's calls are found.

The format is that of Hermes and Qwen, which most chat templates with tools write: a JSON object with name and arguments
between <tool_call> tags. A reply that is nothing but such an object (Llama) is a call, too.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from starpod.gateway.requests import Call, Message
from starpod.trainer.prompts.grammar import THINK, THINK_END

_OPEN, _CLOSE = "<tool_call>", "</tool_call>"
_LONE = re.compile("[\ud800-\udfff]")
"""Half of a surrogate pair, which a model may write as an escape in JSON, and which is no text that can be sent."""
_BLANKS = re.compile(r"\s*")
_DECODER = json.JSONDecoder(strict=False)
"""Takes raw newlines in strings: models write them."""
_MOST_BROKEN = 64
"""Opening tags without a call behind them, after which the rest of a reply is text: time stays linear."""
_BEGUN = re.compile(r"\s*|-|\.|[eE][-+]?|t|tr|tru|f|fa|fal|fals|n|nu|nul")
"""What JSON may end with where it is cut outside of a text: between two values, or within one."""


class Parts(NamedTuple):
    """A reply taken apart. thought: None where there is none. text: what is neither thought nor call.

    end: number of characters of the reply up to the end of the last call; 0 without one.
    """

    thought: str | None
    text: str
    calls: tuple[Call, ...]
    end: int = 0


def parse_reply(raw: str, *, tools: bool, most_calls: int | None = None) -> Parts:
    """Take a reply apart. Calls are looked for where there are tools; what is no call stays text.

    The JSON of a call is decoded from its opening tag on, so that tags inside an argument belong to it. A last call
    that is cut in the middle of its JSON is neither call nor text.

    Args:
        raw: The reply, from its beginning.
        tools: Whether calls are looked for.
        most_calls: Number of calls after which the rest is not read; None for all.
    """
    thought, text = None, raw
    head, ended, rest = raw.partition(THINK_END)
    if ended and (begun := head.lstrip()).startswith(THINK):
        thought, text = begun.removeprefix(THINK).strip(), rest.lstrip()
    if not tools:
        return Parts(thought, text, ())
    start = len(raw) - len(text)
    if text.lstrip().startswith("{"):
        whole, place, _ = _read_call(text, 0)
        if whole is not None and not text[place:].strip():
            return Parts(thought, "", (whole,), start + place)
    calls: list[Call] = []
    kept: list[str] = []
    at = end = broken = 0
    while broken < _MOST_BROKEN and (most_calls is None or len(calls) < most_calls):
        opened = text.find(_OPEN, at)
        if opened < 0:
            break
        call, place, cut = _read_call(text, opened + len(_OPEN))
        if cut:
            kept.append(text[end:opened])
            end = len(text)
            break
        closed = _blanks(text, place)
        if call is None or not (closed == len(text) or text.startswith(_CLOSE, closed)):
            broken += 1
            at = opened + len(_OPEN)
            continue
        calls.append(call)
        kept.append(text[end:opened])
        at = end = min(closed + len(_CLOSE), len(text))
    if not kept:
        return Parts(thought, text, ())
    kept.append(text[end:])
    return Parts(thought, "".join(kept).strip(), tuple(calls), start + at if calls else 0)


def _read_call(text: str, start: int) -> tuple[Call | None, int, bool]:
    """Decode a call. Return it, None for what is none; where its JSON ends; and whether the text ends within it."""
    start = _blanks(text, start)
    if not text.startswith("{", start):
        return None, start, start == len(text)
    try:
        value, end = _DECODER.raw_decode(text, start)
    except json.JSONDecodeError as error:
        rest = text[error.pos :]
        open_string = error.msg.startswith(("Unterminated string", "Invalid \\")) and '"' not in rest[1:]
        cut = open_string or _BEGUN.fullmatch(rest) is not None
        return None, start, cut and text.find(_CLOSE, start) < 0
    except (ValueError, RecursionError):
        return None, start, False
    return _call_of(value), end, False


def _call_of(value: Any) -> Call | None:
    """Return the call that a decoded object is, with its arguments as JSON; None where it is none."""
    if not isinstance(value, dict) or not isinstance(name := value.get("name"), str) or not name or _LONE.search(name):
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
    return Call(name, _LONE.sub("\N{REPLACEMENT CHARACTER}", written))


def _blanks(text: str, start: int) -> int:
    """Return where the blanks end that begin at a place."""
    blanks = _BLANKS.match(text, start)
    return blanks.end() if blanks else start


def begin_call(tools: Sequence[Mapping[str, Any]], name: str) -> str:
    """How a reply that must call a tool begins: up to the arguments of that tool, or to the name of any.

    Without the blank that follows: tokenizers make it a part of the brace, and a small model that is given it apart
    writes no object.
    """
    if not name and len(tools) > 1:
        return f'{_OPEN}\n{{"name": "'
    return f'{_OPEN}\n{{"name": {json.dumps(name or tools[0]["function"]["name"])}, "arguments":'


def write_reply(message: Message) -> str:
    """An assistant's message as a policy would have written it."""
    nothing = "{}"
    calls = [
        f'{_OPEN}\n{{"name": {json.dumps(call.name)}, "arguments": {call.arguments.strip() or nothing}}}\n{_CLOSE}'
        for call in message.calls
    ]
    return "\n".join([message.text, *calls] if message.text else calls)


def describe_tools(tools: Sequence[Mapping[str, Any]]) -> str:
    """System text for a chat template without tools, in the words of Hermes. A small model repeats what stands between
    the tags, so this is no valid JSON."""
    listed = "\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools)
    return (
        "You may call one or more of these functions, described as JSON:\n"
        f"<tools>\n{listed}\n</tools>\n"
        f'To call one, write: {_OPEN}\n{{"name": <function-name>, "arguments": <args-json-object>}}\n{_CLOSE}'
    )


def describe_results(results: Iterable[str]) -> str:
    """A user's message with tools' results, for a chat template without their role."""
    return "\n".join(f"<tool_response>\n{result}\n</tool_response>" for result in results)
