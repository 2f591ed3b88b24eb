"""Requests, answers and errors in a form that does not depend on the API that the client speaks."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from http import HTTPStatus
from typing import Any, Literal

from starpod.trainer.data.episode import Finish
from starpod.trainer.prompts.formats.base import ReplyCall

Role = Literal["system", "user", "assistant", "tool"]

MOST_MESSAGES = 10_000
"""Maximum number of messages in a request. For example, 250,000 empty ones would block the event loop for 15 s."""


class Rejected(Exception):
    """The error with which a request is answered.

    Clients retry by themselves if the status is 5xx, 409 or 429.

    Args:
        status: the HTTP status.
        code: a short name of the error, for programs.
        message: what went wrong, and what to do.
    """

    def __init__(self, status: HTTPStatus, code: str, message: str) -> None:
        super().__init__(message)
        self.status = status
        self.code = code


def bad_request(message: str, code: str = "invalid_value") -> Rejected:
    return Rejected(HTTPStatus.BAD_REQUEST, code, message)


@dataclass(frozen=True)
class Message:
    """One message of a conversation."""

    role: Role
    text: str
    """The texts of all parts."""
    calls: tuple[ReplyCall, ...] = ()
    """Tool calls of an assistant's message."""

    @cached_property
    def key(self) -> bytes:
        """Key that messages of equal meaning share, so that a reply is recognised however a client formats it."""
        calls = [(call.name, _parse_arguments(call.arguments)) for call in self.calls]
        return _digest([self.role, self.text.strip(), calls])


@dataclass(frozen=True, slots=True)
class Choice:
    """Whether a reply may or must call a tool."""

    kind: Literal["auto", "none", "required"] = "auto"
    """auto: the model decides whether to call a tool; none: it must not call any; required: it must call one."""
    name: str = ""
    """Name of the tool that must be called; empty: any."""


@dataclass(frozen=True)
class Ask:
    """A request for one reply. Raises Rejected for more than `MOST_MESSAGES` messages."""

    messages: tuple[Message, ...]
    tools: tuple[Mapping[str, Any], ...] = ()
    """Tools in the form of OpenAI's chat completions."""
    choice: Choice = Choice()
    one_call: bool = False
    """Whether the reply ends with its first tool call."""
    max_tokens: int | None = None
    """Maximum number of tokens of the reply; None: the gateway's limit."""
    stop: tuple[str, ...] = ()
    """Texts that end the reply."""
    schema: Mapping[str, Any] | None = None
    """JSON schema of the reply's text; None: any text."""
    seed: str = ""
    """Distinguishes requests that are otherwise equal, so that they get different replies."""
    stream: bool = False
    """Whether the client wants the reply as events."""
    with_usage: bool = False
    """Whether the events end with the token counts."""
    model: str = ""

    def __post_init__(self) -> None:
        if len(self.messages) > MOST_MESSAGES:
            raise bad_request(f"the conversation has {len(self.messages)} messages; send at most {MOST_MESSAGES}")

    @cached_property
    def history(self) -> tuple[bytes, ...]:
        """One key per message, for the conversation that ends with it. The keys also depend on the tools."""
        key = _digest([dict(tool) for tool in self.tools])
        keys = []
        for message in self.messages:
            key = extended(key, message)
            keys.append(key)
        return tuple(keys)

    @cached_property
    def characters(self) -> int:
        """Maximum number of characters that a prompt shows: all texts, tool calls and tools."""
        calls = (call for message in self.messages for call in message.calls)
        texts = sum(len(message.text) for message in self.messages)
        return texts + sum(len(call.name) + len(call.arguments) for call in calls) + len(str(self.tools or ""))

    @property
    def callable_tools(self) -> tuple[Mapping[str, Any], ...]:
        """Tools that the reply may call."""
        return self.tools if self.choice.kind != "none" else ()

    @property
    def key(self) -> bytes:
        """Key that is equal for repeated requests."""
        fields = [self.history[-1].hex(), asdict(self.choice), self.max_tokens, self.stop, self.seed]
        more = [*(["one call"] if self.one_call else []), *([] if self.schema is None else [self.schema])]
        return _digest([*fields, *more])


@dataclass(frozen=True, slots=True)
class Answer:
    """A sampled reply as its client sees it."""

    id: str
    prompt_tokens: int
    cached_tokens: int
    """Number of prompt tokens that were already part of an earlier prompt or of its reply."""
    created: int
    number: int = 0
    """Index among the session's replies, from 1."""
    text: str = ""
    """The reply without reasoning and tool calls."""
    thought: str | None = None
    calls: tuple[ReplyCall, ...] = ()
    finish: Finish = "stop"
    reply_tokens: int = 0
    stop: str = ""
    """The stop text that ended the reply; empty if none did."""

    @property
    def message(self) -> Message:
        return Message("assistant", self.text, self.calls)


def extended(history: bytes, message: Message) -> bytes:
    """Return the key of a conversation with one more message."""
    return hashlib.blake2b(history + message.key, digest_size=16).digest()


def _digest(value: object) -> bytes:
    text = json.dumps(value, sort_keys=True, ensure_ascii=False, separators=(",", ":"))
    return hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=16).digest()


def _parse_arguments(arguments: str) -> Any:
    """Parse a call's arguments for comparison, because clients write 1.0 as 1, and {} as an empty text."""
    try:
        return json.loads(arguments.strip() or "{}", parse_float=_parse_number, strict=False)
    except ValueError:
        return arguments.strip()


def _parse_number(text: str) -> int | float:
    number = float(text)
    return int(number) if number.is_integer() else number


# --- reading JSON -----------------------------------------------------------------------------------------------------


def field(body: Mapping[str, Any], name: str, kind: type | tuple[type, ...], default: Any = None) -> Any:
    """Return a field of a request's body. Raise Rejected if it has another type.

    Args:
        body: the body, decoded from JSON.
        name: name of the field.
        kind: type or types that the value may have. True and False do not count as int.
        default: the result if the field is absent or null.
    """
    value = body.get(name)
    if value is None:
        return default
    kinds = kind if isinstance(kind, tuple) else (kind,)
    if not isinstance(value, kinds) or (isinstance(value, bool) and bool not in kinds):
        names = " or ".join(_JSON_NAMES[one_type] for one_type in kinds)
        raise bad_request(f"`{name}` must be {names}", "invalid_type")
    return value


def objects(body: Mapping[str, Any], name: str) -> list[dict[str, Any]]:
    """Return a list of objects in a request's body, empty if it is absent. Raise Rejected for anything else."""
    values: Sequence[Any] = field(body, name, list, [])
    if not all(isinstance(value, dict) for value in values):
        raise bad_request(f"`{name}` must be a list of objects", "invalid_type")
    return list(values)


def count(body: Mapping[str, Any], *names: str) -> int | None:
    """Return the number in the first present field of `names`, or None. Raise Rejected unless it is positive."""
    for name in names:
        value = field(body, name, int)
        if value is not None:
            if value < 1:
                raise bad_request(f"`{name}` must be at least 1")
            return int(value)
    return None


def refuse_given(body: Mapping[str, Any], **allowed: object) -> None:
    """Raise Rejected for unsupported fields. `allowed` maps each field to its only accepted value."""
    for name, value in allowed.items():
        if name in body and body[name] is not None and body[name] != value:
            raise bad_request(f"`{name}` is not supported by this gateway; leave it out", "unsupported_parameter")


def function_of(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return a tool in the form of `Ask.tools`. Raise Rejected if one of its fields has another type."""
    kinds = {"name": str, "description": str, "parameters": dict}
    fields = {name: value for name, kind in kinds.items() if (value := field(values, name, kind)) is not None}
    return {"type": "function", "function": fields}


def choice_of(value: object, tools: Collection[Mapping[str, Any]], kinds: Mapping[str, Choice], name: str) -> Choice:
    """Return the choice that a request's `tool_choice` stands for.

    Args:
        value: the field's value.
        tools: the request's tools.
        kinds: the choice for each word that the client's API uses.
        name: name of the tool that `tool_choice` names; empty if it names none.

    Raises:
        Rejected: The value is not valid, or the tool does not exist.
    """
    choice = Choice("required", name) if name else kinds.get(str(value))
    if choice is None:
        raise bad_request(f"`tool_choice` is {str(value)[:80]}; use {', '.join(kinds)}, or name a function")
    names = [tool["function"]["name"] for tool in tools]
    if choice.kind == "required" and (not names or (name and name not in names)):
        raise bad_request(f"`tool_choice` wants {name or 'a call'}, but `tools` has {', '.join(names) or 'none'}")
    return choice


def schema_of(form: Mapping[str, Any], name: str) -> Mapping[str, Any] | None:
    """Return the JSON schema that a request's format of the reply stands for; None: any text.

    Args:
        form: the format, with its `type`, and `schema` if that is json_schema.
        name: name of the format in errors.

    Raises:
        Rejected: The type is unknown, or the schema is missing.
    """
    match form.get("type", "text"), form.get("schema"):
        case "text", _:
            return None
        case "json_object", _:
            return {"type": "object"}
        case "json_schema", dict(schema):
            return schema
        case kind, _:
            raise bad_request(f"`{name}` is {str(kind)[:40]}; use text, json_object, or json_schema with a `schema`")


def stops_of(body: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the texts in the field `stop`, a text or a list of texts."""
    stop = field(body, "stop", (str, list), [])
    return tuple([stop] if isinstance(stop, str) else map(str, stop))


def text_of(content: object, kinds: Sequence[str], where: str) -> str:
    """Return the text of a message's content. Raise Rejected for images and other parts.

    Args:
        content: a string, or a list of parts, whose texts are joined by newlines; None is an empty text.
        kinds: types of parts that are allowed, such as "text".
        where: name of the content in the error.
    """
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise bad_request(f"the content of {where} must be text or a list of parts", "invalid_type")
    texts = []
    for part in content:
        if not isinstance(part, dict) or part.get("type") not in kinds:
            kind = part.get("type") if isinstance(part, dict) else type(part).__name__
            raise bad_request(f"{where} has a part of type {str(kind)[:40]!r}; this gateway takes only text")
        texts.append(part_text(part))
    return "\n".join(texts) if len(texts) > 1 else "".join(texts)


def part_text(part: Mapping[str, Any]) -> str:
    """Return the text of one part. Raise Rejected if it has none."""
    value = part.get("text", part.get("refusal"))
    if not isinstance(value, str):
        raise bad_request(f"a part of type {part.get('type')!r} has no `text`", "invalid_type")
    return value


_JSON_NAMES = {
    str: "text",
    int: "a whole number",
    float: "a number",
    list: "a list",
    dict: "an object",
    bool: "true or false",
}
