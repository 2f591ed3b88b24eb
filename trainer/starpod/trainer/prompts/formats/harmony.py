"""The format of gpt-oss, in which a reply is a list of messages with channels and recipients."""

from __future__ import annotations

import re
from collections.abc import Sequence

from starpod.trainer.prompts.formats.base import CallFormat, Calls, ReplyCall, Schemas, call_of, decode
from starpod.trainer.prompts.formats.source import Source

_START, _CHANNEL, _MESSAGE = "<|start|>assistant", "<|channel|>", "<|message|>"
_RECIPIENT = re.compile(r"\bto=(?:functions\.)?([^\s<]+)")


class Harmony(CallFormat):
    """gpt-oss: thoughts on the channel `analysis`, messages to `functions.name`, text on `final`."""

    name = "harmony"
    signs = (_CHANNEL, _MESSAGE)
    example = f"{_CHANNEL}commentary to=functions.<function-name> <|constrain|>json{_MESSAGE}<args-json-object><|call|>"
    close = "<|call|>"
    opens = (_START, _CHANNEL, "<|end|>", "<|return|>", close)
    """Beginnings of a message, and its ends."""
    bare = "to="
    frames = opens
    marks = ("<|start|>", _MESSAGE, "<|constrain|>")
    stops = ("<|call|>", "<|return|>")
    thought = (f"{_CHANNEL}analysis{_MESSAGE}", "<|end|>")

    def read_calls(self, source: Source, mark: str, schemas: Schemas) -> Calls:
        if mark not in ("", _CHANNEL):
            return ()
        header, ending = yield from source.before(_MESSAGE, *self.opens[2:])
        if ending != _MESSAGE:
            return None
        recipient = _RECIPIENT.search(header if mark else f"to={header}")
        if recipient is None:
            return ()
        if not (yield from source.accept("{")):
            return None
        call = call_of(recipient[1], decode((yield from source.brackets())))
        return [call] if call and (yield from source.closes(self.close)) else None

    def write(self, thought: str | None, text: str, calls: Sequence[ReplyCall]) -> str:
        messages = [] if thought is None else [f"{self.thought[0]}{thought}<|end|>"]
        if text or not calls:
            messages.append(
                f"{_CHANNEL}{'commentary' if calls else 'final'}{_MESSAGE}{text}{'<|end|>' if calls else ''}"
            )
        return _START.join([*messages, *([self.write_calls(calls)] if calls else [])])

    def write_calls(self, calls: Sequence[ReplyCall]) -> str:
        return f"{self.close}{_START}".join(self.begin_call(call.name) + call.json for call in calls)

    def begin_call(self, name: str) -> str:
        return f"{_CHANNEL}commentary to=functions.{f'{name} <|constrain|>json{_MESSAGE}' if name else ''}"
