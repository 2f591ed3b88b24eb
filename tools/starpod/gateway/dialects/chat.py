"""The dialect of OpenAI's chat completions API."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from typing import Any

from starpod.gateway.dialects.base import event
from starpod.gateway.requests import (
    Answer,
    Ask,
    Choice,
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

_ROLES: dict[str, Role] = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "assistant": "assistant",
    "tool": "tool",
}

_UNSUPPORTED: dict[str, Any] = {
    "n": 1,
    "functions": [],
    "function_call": "none",
    "logprobs": False,
    "top_logprobs": 0,
    "logit_bias": {},
    "frequency_penalty": 0,
    "presence_penalty": 0,
    "modalities": ["text"],
    "audio": None,
    "web_search_options": None,
    "moderation": None,
}
"""Unsupported fields, each with the one value that is accepted because it has no effect."""

CHOICES = {"auto": Choice(), "none": Choice("none"), "required": Choice("required")}


class ChatCompletions:
    """POST /v1/chat/completions. Reasoning is in `reasoning_content`, as in other servers of open models."""

    path = "/v1/chat/completions"

    def read(self, body: Mapping[str, Any]) -> Ask:
        refuse_given(body, **_UNSUPPORTED)
        form = field(body, "response_format", dict, {})
        options = field(body, "stream_options", dict, {})
        tools = tuple(_parse_tool(tool) for tool in objects(body, "tools"))
        choice = field(body, "tool_choice", (str, dict), "auto")
        function = field(choice, "function", dict, {}) if isinstance(choice, dict) else {}
        return Ask(
            messages=tuple(_parse_message(message) for message in objects(body, "messages")),
            tools=tools,
            choice=choice_of(choice, tools, CHOICES, field(function, "name", str, "")),
            one_call=not field(body, "parallel_tool_calls", bool, True),
            max_tokens=count(body, "max_completion_tokens", "max_tokens"),
            stop=stops_of(body),
            schema=schema_of({**field(form, "json_schema", dict, {}), **form}, "response_format"),
            seed=str(field(body, "seed", int, "")),
            stream=field(body, "stream", bool, False),
            with_usage=bool(options.get("include_usage")),
            model=field(body, "model", str, ""),
        )

    def write(self, ask: Ask, answer: Answer) -> dict[str, Any]:
        message: dict[str, Any] = {"role": "assistant", "content": answer.text or (None if answer.calls else "")}
        message["refusal"] = None
        if answer.thought is not None:
            message["reasoning_content"] = answer.thought
        if answer.calls:
            message["tool_calls"] = [_write_call(call) for call in answer.calls]
        choice = {"index": 0, "message": message, "logprobs": None, "finish_reason": _finish_reason(answer)}
        return {**self._head(ask, answer, "chat.completion"), "choices": [choice], "usage": _write_usage(answer)}

    async def events(self, ask: Ask, live: LiveReply) -> AsyncIterator[bytes]:
        head = self._head(ask, await live.head(), "chat.completion.chunk")

        def chunk(delta: dict[str, Any], finish: str | None = None) -> bytes:
            usage = {"usage": None} if ask.with_usage else {}
            choice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": finish}
            return event({**head, "choices": [choice], **usage})

        yield chunk({"role": "assistant", "content": ""})
        async for kind, piece in live.pieces():
            if piece:
                yield chunk({"content" if kind == "text" else "reasoning_content": piece})
        answer = live.result()
        for index, call in enumerate(answer.calls):
            yield chunk({"tool_calls": [{"index": index, **_write_call(call)}]})
        yield chunk({}, _finish_reason(answer))
        if ask.with_usage:
            yield event({**head, "choices": [], "usage": _write_usage(answer)})
        yield event("[DONE]")

    def failure(self, refusal: Rejected) -> dict[str, Any]:
        kind = "invalid_request_error" if refusal.status < 500 else "server_error"
        return {"error": {"message": str(refusal), "type": kind, "param": None, "code": refusal.code}}

    def failure_event(self, refusal: Rejected, number: int) -> bytes:
        return event(self.failure(refusal))

    def _head(self, ask: Ask, answer: Answer, kind: str) -> dict[str, Any]:
        return {"id": f"chatcmpl-{answer.id}", "object": kind, "created": answer.created, "model": ask.model}


def _parse_message(value: Mapping[str, Any]) -> Message:
    role = _ROLES.get(str(value.get("role")))
    if role is None:
        raise bad_request(f"a message has the role {str(value.get('role'))[:40]!r}; use {', '.join(_ROLES)}")
    refuse_given(value, function_call=None, audio=None)
    text = text_of(value.get("content"), ("text", "refusal"), f"the message of role {role}")
    calls = []
    for call in objects(value, "tool_calls"):
        function = field(call, "function", dict, {})
        calls.append(ReplyCall(field(function, "name", str, ""), field(function, "arguments", str, "{}")))
    return Message(role, text, tuple(calls))


def _parse_tool(value: Mapping[str, Any]) -> Mapping[str, Any]:
    function = value.get("function")
    if value.get("type") != "function" or not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise bad_request("`tools` must be functions with a name", "invalid_type")
    return function_of(function)


def _write_call(call: ReplyCall) -> dict[str, Any]:
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}


def _finish_reason(answer: Answer) -> str:
    return "tool_calls" if answer.calls and answer.finish != "length" else answer.finish


def _write_usage(answer: Answer) -> dict[str, Any]:
    return {
        "prompt_tokens": answer.prompt_tokens,
        "completion_tokens": answer.reply_tokens,
        "total_tokens": answer.prompt_tokens + answer.reply_tokens,
        "prompt_tokens_details": {"cached_tokens": answer.cached_tokens},
    }
