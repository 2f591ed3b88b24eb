"""The dialect of Anthropic's messages API."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Mapping
from typing import Any

from starpod.gateway.dialects.base import event
from starpod.gateway.requests import (
    Answer,
    Ask,
    Choice,
    Message,
    Rejected,
    bad_request,
    choice_of,
    count,
    field,
    objects,
    part_text,
    refuse_given,
    schema_of,
    text_of,
)
from starpod.gateway.streams import LiveReply
from starpod.trainer.prompts.formats.base import ReplyCall

_ERRORS = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
}

_CLEARS_THOUGHTS = "clear_thinking_"
"""Type of a context edit that may be ignored: the chat template alone decides whether past thoughts are shown."""

_BLOCKS: Mapping[str, dict[str, Any]] = {
    "thought": {"type": "thinking", "thinking": "", "signature": ""},
    "text": {"type": "text", "text": "", "citations": None},
}
"""Empty blocks of a reply's thought and text."""
_CHOICES = {"auto": Choice(), "none": Choice("none"), "any": Choice("required")}


class Messages:
    """POST /v1/messages. A reply's reasoning is a `thinking` block, which clients need not send back."""

    path = "/v1/messages"

    def read(self, body: Mapping[str, Any]) -> Ask:
        refuse_given(body, container=None, mcp_servers=[])
        config = field(body, "output_config", dict, {})
        form = field(config, "format", dict) or field(body, "output_format", dict, {})  # the older name
        for edit in objects(field(body, "context_management", dict, {}), "edits"):
            if not str(edit.get("type")).startswith(_CLEARS_THOUGHTS):
                refuse_given(body, context_management=None)
        choice = field(body, "tool_choice", dict, {"type": "auto"})
        tools = tuple(_parse_tool(tool) for tool in objects(body, "tools"))
        messages = []
        if system := text_of(body.get("system"), ("text",), "`system`"):
            messages.append(Message("system", system))
        for message in objects(body, "messages"):
            messages += _parse_message(message)
        if messages and messages[-1].role == "assistant":
            raise bad_request("the last message is the assistant's: this gateway does not continue a prefilled reply")
        return Ask(
            messages=tuple(messages),
            tools=tools,
            choice=choice_of(choice.get("type"), tools, _CHOICES, field(choice, "name", str, "")),
            one_call=field(choice, "disable_parallel_tool_use", bool, False),
            max_tokens=count(body, "max_tokens"),
            stop=tuple(map(str, field(body, "stop_sequences", list, []))),
            schema=schema_of(form, "output_config.format"),
            stream=field(body, "stream", bool, False),
            model=field(body, "model", str, ""),
        )

    def write(self, ask: Ask, answer: Answer) -> dict[str, Any]:
        return {
            **self._head(ask, answer),
            "content": _write_blocks(answer),
            **_stop_reason(answer),
            "usage": _write_usage(answer, answer.reply_tokens),
        }

    async def events(self, ask: Ask, live: LiveReply) -> AsyncIterator[bytes]:
        start_fields: dict[str, Any] = {"content": [], "stop_reason": None, "stop_sequence": None}
        start = await live.head()
        head = {**self._head(ask, start), **start_fields, "usage": _write_usage(start, 0)}
        yield _event("message_start", message=head)
        kinds: list[str] = []  # of the blocks so far

        def end_last() -> bytes:
            last, signature = len(kinds) - 1, {"type": "signature_delta", "signature": ""}
            is_thought = kinds[-1:] == ["thought"]
            before = _event("content_block_delta", index=last, delta=signature) if is_thought else b""
            return before + _event("content_block_stop", index=last) if kinds else b""

        async for kind, piece in live.pieces():
            if kind not in kinds:
                end = end_last()
                kinds.append(kind)
                yield end + _event("content_block_start", index=len(kinds) - 1, content_block=_BLOCKS[kind])
            name = "thinking" if kind == "thought" else "text"
            # A thought after text and calls belongs to the first thought, as in the complete reply.
            delta = {"type": f"{name}_delta", name: piece}
            yield _event("content_block_delta", index=kinds.index(kind), delta=delta)
        yield end_last()
        answer = live.result()
        for index, block in enumerate(map(_write_call, answer.calls), len(kinds)):
            yield _event("content_block_start", index=index, content_block={**block, "input": {}})
            arguments = json.dumps(block["input"], ensure_ascii=False)
            delta = {"type": "input_json_delta", "partial_json": arguments}
            yield _event("content_block_delta", index=index, delta=delta)
            yield _event("content_block_stop", index=index)
        yield _event("message_delta", delta=_stop_reason(answer), usage={"output_tokens": answer.reply_tokens})
        yield _event("message_stop")

    def failure(self, refusal: Rejected) -> dict[str, Any]:
        kind = _ERRORS.get(refusal.status, "invalid_request_error" if refusal.status < 500 else "api_error")
        return {"type": "error", "error": {"type": kind, "message": str(refusal)}, "request_id": None}

    def failure_event(self, refusal: Rejected, number: int) -> bytes:
        return event(self.failure(refusal), "error")

    def _head(self, ask: Ask, answer: Answer) -> dict[str, Any]:
        return {"id": f"msg_{answer.id}", "type": "message", "role": "assistant", "model": ask.model}


def _parse_message(value: Mapping[str, Any]) -> list[Message]:
    """Convert a message of the API. It may become several messages, because each tool result is one."""
    role, content = value.get("role"), value.get("content")
    if role not in ("user", "assistant", "system"):
        raise bad_request(f"a message has the role {str(role)[:40]!r}; use user or assistant")
    if not isinstance(content, list):
        return [Message(role, text_of(content, (), f"the message of role {role}"))]
    messages: list[Message] = []
    texts: list[str] = []
    calls: list[ReplyCall] = []
    for block in content:
        kind = block.get("type") if isinstance(block, dict) else type(block).__name__
        if kind == "text":
            texts.append(part_text(block))
        elif kind == "tool_use" and role == "assistant":
            calls.append(ReplyCall(field(block, "name", str, ""), json.dumps(field(block, "input", dict, {}))))
        elif kind == "tool_result" and role == "user":
            messages.append(Message("tool", text_of(block.get("content"), ("text",), "a tool_result")))
        elif kind not in ("thinking", "redacted_thinking"):
            raise bad_request(f"the message of role {role} has a block of type {str(kind)[:40]!r}")
    if texts or calls or not messages:
        messages.append(Message(role, "\n".join(texts), tuple(calls)))
    return messages


def _parse_tool(value: Mapping[str, Any]) -> Mapping[str, Any]:
    if value.get("type") not in (None, "custom") or not isinstance(value.get("name"), str):
        raise bad_request("`tools` must be custom tools (type custom) with a name", "invalid_type")
    function = {"name": value["name"], "parameters": field(value, "input_schema", dict, {})}
    if description := field(value, "description", str, ""):
        function["description"] = description
    return {"type": "function", "function": function}


def _write_blocks(answer: Answer) -> list[dict[str, Any]]:
    blocks: list[dict[str, Any]] = []
    if answer.thought is not None:
        blocks.append({**_BLOCKS["thought"], "thinking": answer.thought})
    if answer.text or not answer.calls:
        blocks.append({**_BLOCKS["text"], "text": answer.text})
    return [*blocks, *map(_write_call, answer.calls)]


def _write_call(call: ReplyCall) -> dict[str, Any]:
    return {"type": "tool_use", "id": call.id, "name": call.name, "input": _parse_object(call.arguments)}


def _parse_object(arguments: str) -> dict[str, Any]:
    try:
        value = json.loads(arguments)
    except ValueError:
        return {}
    return value if isinstance(value, dict) else {}


def _stop_reason(answer: Answer) -> dict[str, Any]:
    """Return the fields that say why the reply ended."""
    if answer.finish == "length":
        return {"stop_reason": "max_tokens", "stop_sequence": None}
    if answer.calls:
        return {"stop_reason": "tool_use", "stop_sequence": None}
    if answer.stop:
        return {"stop_reason": "stop_sequence", "stop_sequence": answer.stop}
    return {"stop_reason": "end_turn", "stop_sequence": None}


def _write_usage(answer: Answer, output: int) -> dict[str, Any]:
    return {
        "input_tokens": answer.prompt_tokens - answer.cached_tokens,
        "cache_read_input_tokens": answer.cached_tokens,
        "cache_creation_input_tokens": 0,
        "output_tokens": output,
    }


def _event(kind: str, **values: Any) -> bytes:
    return event({"type": kind, **values}, kind)
