"""A rollout session. It samples a reply per request, repeats it for a repeated request, and reports each turn."""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from http import HTTPStatus
from typing import Any

from starpod.gateway.lineage import ChatLayout, Draft, Lineage
from starpod.gateway.requests import Answer, Ask, Rejected, bad_request
from starpod.gateway.streams import LiveReply
from starpod.trainer.agents.config import SamplingConfig
from starpod.trainer.configuration.seeds import derive
from starpod.trainer.data.episode import End, Turn
from starpod.trainer.engines.base import Engine, EngineError, Reply, Request
from starpod.trainer.prompts.formats.base import ReplyCall
from starpod.trainer.prompts.template import Template

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
"""Pattern of session names, which are also API keys."""

MOST_REPLIES = 1000
"""Maximum number of replies of a session, because an agent may never stop."""

AT_ONCE = 32
"""Maximum number of replies that a session samples at the same time. Further requests wait, so that other
sessions get a share."""

LONG_PROMPT = 20_000
"""Prompts of this many characters or more are encoded in a thread, because 100,000 would block the event loop for about
0.15 s. For shorter prompts, the thread costs more than it saves."""
_MESSAGE_CHARACTERS = 20
"""Number of characters that take as much time as one message. 10,000 empty messages would block for 0.6 s."""


@dataclass(frozen=True, kw_only=True)
class Sampler:
    """The engine and the settings with which all sessions sample.

    Temperature and top_p of requests are ignored, because the trainer scores every token at one temperature.
    """

    engine: Engine
    layout: ChatLayout
    sampling: SamplingConfig
    seed: int = 0
    temperature: float | None = None
    """Temperature of sampling; None: the temperature in `sampling`."""

    @property
    def template(self) -> Template:
        return self.layout.template


@dataclass(frozen=True, slots=True)
class Replied:
    """A reply with its turn, as it is recorded."""

    request: bytes
    """Key of the request."""
    history: bytes
    """Key of the history up to the reply."""
    parent: int
    """Number of the parent reply; 0: none."""
    text: str
    """Text of prompt and reply, as in `Node.text`."""
    turn: Turn
    answer: Answer

    def to_json(self) -> dict[str, Any]:
        """Return JSON values, from which `from_json` makes an equal object."""
        return {
            "request": self.request.hex(),
            "history": self.history.hex(),
            "parent": self.parent,
            "text": self.text,
            "turn": self.turn.to_json(),
            "answer": asdict(self.answer),
        }

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Replied:
        answer = {**values["answer"], "calls": tuple(ReplyCall(**call) for call in values["answer"]["calls"])}
        request, history = (bytes.fromhex(values[name]) for name in ("request", "history"))
        turn = Turn.from_json(values["turn"])
        return cls(request, history, values["parent"], values["text"], turn, Answer(**answer))


@dataclass
class RolloutSession:
    """One session with its replies."""

    name: str
    """Name of the session. Its API key is this name, or begins with it."""
    sampler: Sampler
    on_reply: Callable[[Replied], None]
    """Called with each reply before the client gets it."""
    stream: str = ""
    """Name of the session's random stream and engine cache. It is the same if the session is played again."""
    order: int = 0
    """Priority of the session's requests, as in `Request`."""
    over: str = ""
    """Why the session accepts no more requests; empty if it accepts them."""
    replies: int = 0
    tokens: int = 0
    full: End = ""
    """Limit because of which a reply was refused since the last one: "context", "max_turns", or ""."""
    most_replies: int | None = None
    """Maximum number of replies; None or 0: `MOST_REPLIES`."""
    broken: Exception | None = None
    """The engine's error, if it failed."""
    _lineage: Lineage = field(init=False)
    _answers: dict[bytes, LiveReply] = field(default_factory=dict)
    _reserved: int = 0
    """Number of replies that are being sampled or wait to be sampled."""
    _slots: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(AT_ONCE))

    def __post_init__(self) -> None:
        self.stream = self.stream or self.name
        self._lineage = Lineage(self.sampler.layout)

    async def complete(self, ask: Ask) -> Answer:
        """Return the complete reply to a request, as `follow`."""
        with self.follow(ask) as live:
            await asyncio.wait((live.sampling,))
            return live.result()

    @contextmanager
    def follow(self, ask: Ask) -> Iterator[LiveReply]:
        """Yield the reply to a request. A repeated request gets the same reply, also while it is being sampled.

        Sampling stops when the last caller has left this context. Nothing of the reply is recorded then, and the
        request can be made again. Raise Rejected if the request cannot be answered.
        """
        if not ask.messages:
            raise bad_request("there is no message to reply to")
        # Before anything else, because even hashing a long request takes time.
        self._room_for_reply(self.sampler.layout.least_tokens(ask), "at least ")
        key = ask.key
        live = self._answers.get(key)
        if live is None:
            self._require_open()
            self._reserved += 1
            live = self._answers[key] = LiveReply(self.sampler.template, self._require_open)
            live.sampling = asyncio.ensure_future(self._sample(key, ask, live))
            live.sampling.add_done_callback(lambda _: self._release(key, live))
        live.callers += 1
        try:
            yield live
        finally:
            live.callers -= 1
            if not live.callers and not live.sampling.done():
                del self._answers[key]  # a request that is made again now must not wait for the cancelled reply
                live.sampling.cancel()

    async def count(self, ask: Ask) -> int:
        """Return the number of tokens of a request's prompt. Raise Rejected if the prompt certainly cannot fit."""
        self._room_for_reply(self.sampler.layout.least_tokens(ask), "at least ", sampled=False)
        return len((await self._make_draft(ask)).context)

    @property
    def sampling(self) -> bool:
        """Whether a reply is being sampled."""
        return any(not live.sampling.done() for live in self._answers.values())

    def restore(self, replied: Replied) -> None:
        """Add a reply from before a restart."""
        self._lineage.restore(replied.history, replied.parent, replied.turn, replied.answer.message, text=replied.text)
        live = self._answers[replied.request] = LiveReply(self.sampler.template, self._require_open)
        live.sampling = asyncio.get_running_loop().create_future()
        live.sampling.set_result(replied.answer)
        self.replies = replied.answer.number
        self.tokens += len(replied.turn.reply)

    def close(self, reason: str) -> None:
        """Cancel replies that are being sampled, and refuse all requests except repeated ones that have a reply."""
        self.over = self.over or reason
        for live in self._answers.values():
            live.sampling.cancel()
        self.sampler.engine.forget(self.stream)

    def _require_open(self) -> None:
        if self.over:
            raise Rejected(HTTPStatus.GONE, "session_over", f"the session {self.name} is over: {self.over}")
        if self.replies + self._reserved >= (limit := self.most_replies or MOST_REPLIES):
            self.full = self.full or ("max_turns" if self.replies >= limit else "")
            raise Rejected(HTTPStatus.BAD_REQUEST, "session_too_long", f"this session has at most {limit} replies")

    def _release(self, key: bytes, live: LiveReply) -> None:
        """Release the reservation of a reply. Forget the request if it failed, so that it can be made again."""
        self._reserved -= 1
        live.notify()
        failed = live.sampling.cancelled() or live.sampling.exception() is not None
        if failed and self._answers.get(key) is live:
            del self._answers[key]

    async def _make_draft(self, ask: Ask) -> Draft:
        if ask.characters + _MESSAGE_CHARACTERS * len(ask.messages) < LONG_PROMPT:
            return self._lineage.ask(ask)
        return await self.sampler.layout.encoding.in_thread(self.name, self._lineage.ask, ask)

    def _room_for_reply(self, prompt: int, bound: str = "", *, sampled: bool = True) -> int:
        """Return the number of tokens left for a reply. Raise Rejected if they are too few.

        Args:
            prompt: Number of tokens of the prompt.
            bound: Words before that number in the error, such as "at least ".
            sampled: Whether to count the session as full in case of an error, because the request asks for a reply.
        """
        limits = self.sampler.sampling
        room = limits.max_episode_tokens - prompt
        if room < limits.least_room:
            self.full = self.full or ("context" if sampled else "")
            raise Rejected(
                HTTPStatus.BAD_REQUEST,
                "context_length_exceeded",
                f"the conversation has {bound}{prompt} tokens; this model's context is {limits.max_episode_tokens}"
                f" tokens, of which a reply must have {limits.least_room}",
            )
        return room

    async def _sample(self, key: bytes, ask: Ask, live: LiveReply) -> Answer:
        sampler, limits = self.sampler, self.sampler.sampling
        async with self._slots:
            draft = await self._make_draft(ask)
            room = self._room_for_reply(len(draft.context))
            head = Answer(
                id=key.hex()[:24],
                prompt_tokens=len(draft.context),
                cached_tokens=len(draft.context) - len(draft.appended),
                created=int(time.time()),
            )
            live.start = draft, head
            start = time.perf_counter()
            try:
                reply = await sampler.engine.generate(
                    Request(
                        draft.context,
                        max_tokens=min(room, limits.max_reply_tokens, ask.max_tokens or room),
                        stop=sampler.template.stop,
                        temperature=limits.temperature if sampler.temperature is None else sampler.temperature,
                        seed=derive(sampler.seed, "gateway", self.stream, key.hex()),
                        order=self.order,
                        conversation=self.stream,
                        structure=draft.structure,
                        on_tokens=live.feed if ask.stream else None,
                    )
                )
            except (EngineError, RuntimeError) as error:
                self.broken = error
                raise Rejected(HTTPStatus.SERVICE_UNAVAILABLE, "engine_failed", str(error)) from error
            except ValueError as error:
                raise Rejected(HTTPStatus.BAD_REQUEST, "invalid_value", str(error)) from error
            live.end(reply.tokens)
            return self._record_reply(key, draft, head, reply, time.perf_counter() - start)

    def _record_reply(self, key: bytes, draft: Draft, head: Answer, reply: Reply, seconds: float) -> Answer:
        sampler, ask = self.sampler, draft.ask
        template, tokens = sampler.template, reply.tokens
        calls, tools = template.layout.calls, ask.callable_tools
        reply_text, length, stop = template.cut(tokens, ask.stop)
        full_text, finish = draft.complete_text(reply_text), "stop" if stop else reply.finish
        parts = calls.parse(full_text, tools or None)
        if ask.one_call and parts.calls and full_text[parts.ends[0] :].strip():
            # The reply ends with its first call: drop the rest, as after a stop text.
            beginning = reply_text[: len(reply_text) - len(full_text) + parts.ends[0]]
            length, finish, stop = template.count_ids(tokens, len(beginning), 1), "stop", ""
            parts = calls.parse(full_text[: parts.ends[0]], tools)
        raw = draft.complete_text(template.decode(tokens[:length]))
        number = self.replies + 1
        answer = replace(
            head,
            number=number,
            # A stream cannot wait for a call, before which blanks are dropped.
            text=parts.text.lstrip() if tools else parts.text,
            thought=parts.thought,
            calls=tuple(
                ReplyCall(call.name, call.arguments, f"call_{number}_{n}") for n, call in enumerate(parts.calls)
            ),
            finish=finish,
            reply_tokens=length,
            stop=stop,
        )
        node, fresh = self._lineage.node(draft, reply.tokens[:length], raw, answer.message)
        turn = Turn(
            observation="\n".join(_new_texts(ask)),
            fresh=fresh,
            prompt=list(draft.context if fresh else draft.appended),
            reply=list(node.reply),
            logprobs=reply.logprobs[:length],
            versions=reply.versions[:length],
            finish=answer.finish,
            structure=draft.structure,
            text=raw,
            thought=parts.thought,
            generating=seconds,
        )
        parent_number = draft.parent.number if draft.parent else 0
        # Before anything else changes: a reply that cannot be recorded must have no effect.
        self.on_reply(Replied(key, node.key, parent_number, node.text, turn, answer))
        self._lineage.add(node, answer.message)
        self.replies, self.full = number, ""
        self.tokens += length
        return answer


def _new_texts(ask: Ask) -> list[str]:
    """Return the texts of the messages after the last reply."""
    texts: list[str] = []
    for message in reversed(ask.messages):
        if message.role == "assistant":
            break
        if message.role != "system":
            texts.insert(0, message.text)
    return texts
