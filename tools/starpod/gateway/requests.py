"""Requests, answers and refusals, as they are before and after each API's own spelling."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from http import HTTPStatus
from typing import Any, Literal

from starpod.trainer.data.episode import Finish

Role = Literal["system", "user", "assistant", "tool"]

MOST_MESSAGES = 10_000
"""Messages of a request: 250,000 empty ones would take 15 s of the event loop."""


class Refused(Exception):
    """A request that gets an error instead of a reply.

    code: a short name for programs. Where `status` is 5xx, 409 or 429 the clients' own retries ask again.
    """

    def __init__(self, status: HTTPStatus, code: str, message: str) -> None:
        super().__init__(message)
        self.status = status
        self.code = code


def bad_request(message: str, code: str = "invalid_value") -> Refused:
    return Refused(HTTPStatus.BAD_REQUEST, code, message)


@dataclass(frozen=True, slots=True)
class Call:
    """A tool call of a reply. arguments: a JSON object as text."""

    name: str
    arguments: str
    id: str = ""


@dataclass(frozen=True)
class Message:
    """One message of a conversation. text: of all its text parts. calls: of an assistant."""

    role: Role
    text: str
    calls: tuple[Call, ...] = ()

    @cached_property
    def key(self) -> bytes:
        """Equal for messages that mean the same: however a client spells a reply that it sends back, it is known."""
        calls = [(call.name, _loaded(call.arguments)) for call in self.calls]
        return _digest([self.role, self.text.strip(), calls])


@dataclass(frozen=True, slots=True)
class Choice:
    """Whether a reply calls a tool: as the model likes (`auto`), not at all (`none`), or in any case (`required`).

    name: of the tool that must be called; empty for any.
    """

    kind: Literal["auto", "none", "required"] = "auto"
    name: str = ""


@dataclass(frozen=True)
class Ask:
    """A request for one reply. Raises Refused for more than `MOST_MESSAGES`.

    tools: as OpenAI's chat completions describe them. choice: whether one of them is to be called.
    max_tokens: of the reply; None: the gateway's limit.
    one_call: whether the reply ends with its first tool call.
    stop: texts that end the reply. seed: distinguishes requests that are otherwise equal.
    stream: whether the reply is wanted as events, with_usage: and the count of tokens at their end.
    """

    messages: tuple[Message, ...]
    tools: tuple[Mapping[str, Any], ...] = ()
    choice: Choice = Choice()
    one_call: bool = False
    max_tokens: int | None = None
    stop: tuple[str, ...] = ()
    seed: str = ""
    stream: bool = False
    with_usage: bool = False
    model: str = ""

    def __post_init__(self) -> None:
        if len(self.messages) > MOST_MESSAGES:
            raise bad_request(f"the conversation has {len(self.messages)} messages; send at most {MOST_MESSAGES}")

    @cached_property
    def history(self) -> tuple[bytes, ...]:
        """A key for the conversation up to each of its messages, that one included, and for the tools."""
        key = _digest([dict(tool) for tool in self.tools])
        keys = []
        for message in self.messages:
            key = extended(key, message)
            keys.append(key)
        return tuple(keys)

    @cached_property
    def characters(self) -> int:
        """Number of characters of all that a prompt may show: texts, tool calls and tools."""
        calls = (call for message in self.messages for call in message.calls)
        texts = sum(len(message.text) for message in self.messages)
        return texts + sum(len(call.name) + len(call.arguments) for call in calls) + len(str(self.tools or ""))

    @property
    def key(self) -> bytes:
        """Equal for a request that is repeated."""
        asked = [self.history[-1].hex(), asdict(self.choice), self.max_tokens, self.stop, self.seed]
        return _digest([*asked, "one call"] if self.one_call else asked)


@dataclass(frozen=True, slots=True)
class Answer:
    """A sampled reply as its client sees it.

    number: among the session's, from 1. text: without reasoning and tool calls. finish: as in `Turn`. stop: the stop
    text that ended it; empty where none did.
    cached_tokens: those of the prompt that were part of an earlier one or its reply.
    """

    id: str
    number: int
    text: str
    thought: str | None
    calls: tuple[Call, ...]
    finish: Finish
    prompt_tokens: int
    reply_tokens: int
    cached_tokens: int
    created: int
    stop: str = ""

    @property
    def message(self) -> Message:
        return Message("assistant", self.text, self.calls)


def extended(history: bytes, message: Message) -> bytes:
    """The key of a conversation that goes on with a message."""
    return hashlib.blake2b(history + message.key, digest_size=16).digest()


def _digest(value: object) -> bytes:
    text = json.dumps(value, sort_keys=True, ensure_ascii=False, separators=(",", ":"))
    return hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=16).digest()


def _loaded(arguments: str) -> Any:
    """Return the value of a call's arguments: clients write 1.0 as 1, and no arguments as an empty text."""
    try:
        return json.loads(arguments.strip() or "{}", parse_float=_number, strict=False)
    except ValueError:
        return arguments.strip()


def _number(text: str) -> int | float:
    number = float(text)
    return int(number) if number.is_integer() else number


# --- reading JSON -----------------------------------------------------------------------------------------------------


def field(body: Mapping[str, Any], name: str, kind: type | tuple[type, ...], default: Any = None) -> Any:
    """A field of a request's body; `default` where it is absent or null. Raises Refused for another type."""
    value = body.get(name)
    if value is None:
        return default
    kinds = kind if isinstance(kind, tuple) else (kind,)
    if not isinstance(value, kinds) or (isinstance(value, bool) and bool not in kinds):
        names = " or ".join(_JSON_NAMES[each] for each in kinds)
        raise bad_request(f"`{name}` must be {names}", "invalid_type")
    return value


def objects(body: Mapping[str, Any], name: str) -> list[dict[str, Any]]:
    """A list of objects in a request's body; empty where it is absent. Raises Refused."""
    values: Sequence[Any] = field(body, name, list, [])
    if not all(isinstance(value, dict) for value in values):
        raise bad_request(f"`{name}` must be a list of objects", "invalid_type")
    return list(values)


def count(body: Mapping[str, Any], *names: str) -> int | None:
    """A positive number under the first of these names that is given. Raises Refused."""
    for name in names:
        value = field(body, name, int)
        if value is not None:
            if value < 1:
                raise bad_request(f"`{name}` must be at least 1")
            return int(value)
    return None


def refuse_given(body: Mapping[str, Any], **allowed: object) -> None:
    """Raises Refused for fields whose effect the gateway could not give, unless they ask for what it does anyway."""
    for name, value in allowed.items():
        if name in body and body[name] is not None and body[name] != value:
            raise bad_request(f"`{name}` is not supported by this gateway; leave it out", "unsupported_parameter")


def choice_of(given: object, tools: Collection[Mapping[str, Any]], kinds: Mapping[str, Choice], name: str) -> Choice:
    """The choice that `tool_choice` means. kinds: those that are told in a word, each dialect's own.

    name: of the tool, where one is named. Raises Refused for what is none of these, or cannot be met.
    """
    choice = Choice("required", name) if name else kinds.get(str(given))
    if choice is None:
        raise bad_request(f"`tool_choice` is {str(given)[:80]}; use {', '.join(kinds)}, or name a function")
    names = [tool["function"]["name"] for tool in tools]
    if choice.kind == "required" and (not names or (name and name not in names)):
        raise bad_request(f"`tool_choice` wants {name or 'a call'}, and `tools` has {', '.join(names) or 'none'}")
    return choice


def text_of(content: object, kinds: Sequence[str], where: str) -> str:
    """The text of a message's content: a string, or parts of these kinds. Raises Refused for pictures and the like."""
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
            raise bad_request(f"{where} has a part of type {str(kind)[:40]!r}; this gateway takes text alone")
        texts.append(part_text(part))
    return "\n".join(texts) if len(texts) > 1 else "".join(texts)


def part_text(part: Mapping[str, Any]) -> str:
    """The text of one part. Raises Refused."""
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
