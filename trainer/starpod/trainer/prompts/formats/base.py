"""The interface of a format of replies with tool calls, and the parser of such replies."""

from __future__ import annotations

import json
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from starpod.trainer.prompts.formats.source import EndOfReply, Source, Steps
from starpod.trainer.prompts.grammar import THINK, THINK_END

MOST_BROKEN = 64
"""Maximum number of opening marks without a valid call. The text after these is not parsed, to keep the time linear."""
_DECODER = json.JSONDecoder(strict=False)
"""Decoder that accepts raw newlines in strings, because models write them."""
_NAME = re.compile(r"""[^\s<>(){}\[\]"\ud800-\udfff]+""")
"""Matches a tool's name. What no name contains is a part of a malformed call."""
_LONE_SURROGATE = re.compile("[\ud800-\udfff]")
"""Half of a surrogate pair. A model may write one as a JSON escape, but it cannot be encoded and sent."""
_INCOMPLETE_VALUE = re.compile(r"\s*|-|\.|[eE][-+]?|t|tr|tru|f|fa|fal|fals|n|nu|nul")
"""Matches the end of a JSON text that is cut outside of a string: between two values, in a number or in a literal."""


@dataclass(frozen=True, slots=True)
class ReplyCall:
    """A tool call in a reply."""

    name: str
    arguments: str
    """A JSON object as text."""
    id: str = ""

    @property
    def json(self) -> str:
        """The arguments as text, which clients may leave empty."""
        return self.arguments.strip() or "{}"

    @property
    def values(self) -> dict[str, Any]:
        """The arguments by name. A text that is no object is the only argument, `arguments`."""
        values = decode(self.json)
        return values if isinstance(values, dict) else {"arguments": self.arguments}


class ReplyPart(NamedTuple):
    """A piece of a reply: the next characters of its thought or text, or a whole call."""

    kind: Literal["thought", "text", "call"]
    text: str = ""
    call: ReplyCall | None = None
    end: int = 0
    """Number of characters of the reply up to the end of the call."""


class ReplyParts(NamedTuple):
    """The parts of a whole reply."""

    thought: str | None
    text: str
    """The reply without thoughts and calls."""
    calls: tuple[ReplyCall, ...]
    ends: tuple[int, ...] = ()
    """For each call, the number of characters of the reply up to its end."""


Schemas = Mapping[str, Mapping[str, Any]]
"""JSON schemas of arguments, by tool and argument."""
Calls = Steps[Sequence[ReplyCall] | None]
Tools = Iterable[Mapping[str, Any]] | None


class CallFormat(ABC):
    """Format in which a family of models writes thoughts and tool calls.

    A call is decoded from its opening mark on, so a closing mark inside an argument belongs to the argument. A
    malformed call remains text. A call that the end of the reply cuts off is dropped.
    """

    name: str
    signs: tuple[str, ...]
    """Texts that together show that a chat template uses this format."""
    example: str
    """A call as a system message describes it. It is no valid call, because a small model may repeat it."""
    opens: tuple[str, ...]
    """Marks with which a call begins."""
    bare: str = ""
    """Text with which a call without a mark begins, at the beginning of a reply or after another call."""
    bare_sign: str = ""
    """Text that tells such a call that is cut off from other text."""
    frames: tuple[str, ...] = ()
    """Marks that are no text even where there are no calls."""
    close: str = ""
    """Mark with which a call ends. An unfinished call that contains it is malformed, and not cut off."""
    marks: tuple[str, ...] = ()
    """All other marks of calls."""
    typed: bool = True
    """Whether a call shows which of its arguments are texts, without a schema."""
    thought: tuple[str, str] = (THINK, THINK_END)
    """Marks around a thought, at the beginning of a reply or after a call."""
    stops: tuple[str, ...] = ()
    """Tokens with which a reply ends, besides those of the tokenizer and the chat template."""
    xgrammar: str = ""
    """Name of the format in the package xgrammar; "" if it has no grammar in which a call can be required."""

    @property
    def all_marks(self) -> tuple[str, ...]:
        return (*self.opens, self.close, *self.marks, *self.thought)

    @abstractmethod
    def read_calls(self, source: Source, mark: str, schemas: Schemas) -> Calls:
        """Read the rest of a call after its opening mark. Return None if it is malformed, and () for a mere mark.

        Raises EndOfReply if the reply ends inside the call.
        """

    @abstractmethod
    def write_calls(self, calls: Sequence[ReplyCall]) -> str:
        """Return calls as a policy would write them."""

    @abstractmethod
    def begin_call(self, name: str) -> str:
        """Return the beginning of a reply that must call a tool. It stops before the name if that is empty.

        It never ends with a blank: tokenizers join a blank with the brace after it, and a small model that gets the
        blank as a separate token writes no object.
        """

    def write(self, thought: str | None, text: str, calls: Sequence[ReplyCall]) -> str:
        """Return a reply as a policy would write it, without the token that ends it."""
        beginning = "" if thought is None else f"{self.thought[0]}{thought}{self.thought[1]}"
        return beginning + "\n".join(part for part in (text, self.write_calls(calls) if calls else "") if part)

    def parse(self, text: str, tools: Tools = ()) -> ReplyParts:
        """Parse a whole reply; see `ReplyParser`. White space around the text is dropped if there are calls."""
        parser = ReplyParser(self, tools)
        parts = [*parser.feed(text), *parser.finish()]
        thoughts = [part.text for part in parts if part.kind == "thought"]
        texts = "".join(part.text for part in parts if part.kind == "text")
        calls = tuple(part.call for part in parts if part.call)
        ends = tuple(part.end for part in parts if part.call)
        return ReplyParts(
            "".join(thoughts).strip() if thoughts else None, texts.strip() if calls else texts, calls, ends
        )

    def read_reply(self, source: Source, emit: Callable[[ReplyPart], None], schemas: Schemas | None) -> Steps[None]:
        """Read a reply and emit its parts. Without `schemas`, calls remain text."""
        opens, bare = (self.opens, self.bare) if schemas is not None else (self.frames, "")
        tries_left, begins, separator = MOST_BROKEN, True, ""
        while True:
            mark, is_bare = "", False
            if begins:
                blanks = yield from source.blanks()
                if (yield from source.starts(self.thought[0])):
                    yield from source.accept(self.thought[0])
                    emit(ReplyPart("thought", separator))
                    separator = "\n"
                    yield from source.until(self.thought[1:], lambda text: emit(ReplyPart("thought", text)))
                    yield from source.blanks()
                    continue
                emit(ReplyPart("text", blanks))
                is_bare = bool(bare and (yield from source.starts(bare)))
            if not is_bare:
                mark = yield from source.until(opens, lambda text: emit(ReplyPart("text", text)))
                if not mark:
                    return
            source.anchor()
            try:
                calls = yield from self.read_calls(source, mark, schemas or {})
                calls = None if calls and schemas is None else calls
            except EndOfReply as end:
                text = source.since_anchor
                malformed = (self.close and self.close in text) or not (mark or self.bare_sign in text)
                if not malformed and _begins_json(*end.args):
                    return
                calls = None
            begins = calls is not None
            for call in calls or ():
                emit(ReplyPart("call", "", call, source.position))
            if calls is None:
                source.rewind()
                emit(ReplyPart("text", mark))
                tries_left -= 1
                opens, bare = (opens, bare) if tries_left else ((), "")


class ReplyParser:
    """Parser of one reply, whose text may come in pieces of any length. The pieces do not change the result.

    Args:
        tools: OpenAI's definitions of the tools, for the types of arguments; None: parse thoughts, but no calls.
    """

    def __init__(self, form: CallFormat, tools: Tools = ()) -> None:
        self._source = Source()
        self._parts: list[ReplyPart] = []
        functions = [tool["function"] for tool in tools or ()]
        schemas = {function["name"]: _properties_of(function.get("parameters")) for function in functions}
        self._steps = form.read_reply(self._source, self._parts.append, None if tools is None else schemas)

    def feed(self, piece: str) -> list[ReplyPart]:
        """Add text. Return the parts that are certain now."""
        self._source.feed(piece)
        next(self._steps)
        parts, self._parts[:] = self._parts[:], ()
        return parts

    def finish(self) -> list[ReplyPart]:
        """End the reply. Return its last parts."""
        self._source.feed("", complete=True)
        next(self._steps, None)
        return self._parts


def call_of(name: object, arguments: object) -> ReplyCall | None:
    """Return a decoded call, or None if it is not valid. arguments: an object, or a text with one."""
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        return None
    arguments = decode(arguments) if isinstance(arguments, str) else arguments
    try:
        text = json.dumps(arguments, ensure_ascii=False, allow_nan=False)
    except (ValueError, TypeError, RecursionError):
        return None
    return ReplyCall(name, _LONE_SURROGATE.sub("\N{REPLACEMENT CHARACTER}", text)) if text.startswith("{") else None


def decode(text: str) -> Any:
    """Decode JSON as models write it. Return None if it is not valid."""
    try:
        return _DECODER.decode(text)
    except (ValueError, RecursionError):
        return None


def _begins_json(text: str = "") -> bool:
    """Return whether a text may be the beginning of a JSON object. A text in other brackets may be one in Python."""
    try:
        _DECODER.raw_decode(text)
    except json.JSONDecodeError as error:
        tail = text[error.pos :]
        in_string = error.msg.startswith(("Unterminated string", "Invalid \\")) and '"' not in tail[1:]
        return in_string or not text.startswith("{") or _INCOMPLETE_VALUE.fullmatch(tail) is not None
    except (ValueError, RecursionError):
        pass
    return True


def _properties_of(schema: object) -> Mapping[str, Any]:
    properties = schema.get("properties") if isinstance(schema, Mapping) else None
    return properties if isinstance(properties, Mapping) else {}
