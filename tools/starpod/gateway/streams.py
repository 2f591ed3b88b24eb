"""A reply while it is sampled: its callers, and the pieces of its text that are certain."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from http import HTTPStatus

from starpod.gateway.lineage import Draft
from starpod.gateway.requests import Answer, Rejected
from starpod.trainer.prompts.formats.base import ReplyParser
from starpod.trainer.prompts.template import Template

_BYTE = re.compile("<0x[0-9A-F]{2}>")
"""Matches the token of a byte, in vocabularies that have one for each byte."""


class LiveReply:
    """A reply that is being sampled, or was. refuse: Raises the error of callers whose reply was cancelled."""

    sampling: asyncio.Future[Answer]
    start: tuple[Draft, Answer] | None = None
    """The prompt, and the answer with the fields that are known before the reply; None before and afterwards."""

    def __init__(self, template: Template, refuse: Callable[[], None]) -> None:
        self.callers = 0
        self.tokens: list[int] = []
        """The ids that the engine has passed on so far."""
        self._template = template
        self._refuse = refuse
        self._differs = False
        self._changed = asyncio.Event()

    def feed(self, start: int, tokens: Sequence[int]) -> None:
        """Add ids from the index `start` on.

        An engine whose process died samples a reply again, with the same seed. Known ids are skipped. If they differ,
        callers have got another text than the reply's, so sampling is cancelled.
        """
        known = self.tokens[start : start + len(tokens)]
        self._differs |= known != list(tokens[: len(known)])
        if self._differs:
            self.sampling.cancel()
        else:
            self.tokens += tokens[len(known) :]
            self.notify()

    def end(self, tokens: Sequence[int]) -> None:
        """Raise Rejected if a complete reply does not begin with the ids so far. Drop them: it replaces them."""
        if self._differs or self.tokens != list(tokens[: len(self.tokens)]):
            raise _differing_error()
        self.tokens, self.start = [], None

    def result(self) -> Answer:
        """Return the complete reply, once it is sampled. Raise Rejected if it failed or was cancelled."""
        if self._differs:
            raise _differing_error()
        if self.sampling.cancelled():
            self._refuse()
        return self.sampling.result()

    async def head(self) -> Answer:
        """Wait for the first id, and return the answer with the fields that are known then. Raise like `result`."""
        while not (self.tokens or self.sampling.done()):
            await self._changed.wait()
        return self.result() if self.start is None or self.sampling.done() else self.start[1]

    async def pieces(self) -> AsyncIterator[tuple[str, str]]:
        """Yield the next characters of the answer's thought or text as soon as they are certain. Raise like `result`.

        Each of the two has at least one piece, except a thought that is None, and the empty text of a reply with calls.
        """
        shown: dict[str, str] = {}
        if self.start is not None:
            reader, count = PieceReader(self._template, self.start[0]), 0
            while not self.sampling.done():
                changed, tokens = self._changed, self.tokens[count:]
                count += len(tokens)
                for kind, piece in reader.feed(tokens):
                    shown[kind] = shown.get(kind, "") + piece
                    yield kind, piece
                await changed.wait()
        answer = self.result()
        for kind, whole in (("thought", answer.thought), ("text", answer.text)):
            beginning = shown.get(kind, "")
            if not (whole or "").startswith(beginning):
                raise _differing_error()
            is_due = kind not in shown and whole is not None and not (kind == "text" and answer.calls)
            if (rest := (whole or "")[len(beginning) :]) or is_due:
                yield kind, rest

    def notify(self) -> None:
        """Wake all callers, because there are new ids, or the reply has ended."""
        self._changed.set()
        self._changed = asyncio.Event()


class PieceReader:
    """Turns ids into pieces of thought and text that no later id can change.

    Calls are left out, because a call whose end is missing may still turn out to be text.
    """

    def __init__(self, template: Template, draft: Draft) -> None:
        self._template = template
        self._stops = tuple(filter(None, draft.ask.stop))
        self._one_call = draft.ask.one_call
        self._tools = draft.ask.callable_tools
        self._parser = ReplyParser(template.layout.calls, self._tools or None)
        self._ids: list[int] = []
        self._decoded = 0
        self._text, self._opening = "", draft.opened
        self._blanks: dict[str, str] = {}
        self._begun: set[str] = set()
        self._over = False

    def feed(self, tokens: Sequence[int]) -> Iterator[tuple[str, str]]:
        """Yield the next pieces."""
        self._text += self._decode(tokens)
        end, is_stop = certain_end(self._text, self._stops)
        text, self._text, self._opening = self._opening + self._text[:end], self._text[end:], ""
        for part in () if self._over else self._parser.feed(text):
            if part.kind == "call" and self._one_call:
                self._over = True
                return
            if (piece := self._strip(part.kind, part.text)) or (part.kind == "thought" and not part.text):
                yield part.kind, piece
        self._over |= is_stop

    def _decode(self, tokens: Sequence[int]) -> str:
        """Return the text that ids add, but never up to the middle of a character."""
        self._ids += tokens
        if _BYTE.fullmatch("".join(self._template.tokenizer.convert_ids_to_tokens(self._ids[-1:]))):
            return ""  # in these tokenizers, a bad byte makes all bytes around it bad
        decode, ids, end = self._template.decode, self._ids, len(self._ids)
        before, text = decode(ids[: self._decoded]), decode(ids)
        if text.endswith("\N{REPLACEMENT CHARACTER}"):
            # Only this last one may still change: it may be the first bytes, of at most three ids, of a character.
            beginnings = ((count, decode(ids[:count])) for count in range(end - 1, max(end - 4, self._decoded), -1))
            certain = ((count, part) for count, part in beginnings if part != text and text.startswith(part))
            end, text = next(certain, (0, ""))
        if len(text) <= len(before):
            return ""
        # Decode these ids again before the next ones: the text of an id depends on the one before it.
        self._ids, self._decoded = ids[self._decoded :], end - self._decoded
        return text[len(before) :]

    def _strip(self, kind: str, text: str) -> str:
        """Hold back blanks, which are dropped at the end. Drop those at the beginning."""
        text = self._blanks.get(kind, "") + text
        if kind not in self._begun and (kind == "thought" or self._tools):
            text = text.lstrip()
        piece = text.rstrip()
        self._blanks[kind] = text[len(piece) :]
        self._begun |= {kind} if piece else set()
        return piece


def certain_end(text: str, stops: Sequence[str]) -> tuple[int, bool]:
    """Return the number of characters that are shown whatever follows, and whether a stop text ends the reply there."""
    found = min((index for stop in stops if (index := text.find(stop)) >= 0), default=len(text))
    first = max(0, len(text) - max(map(len, stops), default=1) + 1)
    begins = next((n for n in range(first, len(text)) if any(stop.startswith(text[n:]) for stop in stops)), len(text))
    return min(found, begins), found < begins


def _differing_error() -> Rejected:
    message = "the engine failed, and its new reply differs from what was sent of the first one: send the request again"
    return Rejected(HTTPStatus.SERVICE_UNAVAILABLE, "reply_differs", message)
