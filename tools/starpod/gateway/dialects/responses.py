"""The dialect of OpenAI's responses API."""

from __future__ import annotations

import itertools
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any

from starpod.gateway.dialects.base import event
from starpod.gateway.dialects.chat import CHOICES, ChatCompletions
from starpod.gateway.requests import (
    Answer,
    Ask,
    Message,
    Rejected,
    Role,
    bad_request,
    choice_of,
    count,
    field,
    function_of,
    objects,
    refuse_given,
    schema_of,
    stops_of,
    text_of,
)
from starpod.gateway.streams import LiveReply
from starpod.trainer.prompts.formats.base import ReplyCall

_ROLES: dict[str, Role] = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant"}
_UNSUPPORTED: dict[str, Any] = {
    "background": False,
    "prompt": None,
    "max_tool_calls": None,
    "top_logprobs": 0,
    "truncation": "disabled",
    "context_management": [],
    "moderation": None,
}
"""Unsupported fields, each with the one value that is accepted because it has no effect."""
_PARTS = ("input_text", "output_text", "text", "refusal")

Event = tuple[str, dict[str, Any]]
"""An event's type, without "response.", and its fields."""


class Responses:
    """POST /v1/responses, without storage: each request holds its whole history.

    Consecutive items of the assistant form one reply. Reasoning is an item with text, which clients may send back or
    leave out.
    """

    path = "/v1/responses"

    def read(self, body: Mapping[str, Any]) -> Ask:
        if body.get("previous_response_id") or body.get("conversation"):
            raise bad_request(
                "this gateway stores no responses: send the whole history as `input`, instead of "
                "`previous_response_id` or `conversation`",
                "unsupported_parameter",
            )
        refuse_given(body, **_UNSUPPORTED)
        if "message.output_text.logprobs" in field(body, "include", list, []):
            refuse_given({"include": "message.output_text.logprobs"}, include=None)
        form = field(field(body, "text", dict, {}), "format", dict, {})
        value = field(body, "input", (str, list), [])
        messages = [Message("user", value)] if isinstance(value, str) else _parse_items(objects(body, "input"))
        if instructions := field(body, "instructions", str, ""):
            messages.insert(0, Message("system", instructions))
        tools = tuple(_parse_tool(tool) for tool in objects(body, "tools"))
        choice = field(body, "tool_choice", (str, dict), "auto")
        name = field(choice, "name", str, "") if isinstance(choice, dict) else ""
        return Ask(
            messages=tuple(messages),
            tools=tools,
            choice=choice_of(choice, tools, CHOICES, name),
            one_call=not field(body, "parallel_tool_calls", bool, True),
            max_tokens=count(body, "max_output_tokens"),
            stop=stops_of(body),
            schema=schema_of(form, "text.format"),
            stream=field(body, "stream", bool, False),
            model=field(body, "model", str, ""),
        )

    def write(self, ask: Ask, answer: Answer) -> dict[str, Any]:
        return _write_response(ask, answer, _write_items(answer), _status(answer))

    async def events(self, ask: Ask, live: LiveReply) -> AsyncIterator[bytes]:
        numbers = itertools.count()

        def write(*events: Event) -> bytes:
            named = [(f"response.{kind}", next(numbers), values) for kind, values in events]
            return b"".join(event({"type": name, "sequence_number": n, **values}, name) for name, n, values in named)

        start = await live.head()
        empty_response = _write_response(ask, start, [], "in_progress")
        yield write(("created", {"response": empty_response}), ("in_progress", {"response": empty_response}))
        kinds: list[str] = []
        """Kinds of the items that have begun. All end after the last piece: a thought may continue after the text."""
        async for kind, piece in live.pieces():
            if kind not in kinds:
                yield write(*_item_events(len(kinds), _write_text(start, kind, ""))[0])
                kinds.append(kind)
            yield write(_item_events(kinds.index(kind), _write_text(start, kind, piece))[1])
        answer = live.result()
        items = _write_items(answer, kinds)
        for index, item in enumerate(items):
            begin, delta, end = _item_events(index, item)
            yield write(*end) if index < len(kinds) else write(*begin, delta, *end)
        response = _write_response(ask, answer, items, _status(answer))
        yield write((response["status"], {"response": response}))

    def failure(self, refusal: Rejected) -> dict[str, Any]:
        return ChatCompletions().failure(refusal)

    def failure_event(self, refusal: Rejected, number: int) -> bytes:
        values = {"code": refusal.code, "message": str(refusal), "param": None}
        return event({"type": "error", "sequence_number": number, **values}, "error")


def _parse_items(items: list[dict[str, Any]]) -> list[Message]:
    messages: list[Message] = []
    for item in items:
        kind = item.get("type", "message")
        if kind == "reasoning":
            continue
        if kind == "function_call_output":
            messages.append(Message("tool", text_of(item.get("output"), _PARTS, "a function_call_output")))
        elif kind == "function_call":
            call = ReplyCall(field(item, "name", str, ""), field(item, "arguments", str, "{}"))
            _append_reply(messages, Message("assistant", "", (call,)))
        elif kind == "message" and (role := _ROLES.get(str(item.get("role")))) is not None:
            message = Message(role, text_of(item.get("content"), _PARTS, f"the message of role {role}"))
            _append_reply(messages, message) if role == "assistant" else messages.append(message)
        else:
            raise bad_request(f"`input` has an item of type {str(kind)[:40]!r} that this gateway does not know")
    return messages


def _append_reply(messages: list[Message], reply: Message) -> None:
    """Append a reply, or join it with the assistant's item before it, because both are parts of one reply."""
    if messages and messages[-1].role == "assistant":
        last_message = messages.pop()
        text = "\n".join(text for text in (last_message.text, reply.text) if text)
        reply = Message("assistant", text, (*last_message.calls, *reply.calls))
    messages.append(reply)


def _parse_tool(value: Mapping[str, Any]) -> Mapping[str, Any]:
    if value.get("type") != "function" or not isinstance(value.get("name"), str):
        raise bad_request("`tools` must be functions with a name: this gateway runs no tools itself", "invalid_type")
    return function_of(value)


def _status(answer: Answer) -> str:
    return "incomplete" if answer.finish == "length" else "completed"


def _write_response(ask: Ask, answer: Answer, output: list[dict[str, Any]], status: str) -> dict[str, Any]:
    is_over = status != "in_progress"
    return {
        "id": f"resp_{answer.id}",
        "object": "response",
        "created_at": answer.created,
        "status": status,
        "error": None,
        "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
        "instructions": None,
        "metadata": {},
        "model": ask.model,
        "output": output,
        "parallel_tool_calls": not ask.one_call,
        "previous_response_id": None,
        "store": False,
        "temperature": None,
        "top_p": None,
        "tool_choice": {"type": "function", "name": ask.choice.name} if ask.choice.name else ask.choice.kind,
        "tools": [{"strict": False, **tool["function"], "type": "function"} for tool in ask.tools],
        "usage": _write_usage(answer) if is_over else None,
    }


def _write_items(answer: Answer, kinds: Sequence[str] = ("thought", "text")) -> list[dict[str, Any]]:
    """Return the items of a reply. kinds: order of thought and text."""
    texts = {"thought": answer.thought, "text": answer.text if answer.text or not answer.calls else None}
    items = [_write_text(answer, kind, text) for kind in kinds if (text := texts[kind]) is not None]
    for index, call in enumerate(answer.calls):
        items.append(
            {
                "type": "function_call",
                "id": f"fc_{answer.id}_{index}",
                "call_id": call.id,
                "name": call.name,
                "arguments": call.arguments,
                "status": "completed",
            }
        )
    return items


def _write_text(answer: Answer, kind: str, text: str) -> dict[str, Any]:
    """Return the item of a reply's thought or text."""
    if kind == "thought":
        content = [{"type": "reasoning_text", "text": text}]
        return {"type": "reasoning", "id": f"rs_{answer.id}", "summary": [], "content": content}
    part = {"type": "output_text", "text": text, "annotations": [], "logprobs": []}
    base = {"type": "message", "id": f"msg_{answer.id}", "role": "assistant", "status": _status(answer)}
    return {**base, "content": [part]}


def _item_events(index: int, item: Mapping[str, Any]) -> tuple[list[Event], Event, list[Event]]:
    """Return the events that begin an item, the event that adds its content as one piece, and the events at its end."""
    place: dict[str, Any] = {"output_index": index, "item_id": item["id"]}
    blank: dict[str, Any] = {"arguments": ""} if item["type"] == "function_call" else {"content": []}
    status = {} if item["type"] == "reasoning" else {"status": "in_progress"}
    added: Event = ("output_item.added", {"output_index": index, "item": {**item, **blank, **status}})
    done: Event = ("output_item.done", {"output_index": index, "item": item})
    if item["type"] == "function_call":
        kind, arguments = "function_call_arguments", item["arguments"]
        ends = {**place, "name": item["name"], "arguments": arguments}
        return [added], (f"{kind}.delta", {**place, "delta": arguments}), [(f"{kind}.done", ends), done]
    (part,) = item["content"]
    kind, text, place["content_index"] = part["type"], part["text"], 0
    logprobs: dict[str, Any] = {"logprobs": []} if kind == "output_text" else {}
    return (
        [added, ("content_part.added", {**place, "part": {**part, "text": ""}})],
        (f"{kind}.delta", {**place, "delta": text, **logprobs}),
        [(f"{kind}.done", {**place, "text": text, **logprobs}), ("content_part.done", {**place, "part": part}), done],
    )


def _write_usage(answer: Answer) -> dict[str, Any]:
    return {
        "input_tokens": answer.prompt_tokens,
        "input_tokens_details": {"cached_tokens": answer.cached_tokens, "cache_write_tokens": 0},
        "output_tokens": answer.reply_tokens,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": answer.prompt_tokens + answer.reply_tokens,
    }
