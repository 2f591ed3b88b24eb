"""One rollout session: samples replies, gives a repeated request the reply that it had, and hands each turn on."""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from http import HTTPStatus
from typing import Any

from starpod.gateway.lineage import Draft, Layout, Lineage
from starpod.gateway.requests import Answer, Ask, Call, Refused, bad_request
from starpod.gateway.tools import parse_reply
from starpod.trainer.agents.config import SamplingConfig
from starpod.trainer.data.episode import Turn
from starpod.trainer.engines.base import Engine, EngineError, Reply, Request
from starpod.trainer.prompts.conversation import Template
from starpod.trainer.seeds import derive

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
"""Names of sessions: what an API key may be."""

MOST_REPLIES = 1000
"""Replies of a session: an agent may never end."""

AT_ONCE = 32
"""Replies that one session samples at a time. Further requests wait, so that a session leaves the engine to others."""

LONG = 20_000
"""Prompts of this many characters are made in a thread. Encoding takes about 0.15 s for 100,000, in which nothing else
is answered; for less, the detour costs more than it saves."""
_MESSAGE_CHARACTERS = 20
"""A message costs as much time as this many characters: 10,000 empty ones would take 0.6 s of the event loop."""


@dataclass(frozen=True, kw_only=True)
class Sampler:
    """What all sessions sample from. The gateway alone says how: temperature and top_p of requests are not looked at,
    as the trainer scores every token at one temperature. temperature: None is that of `sampling`."""

    engine: Engine
    layout: Layout
    sampling: SamplingConfig
    seed: int = 0
    temperature: float | None = None

    @property
    def template(self) -> Template:
        return self.layout.template


@dataclass(frozen=True, slots=True)
class Replied:
    """A reply with its turn. text, given: of its lineage's node; parent: the number of the reply above, 0 without."""

    request: bytes
    history: bytes
    parent: int
    text: str
    turn: Turn
    answer: Answer
    given: int = 0

    def to_json(self) -> dict[str, Any]:
        """JSON values; `from_json` is the inverse."""
        return {
            "request": self.request.hex(),
            "history": self.history.hex(),
            "parent": self.parent,
            "text": self.text,
            "turn": self.turn.to_json(),
            "answer": asdict(self.answer),
            "given": self.given,
        }

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Replied:
        answer = {**values["answer"], "calls": tuple(Call(**call) for call in values["answer"]["calls"])}
        request, history = (bytes.fromhex(values[name]) for name in ("request", "history"))
        turn = Turn.from_json(values["turn"])
        return cls(request, history, values["parent"], values["text"], turn, Answer(**answer), values["given"])


@dataclass
class Session:
    """The replies of one session.

    name: which its API key is, or begins with. stream: names its random stream and its cache in the engine; the same
    for a session that is played again. order: of its requests, as in `Request`. took: called with each reply before
    its client gets it. over: why it takes no more requests; empty while it does.
    full: whether a request left too little room for a reply. broken: what the engine failed with.
    """

    name: str
    sampler: Sampler
    took: Callable[[Replied], None]
    stream: str = ""
    order: int = 0
    over: str = ""
    replies: int = 0
    tokens: int = 0
    full: bool = False
    broken: Exception | None = None
    _lineage: Lineage = field(init=False)
    _answers: dict[bytes, asyncio.Future[Answer]] = field(default_factory=dict)
    _reserved: int = 0
    """Replies that are being sampled, or wait to be."""
    _slots: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(AT_ONCE))

    def __post_init__(self) -> None:
        self.stream = self.stream or self.name
        self._lineage = Lineage(self.sampler.layout)

    async def complete(self, ask: Ask) -> Answer:
        """The reply to a request; to one that was made before the same reply, or that which is being sampled.

        A caller who goes away cancels nothing: asking again gives the reply. Raises Refused.
        """
        if not ask.messages:
            raise bad_request("there is no message to reply to")
        self._room(self.sampler.layout.least_tokens(ask), "at least ")  # first of all: even hashing takes time
        key = ask.key
        known = self._answers.get(key)
        if known is None:
            self._check()
            self._reserved += 1
            known = asyncio.ensure_future(self._reply(key, ask))
            known.add_done_callback(lambda future: self._keep(key, future))
            self._answers[key] = known
        return await asyncio.shield(known)

    async def count(self, ask: Ask) -> int:
        """Return the number of tokens of a request's prompt. Raises Refused for one that cannot fit."""
        self._room(self.sampler.layout.least_tokens(ask), "at least ", sampled=False)
        return len((await self._draft(ask)).context)

    @property
    def sampling(self) -> bool:
        """Whether a reply is being sampled."""
        return any(not future.done() for future in self._answers.values())

    def restore(self, replied: Replied) -> None:
        """Take over a reply of before a restart."""
        message, text, given = replied.answer.message, replied.text, replied.given
        self._lineage.restore(replied.history, replied.parent, replied.turn, message, text=text, given=given)
        future: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
        future.set_result(replied.answer)
        self._answers[replied.request] = future
        self.replies = replied.answer.number
        self.tokens += len(replied.turn.reply)

    def close(self, why: str) -> None:
        """Refuse what comes from now on, but for requests that had their reply, and takes back what is sampled."""
        self.over = self.over or why
        for future in self._answers.values():
            future.cancel()
        self.sampler.engine.forget(self.stream)

    def _check(self) -> None:
        if self.over:
            raise Refused(HTTPStatus.GONE, "session_over", f"the session {self.name} is over: {self.over}")
        if self.replies + self._reserved >= MOST_REPLIES:
            raise Refused(HTTPStatus.BAD_REQUEST, "session_too_long", f"a session has at most {MOST_REPLIES} replies")

    def _keep(self, key: bytes, future: asyncio.Future[Answer]) -> None:
        """A request that failed may be made again."""
        if future.cancelled() or future.exception() is not None:
            del self._answers[key]

    async def _draft(self, ask: Ask) -> Draft:
        if ask.characters + _MESSAGE_CHARACTERS * len(ask.messages) < LONG:
            return self._lineage.ask(ask)
        return await self.sampler.layout.encoding.in_thread(self.name, self._lineage.ask, ask)

    def _room(self, prompt: int, bound: str = "", *, sampled: bool = True) -> int:
        """Return the number of tokens left for a reply. Raises Refused where they are too few.

        Args:
            prompt: Number of tokens of the prompt.
            bound: What to write before that number in the error.
            sampled: Whether the request asks for a reply, so that the session counts as full.
        """
        limits = self.sampler.sampling
        room = limits.max_episode_tokens - prompt
        if room < limits.least_room:
            self.full = self.full or sampled
            raise Refused(
                HTTPStatus.BAD_REQUEST,
                "context_length_exceeded",
                f"the conversation has {bound}{prompt} tokens; this model's context is {limits.max_episode_tokens}"
                f" tokens, of which a reply must have {limits.least_room}",
            )
        return room

    async def _reply(self, key: bytes, ask: Ask) -> Answer:
        """Sample a reply that was reserved."""
        try:
            async with self._slots:
                return await self._sample(key, ask)
        finally:
            self._reserved -= 1

    async def _sample(self, key: bytes, ask: Ask) -> Answer:
        sampler, limits = self.sampler, self.sampler.sampling
        draft = await self._draft(ask)
        room = self._room(len(draft.context))
        began = time.perf_counter()
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
                )
            )
        except (EngineError, RuntimeError) as error:
            self.broken = error
            raise Refused(HTTPStatus.SERVICE_UNAVAILABLE, "engine_failed", str(error)) from error
        except ValueError as error:
            raise Refused(HTTPStatus.BAD_REQUEST, "invalid_value", str(error)) from error
        return self._take(key, draft, reply, time.perf_counter() - began)

    def _take(self, key: bytes, draft: Draft, reply: Reply, seconds: float) -> Answer:
        sampler, ask = self.sampler, draft.ask
        template, tokens = sampler.template, reply.tokens
        tools = bool(ask.tools) and ask.choice.kind != "none"
        shown, length, stop = _cut(template, tokens, ask.stop)
        whole, finish = draft.begun(shown), "stop" if stop else reply.finish
        parts = parse_reply(whole, tools=tools, most_calls=1 if ask.one_call else None)
        if ask.one_call and parts.calls and whole[parts.end :].strip():
            # The reply ends with its first call: what follows is dropped, as after a stop text.
            beginning = shown[: len(shown) - len(whole) + parts.end]
            length, finish, stop = _count_to(template, tokens, beginning), "stop", ""
            parts = parse_reply(whole[: parts.end], tools=tools)
        raw = draft.begun(template.decode(tokens[:length]))
        number = self.replies + 1
        answer = Answer(
            id=f"{key.hex()[:24]}",
            number=number,
            text=parts.text,
            thought=parts.thought,
            calls=tuple(Call(call.name, call.arguments, f"call_{number}_{n}") for n, call in enumerate(parts.calls)),
            finish=finish,
            prompt_tokens=len(draft.context),
            reply_tokens=length,
            cached_tokens=len(draft.context) - len(draft.appended),
            created=int(time.time()),
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
            text=raw,
            thought=parts.thought,
            generating=seconds,
        )
        above = draft.parent.number if draft.parent else 0
        # First of all: a reply that cannot be written down has not been.
        self.took(Replied(key, node.key, above, node.text, turn, answer, draft.given))
        self._lineage.add(node, answer.message)
        self.replies = number
        self.tokens += length
        return answer


def _new_texts(ask: Ask) -> list[str]:
    """Texts of the messages after the last reply."""
    texts: list[str] = []
    for message in reversed(ask.messages):
        if message.role == "assistant":
            break
        if message.role != "system":
            texts.insert(0, message.text)
    return texts


def _cut(template: Template, tokens: list[int], stops: tuple[str, ...]) -> tuple[str, int, str]:
    """The text before the first stop text, how many ids reach to that text's end, and which it was; "" for none.

    The ids after it are dropped: nobody has seen them, so nothing that follows depends on them.
    """
    raw = template.decode(tokens)
    places = [(place, stop) for stop in stops if stop and (place := raw.find(stop)) >= 0]
    if not places:
        return raw, len(tokens), ""
    place, stop = min(places)
    return raw[:place], _count_to(template, tokens, raw[: place + len(stop)]), stop


def _count_to(template: Template, tokens: list[int], text: str) -> int:
    """Return how many of a reply's ids it takes to write its beginning."""
    low, high = 1, len(tokens)
    while low < high:
        middle = (low + high) // 2
        if template.decode(tokens[:middle]).startswith(text):
            high = middle
        else:
            low = middle + 1
    return low
