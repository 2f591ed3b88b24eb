"""Tool calls in text: how a prompt describes tools and their results, and how a reply's calls are found.

The format is that of Hermes and Qwen, which most chat templates with tools write: a JSON object with name and arguments
between <tool_call> tags. A reply that is nothing but such an object (Llama) is a call, too.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

from starpod.gateway.requests import Call, Message
from starpod.trainer.prompts.grammar import THINK, THINK_END

_OPEN, _CLOSE = "<tool_call>", "</tool_call>"
_LONE = re.compile("[\ud800-\udfff]")
"""Half of a surrogate pair, which a model may write as an escape in JSON, and which is no text that can be sent."""
_CALL = re.compile(rf"{_OPEN}\s*(.*?)\s*(?:{_CLOSE}|\Z)", re.DOTALL)


class Parts(NamedTuple):
    """A reply taken apart. thought: None where there is none. text: what is neither thought nor call."""

    thought: str | None
    text: str
    calls: tuple[Call, ...]


def parse_reply(raw: str, *, tools: bool) -> Parts:
    """Takes a reply apart. Calls are looked for where there are tools; what is no call stays text."""
    thought, text = None, raw
    head, end, rest = raw.partition(THINK_END)
    if end and (begun := head.lstrip()).startswith(THINK):
        thought, text = begun.removeprefix(THINK).strip(), rest.lstrip()
    if not tools:
        return Parts(thought, text, ())
    calls = [call for match in _CALL.finditer(text) if (call := _parse_call(match[1])) is not None]
    if calls:
        text = _CALL.sub(lambda match: "" if _parse_call(match[1]) is not None else match[0], text)
        return Parts(thought, text.strip(), tuple(calls))
    whole = _parse_call(text.strip())
    return Parts(thought, text, ()) if whole is None else Parts(thought, "", (whole,))


def _parse_call(text: str) -> Call | None:
    try:
        value = json.loads(text)
        if not isinstance(value, dict) or not isinstance(name := value.get("name"), str) or not name:
            return None
        arguments = value.get("arguments", value.get("parameters", {}))
        if isinstance(arguments, str):  # already text
            with suppress(ValueError):
                loaded = json.loads(arguments)
                arguments = loaded if isinstance(loaded, dict) else arguments
        if isinstance(arguments, dict):
            arguments = json.dumps(arguments, ensure_ascii=False, allow_nan=False)
    except (ValueError, RecursionError):
        return None
    if not isinstance(arguments, str) or _LONE.search(name):
        return None
    return Call(name, _LONE.sub("\N{REPLACEMENT CHARACTER}", arguments))


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
    calls = [
        f'{_OPEN}\n{{"name": {json.dumps(call.name)}, "arguments": {call.arguments}}}\n{_CLOSE}'
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
