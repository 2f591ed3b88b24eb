"""Conversations as token ids: sampled ids are kept, and only the environment's text is encoded.

The layout of a conversation is the tokenizer's own chat template. Rendering a short made-up conversation that ends in
the new turn, and cutting off what was made up, gives the ids between two replies without decoding either of them.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple, cast

from jinja2 import TemplateError

from starpod.trainer.data.episode import Finish
from starpod.trainer.data.images import MARK, NOT_A_MARK, ImageConfig, image_ids, image_key
from starpod.trainer.prompts.grammar import ANSWER, ANSWER_END, TAGS, THINK, THINK_END
from starpod.trainer.prompts.prompt import Context, PromptConfig, fold

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# Made up, so that it occurs in no template.
_QUESTION, _REPLY, _SYSTEM = "starpod-question", "starpod-reply", "starpod-system"

_CACHED = 1 << 12
"""User messages whose ids are remembered: small environments show the same states over and over."""


class Template:
    """A tokenizer's chat template, and how replies fit into it.

    prefill: text that every prompt ends with, such as a reply's first tag. It is fed, not sampled, and not trained on.
    view: how the model sees images; None where it has no eyes.

    end: the id that the template closes a reply with. stop: ids that a reply ends at: `end` and the tokenizer's own
        end of text.
    opening: how the text of every reply begins although it is not sampled: `prefill`, or what the template's own
        generation prompt opens.
    extends: whether a conversation that grows keeps its beginning, replies with think tags included. Where a template
        rewrites the past (some drop old reasoning), each turn must begin a fresh sample.
    takes_system: whether it has a system role. Where not, system text goes in front of the first user message.
    markers: the tokens that a conversation is laid out with. In a text they are written with a blank inside: what an
        environment shows or a policy once said can never begin or end a turn.

    Raises ValueError for a tokenizer without a chat template, and for one that no reply can be found in.
    """

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, *, prefill: str = "", view: ImageConfig | None = None
    ) -> None:
        if not tokenizer.chat_template:
            name = tokenizer.name_or_path or type(tokenizer).__name__
            raise ValueError(
                f"the tokenizer {name} has no chat template, so there is no way to tell turns apart; "
                "choose an instruction-tuned model, or save a chat_template with the tokenizer"
            )
        self.tokenizer = tokenizer
        self.view = view
        self.mark = None if view is None else cast(int, tokenizer.convert_tokens_to_ids(view.mark))
        self.markers: tuple[str, ...] = ()
        self._in_parts = not self._shows_plain_text()
        self.takes_system = self._has_system_role()
        prompt = self._render([_user(_QUESTION)], generation=True)
        self._gap = self._find_gap(prompt)
        self._begun = prompt[prompt.rindex(THINK) :] if prompt.rstrip().endswith(THINK) else ""
        self.prefill = "" if self._begun and prefill == THINK else prefill
        self.opening = self._begun + self.prefill
        self._end_text, self.end = self._find_end()
        stop = {self.end}
        if isinstance(tokenizer.eos_token_id, int):
            stop.add(tokenizer.eos_token_id)
        self.stop = frozenset(stop)
        self.markers = self._find_markers()
        self._next = lru_cache(_CACHED)(self._encode_next)
        self._first = lru_cache(_CACHED)(self._encode_first)
        self._length = lru_cache(8)(lambda text: len(self.encode(text)))
        self.extends = self._keeps_the_past()
        if view is not None and not self.extends:
            raise ValueError("the chat template rewrites the past, in which images would lose their place")

    # --- ids ---------------------------------------------------------------------------------------------------------

    def first(self, system: str, user: str) -> list[int]:
        """The prompt of a conversation's first reply. An empty `system` means no system message."""
        return list(self._first(system, user))

    def following(self, user: str, reply: Sequence[int]) -> list[int]:
        """The ids that follow `reply`, up to the next one: the user's turn and the generation prompt.

        A reply that was cut before its end token gets it here, where it is not trained on.
        """
        return self._closing(reply, self._next(user))

    def following_messages(self, messages: Sequence[Mapping[str, str]], reply: Sequence[int]) -> list[int]:
        """The same for messages of any roles."""
        return self._closing(reply, self._encode_messages(messages))

    def following_text(self, before: str, whole: str, reply: Sequence[int]) -> list[int] | None:
        """The ids from the end of `reply` to that of `whole`; None where `whole` does not go on from `before`.

        before: a prompt as text, with the text of the reply to it. whole: a later prompt, by `text`.
        """
        closed = before + self._end_text
        if not whole.startswith(closed):
            return None
        return self._closing(reply, self.encode(whole[len(closed) :]))

    def rendered(self, system: str, past: Sequence[tuple[str, str]], user: str) -> list[int]:
        """A prompt encoded from text as a whole. past: user message and reply text of each turn before."""
        messages = []
        for message, reply in past:
            messages += [_user(message), {"role": "assistant", "content": reply}]
        return self.encode(self.text(self._with_system(system, [*messages, _user(user)])))

    def text(self, messages: Sequence[Mapping[str, str]], tools: Sequence[Mapping[str, Any]] = ()) -> str:
        """The prompt of the next reply as text. Messages have a role and content; tools are as OpenAI describes them.

        Raises jinja2.TemplateError for what the template refuses.
        """
        return self._render(messages, generation=True, tools=tools) + self._gap + self.prefill

    def with_image(self, ids: Sequence[int], image: bytes) -> list[int]:
        """The ids of a message, with those of an image in the place of its mark; as they are without an image."""
        if not image:
            return list(ids)
        assert self.view is not None and self.mark is not None
        place = ids.index(self.mark)
        return [*ids[:place], *image_ids(image, self.view.tokens), *ids[place + 1 :]]

    def encode(self, text: str) -> list[int]:
        """A text as ids, where tokens of the tokenizer's own are read as such."""
        return cast("list[int]", self.tokenizer.encode(text, add_special_tokens=False))

    def decode(self, reply: Sequence[int]) -> str:
        """A reply as text: with what the prompt opened, without the id it stopped at."""
        ids = list(reply)
        if ids and ids[-1] in self.stop:
            ids.pop()
        return self.opening + cast(str, self.tokenizer.decode(ids, clean_up_tokenization_spaces=False))

    def spans(self, reply: Sequence[int], blocks: Sequence[tuple[str, int]]) -> list[tuple[str, int]]:
        """Blocks of a decoded reply, whose ends are counted in characters, with their ends in sampled ids.

        An id that lies in two blocks belongs to the one that it begins in. Blocks without an id of their own are left
        out: the prompt opened them. The last block ends with the reply, its end token included.
        """
        spans: list[tuple[str, int]] = []
        before = 0
        for name, end in blocks[:-1]:
            cut = bisect_left(range(len(reply)), end, lo=before, key=lambda count: len(self.decode(reply[:count])))
            if cut > before:
                spans.append((name, cut))
            before = cut
        return [*spans, (blocks[-1][0], len(reply))]

    def encode_reply(self, text: str) -> list[int]:
        """The ids that would have been sampled for a written reply: without what the prompt opened, with the end token.

        Only for replies that nobody sampled, such as demonstrations. Raises ValueError if `text` begins otherwise than
        every reply does.
        """
        opening = self.opening if text.startswith(self.opening) else self.opening.rstrip()
        if not text.startswith(opening):
            raise ValueError(f"a reply begins with {opening!r} here; this one begins with {text[:40]!r}")
        return [*self.encode(text.removeprefix(opening)), self.end]

    def _encode_first(self, system: str, user: str) -> tuple[int, ...]:
        return tuple(self.rendered(system, (), user))

    def _encode_next(self, user: str) -> tuple[int, ...]:
        return tuple(self._encode_messages([_user(user)]))

    def _encode_messages(self, messages: Sequence[Mapping[str, str]]) -> list[int]:
        made_up, following = self._cut(messages)
        ids = self.encode(made_up + following + self._gap + self.prefill)
        return ids[self._length(made_up) :]

    def _closing(self, reply: Sequence[int], following: Sequence[int]) -> list[int]:
        return list(following) if reply and reply[-1] == self.end else [self.end, *following]

    # --- text --------------------------------------------------------------------------------------------------------

    def _render(
        self, messages: Sequence[Mapping[str, str]], *, generation: bool, tools: Sequence[Mapping[str, Any]] = ()
    ) -> str:
        told: Any = [{"role": each["role"], "content": self._content(each["content"])} for each in messages]
        given: Any = {"tools": list(tools)} if tools else {}
        text: Any = self.tokenizer.apply_chat_template(told, tokenize=False, add_generation_prompt=generation, **given)
        return cast(str, text if self.view is None else self.view.write(text))

    def _content(self, text: str) -> str | list[dict[str, str]]:
        told = self._defuse(text)
        if not self._in_parts:
            return told
        texts = [{"type": "text", "text": part} for part in (told.split(MARK) if self.view else [told])]
        parts = [texts[0], *(each for text in texts[1:] for each in ({"type": "image"}, text))]
        return [part for part in parts if part.get("text") != ""] or parts

    def _defuse(self, text: str) -> str:
        for marker in self.markers:
            text = text.replace(marker, f"{marker[0]} {marker[1:]}")
        return text

    def _with_system(self, system: str, messages: list[dict[str, str]]) -> list[dict[str, str]]:
        if not system:
            return messages
        if self.takes_system:
            return [{"role": "system", "content": system}, *messages]
        return [_user(f"{system}\n\n{messages[0]['content']}"), *messages[1:]]

    def _cut(self, messages: Sequence[Mapping[str, str]]) -> tuple[str, str]:
        """A made-up conversation up to the end of its reply, and what follows with these messages."""
        text = self._after_reply(messages)
        at = text.index(_REPLY) + len(_REPLY)
        at = text.index(self._end_text, at) + len(self._end_text)
        return text[:at], text[at:]

    def _after_reply(self, messages: Sequence[Mapping[str, str]]) -> str:
        made_up = [_user(_QUESTION), {"role": "assistant", "content": _REPLY}]
        return self._render([*made_up, *messages], generation=True)

    # --- what the template does, found out once -----------------------------------------------------------------------

    def _shows_plain_text(self) -> bool:
        """Whether messages are plain text; templates of models with eyes may want them in parts."""
        self._in_parts = False
        try:
            return _QUESTION in self._render([_user(_QUESTION)], generation=True)
        except TemplateError:
            return False

    def _find_gap(self, prompt: str) -> str:
        """White space that stands before a reply of the past but not at the end of a prompt. Here prompts end with it,
        so that a growing conversation keeps its beginning."""
        told = self._render([_user(_QUESTION), {"role": "assistant", "content": _REPLY}], generation=False)
        between = told.removeprefix(prompt).partition(_REPLY)[0] if told.startswith(prompt) else ""
        return between if between.isspace() else ""

    def _has_system_role(self) -> bool:
        try:
            text = self._render([{"role": "system", "content": _SYSTEM}, _user(_QUESTION)], generation=True)
        except TemplateError:
            return False
        return _SYSTEM in text

    def _find_end(self) -> tuple[str, int]:
        """The token that closes a reply: the first one of the tokenizer's own after it."""
        text = self._after_reply([_user(_QUESTION)])
        if _REPLY not in text:
            raise ValueError("the chat template does not show an assistant's reply")
        rest = text[text.index(_REPLY) + len(_REPLY) :]
        tokens = {str(token): index for index, token in self.tokenizer.added_tokens_decoder.items()}
        found = [(rest.index(token), -len(token), token) for token in tokens if token in rest]
        place, _, token = min(found, default=(len(rest), 0, ""))
        if not token or rest[:place].strip():
            raise ValueError(
                f"the chat template closes a reply with the text {rest[:20]!r} and not with a token of its own, "
                "so a sampled reply would have no end"
            )
        return token, tokens[token]

    def _find_markers(self) -> tuple[str, ...]:
        text = self._after_reply([_user(_QUESTION)])
        if self.takes_system:
            text += self._render([{"role": "system", "content": _SYSTEM}, _user(_QUESTION)], generation=True)
        if self.view is not None:
            text += self.view.write(MARK)
        tokens = {str(token) for token in self.tokenizer.added_tokens_decoder.values()} - set(TAGS)
        return tuple(sorted(token for token in tokens if token in text and len(token) > 1))

    def _keeps_the_past(self) -> bool:
        """Compares a conversation that grew turn by turn with the same one rendered whole."""
        begin = self.opening or THINK
        thought = "" if begin.endswith(ANSWER) else f"starpod-thought{THINK_END}{ANSWER}"
        reply = f"{begin}{thought}starpod-action{ANSWER_END}"
        questions = [f"{_QUESTION}-{number}" for number in range(3)]
        messages = [_user(questions[0])]
        grown = self._render(self._with_system(_SYSTEM, messages), generation=True) + self._gap
        for question in questions[1:]:
            grown += reply.removeprefix(self._begun) + self._end_text + self._cut([_user(question)])[1] + self._gap
            messages += [{"role": "assistant", "content": reply}, _user(question)]
        whole = self._render(self._with_system(_SYSTEM, messages), generation=True) + self._gap
        following = self._next(questions[-1])
        return grown == whole and tuple(self.encode(whole + self.prefill)[-len(following) :]) == following


def _user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


class Prompt(NamedTuple):
    """The ids that precede a reply.

    context: ids of the whole context, for the engine. appended: what `Turn.prompt` holds: the whole context where
    `fresh`, else what was appended since the last reply.
    """

    context: list[int]
    appended: list[int]
    fresh: bool


@dataclass(frozen=True, slots=True)
class Exchange:
    """A turn that is over: what the policy was told and shown, and its reply."""

    user: str
    image: bytes
    reply: list[int]
    text: str


def part_start(turn: int, *, window: int, pinned: int, overlap: int) -> int:
    """The first turn, after the pinned ones, of the part of a split conversation in which a turn is played.

    Parts hold `window` turns each, and begin with the last `overlap` ones of the part before.
    """
    return pinned + max(turn - pinned - overlap, 0) // (window - overlap) * (window - overlap)


class Conversation:
    """One episode's conversation: `ask`, sample, `answer`, and again.

    context: what a reply sees; see `prompt.Context`. window: turns shown by `window` and `single_turn`, the present one
    included; None: all. pinned, overlap: see `part_start`.

    While the context only grows, each prompt is the one before with the sampled reply and what followed it. Everything
    else makes each turn a fresh sample: a window, a single turn, and a template that rewrites the past. Past replies
    are then context like any other text; their sampled ids are used where the template keeps replies as they are. So
    each turn is trained on once, whichever parts of a split conversation show it (KLong's splitting, arXiv 2602.17547).
    """

    def __init__(
        self,
        template: Template,
        *,
        context: Context = "full",
        window: int | None = None,
        pinned: int = 0,
        overlap: int = 0,
    ) -> None:
        self.template = template
        self.context = context
        self.window = window
        self.pinned = pinned
        self.overlap = overlap
        self.exchanges: list[Exchange] = []
        self.images: dict[int, bytes] = {}
        """All that were shown, by key."""
        self._grows = context in ("full", "split") and template.extends
        self._system = ""
        self._stream: list[int] = []
        self._asked: tuple[str, bytes, list[int]] | None = None

    @classmethod
    def of(cls, template: Template, config: PromptConfig) -> Conversation:
        """One that shows as much of the past as is configured."""
        return cls(template, context=config.context, window=config.window, pinned=config.pinned, overlap=config.overlap)

    def system(self, text: str) -> None:
        """The system message, told before the first turn. Empty: none."""
        self._system = text.replace(MARK, NOT_A_MARK) if self.template.view else text

    def ask(self, user: str, image: bytes = b"", *, most_tokens: int | None = None) -> Prompt:
        """The prompt of the next reply. Asking again without an answer replaces the question.

        image: as the model sees it, in the place of a mark in `user`; empty: none.
        most_tokens: to keep the context within, `window` and `single_turn` show fewer turns, down to the present one.
        """
        if self._grows and self.exchanges and not self._part_begins():
            appended = self.template.with_image(self.template.following(user, self.exchanges[-1].reply), image)
            prompt = Prompt(self._stream + appended, appended, False)
        else:
            context = self._fresh(user, image, most_tokens)
            prompt = Prompt(context, list(context), True)
        if image:
            self.images[image_key(image)] = image
        self._asked = (user, image, prompt.context)
        return prompt

    def answer(self, reply: Sequence[int], finish: Finish, text: str) -> None:
        """Takes over the sampled ids, as they are.

        text: as `Template.decode` gives it. Raises ValueError if nothing was asked, and if a reply that stopped does
        not end with the id that it stopped at: then the engine dropped what the policy has to learn.
        """
        if self._asked is None:
            raise ValueError("there is no question to answer: call `ask` first")
        if finish == "stop" and not (reply and reply[-1] in self.template.stop):
            raise ValueError("a reply stopped, but the id that it stopped at is missing; the engine must return it")
        user, image, context = self._asked
        self._asked = None
        self.exchanges.append(Exchange(user, image, list(reply), text))
        if self._grows:
            self._stream = [*context, *reply]

    def _part(self, turn: int) -> int:
        """Where the part of a turn begins; 0 where the conversation is not split."""
        if self.context != "split" or self.window is None:
            return 0
        return part_start(turn, window=self.window, pinned=self.pinned, overlap=self.overlap)

    def _part_begins(self) -> bool:
        turn = len(self.exchanges)
        return self._part(turn) != self._part(turn - 1)

    def _fresh(self, user: str, image: bytes, most_tokens: int | None) -> list[int]:
        """A whole context, from the turns that are shown."""
        past = self.exchanges
        if self.context == "split":
            return self._showing([*past[: self.pinned], *past[max(self._part(len(past)), self.pinned) :]], user, image)
        if self.context != "full" and self.window is not None:
            past = past[max(len(past) - self.window + 1, 0) :]
        context = self._showing(past, user, image)
        while self.context != "full" and past and most_tokens is not None and len(context) > most_tokens:
            past = past[1:]
            context = self._showing(past, user, image)
        return context

    def _showing(self, past: Sequence[Exchange], user: str, image: bytes) -> list[int]:
        template = self.template
        if self.context == "single_turn":
            told = [(exchange.user, exchange.text) for exchange in past]
            return template.first(self._system, fold(told, len(self.exchanges), user))
        if not template.extends:
            return template.rendered(self._system, [(exchange.user, exchange.text) for exchange in past], user)
        users = [*((exchange.user, exchange.image) for exchange in past), (user, image)]
        ids = template.with_image(template.first(self._system, users[0][0]), users[0][1])
        for exchange, (following, shown) in zip(past, users[1:], strict=True):
            ids += exchange.reply
            ids += template.with_image(template.following(following, exchange.reply), shown)
        return ids
