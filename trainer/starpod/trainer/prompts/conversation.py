"""Conversations as token ids: sampled ids are kept, and only the environment's text is encoded.

The tokenizer's chat template defines the layout of a conversation. To get the ids between two replies without decoding
either of them, a short dummy conversation with the new turn at its end is rendered, and the dummy part is cut off.
"""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate
from typing import TYPE_CHECKING, Any, NamedTuple, cast

from jinja2 import TemplateError

from starpod.trainer.data.episode import Finish
from starpod.trainer.data.images import MARK, NOT_A_MARK, ImageConfig, image_ids, image_key
from starpod.trainer.prompts.grammar import ANSWER, ANSWER_END, CALL_TAGS, FURTHER_TAGS, TAGS, THINK, THINK_END
from starpod.trainer.prompts.prompt import Context, PromptConfig, fold

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# Dummy texts that occur in no template.
_QUESTION, _REPLY, _SYSTEM = "starpod-question", "starpod-reply", "starpod-system"

_SPLIT = "\ufdd0"
"""Noncharacter of Unicode that is inserted into control tokens in the contents of messages. Rendered texts are encoded
in parts, between these characters, so that the tokens' letters are encoded as any other text."""

_CACHED = 1 << 12
"""Number of user messages whose ids are cached. Small environments show the same states again and again."""


class Template:
    """A tokenizer's chat template, with its properties that matter for replies.

    Args:
        tokenizer: Tokenizer with a chat template.
        prefill: Text at the end of every prompt, such as a reply's first tag. It is neither sampled nor trained on.
        view: Image processing of the model; None for a text model.

    Attributes:
        end: Id with which the template closes a reply.
        stop: Ids that end a reply: `end` and the tokenizer's end of text.
        opening: Beginning of every reply's text that is not sampled: `prefill`, preceded by a tag that the template's
            generation prompt opens.
        extends: Whether a growing conversation keeps its beginning, including replies with think tags. If a template
            rewrites the past (some drop old reasoning), each turn must begin a fresh sample.
        takes_system: Whether there is a system role. Otherwise system text is put before the first user message.
        control: The tokenizer's special tokens, and other added tokens of the template's layout. In the contents of
            messages they are encoded as text, so that an observation or a past reply cannot begin or end a turn.

    Raises:
        ValueError: If the tokenizer has no chat template, or if replies cannot be located in it.
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
        self.control: tuple[str, ...] = ()
        self._in_parts = not self._shows_plain_text()
        self.takes_system = self._has_system_role()
        prompt = self._render([_user(_QUESTION)], generation=True)
        self._gap = self._find_gap(prompt)
        self._think_start = prompt[prompt.rindex(THINK) :] if prompt.rstrip().endswith(THINK) else ""
        self.prefill = "" if self._think_start and prefill == THINK else prefill
        self.opening = self._think_start + self.prefill
        self._end_text, self.end = self._find_end()
        self._before_reply = prompt.rpartition(_QUESTION)[2] + self._gap + self.prefill
        stop = {self.end}
        if isinstance(tokenizer.eos_token_id, int):
            stop.add(tokenizer.eos_token_id)
        self.stop = frozenset(stop)
        self.control = self._find_control()
        self._control_start = _starts_of(self.control)
        self._control_start_in_replies = _starts_of(token for token in self.control if token not in CALL_TAGS)
        self._next = lru_cache(_CACHED)(self._encode_next)
        self._first_prompt = lru_cache(_CACHED)(self._encode_first)
        self._head = lru_cache(8)(self.encode)
        self.extends = self._keeps_the_past()
        if view is not None and not self.extends:
            raise ValueError("the chat template rewrites earlier turns, so images would lose their place")

    # --- ids ---------------------------------------------------------------------------------------------------------

    def first_prompt(self, system: str, user: str) -> list[int]:
        """Return the prompt of a conversation's first reply. An empty `system` means no system message."""
        return list(self._first_prompt(system, user))

    def next_ids(self, user: str, reply: Sequence[int]) -> list[int]:
        """Return the ids between `reply` and the next reply: the user's turn and the generation prompt.

        If the reply was cut off before its end token, the ids begin with that token, which is not trained on.
        """
        return self._close_reply(reply, self._next(user))

    def following_messages(self, messages: Sequence[Mapping[str, str]], reply: Sequence[int]) -> list[int]:
        """Return the ids between `reply` and the next reply, with messages of any roles instead of a user's turn."""
        return self._close_reply(reply, self._encode_messages(messages))

    def following_text(self, before: str, whole: str, reply: Sequence[int]) -> list[int] | None:
        """Return the ids from the end of `reply` to the end of `whole`; None if `whole` does not continue `before`.

        `before` is the text of an earlier prompt and of the reply to it, and `whole` is a later prompt.
        """
        closed = before + self._end_text
        if not whole.startswith(closed):
            return None
        return self._close_reply(reply, self._encode_after(self._end_text, whole[len(closed) :]))

    def encode_conversation(self, system: str, exchanges: Sequence[tuple[str, str]], user: str) -> list[int]:
        """Encode a prompt from text. `exchanges` has the user message and the reply text of each previous turn."""
        messages = []
        for message, reply in exchanges:
            messages += [_user(message), {"role": "assistant", "content": reply}]
        return self.encode(self.text(self._with_system(system, [*messages, _user(user)])))

    def text(self, messages: Sequence[Mapping[str, str]], tools: Sequence[Mapping[str, Any]] = ()) -> str:
        """Render the prompt of the next reply as text, with tools in OpenAI's format.

        Raises jinja2.TemplateError if the template refuses an argument.
        """
        return self._render(messages, generation=True, tools=tools) + self._gap + self.prefill

    def with_image(self, ids: Sequence[int], image: bytes) -> list[int]:
        """Return a message's ids. If there is an image, its ids replace the placeholder id in the message."""
        if not image:
            return list(ids)
        assert self.view is not None and self.mark is not None
        index = ids.index(self.mark)
        return [*ids[:index], *image_ids(image, self.view.tokens), *ids[index + 1 :]]

    def encode(self, text: str) -> list[int]:
        """Encode a rendered text. Control tokens of the layout become single ids, those in contents do not."""
        parts = text.split(_SPLIT)
        # A tokenizer may put a blank before a text, but not after a special token. All parts are encoded at once,
        # because a text may have a million of them.
        ids = cast("list[int]", self.tokenizer.encode(self._end_text.join(parts), add_special_tokens=False))
        if len(parts) == 1:
            return ids
        ends = [index for index, id_ in enumerate(ids) if id_ == self.end]
        counts = accumulate(part.count(self._end_text) for part in parts[:-1])
        joints = {ends[count + number] for number, count in enumerate(counts)}
        return [id_ for index, id_ in enumerate(ids) if index not in joints]

    def decode(self, reply: Sequence[int]) -> str:
        """Decode a reply. The text includes `opening` but not the stop token."""
        ids = list(reply)
        if ids and ids[-1] in self.stop:
            ids.pop()
        return self.opening + cast(str, self.tokenizer.decode(ids, clean_up_tokenization_spaces=False))

    def spans(self, reply: Sequence[int], blocks: Sequence[tuple[str, int]]) -> list[tuple[str, int]]:
        """Convert the ends of a reply's blocks from character indices in its text to indices of sampled ids.

        An id that overlaps two blocks belongs to the first one. Blocks without any id are left out, because they are
        part of the prompt. The last block ends with the reply and includes its end token.
        """
        spans: list[tuple[str, int]] = []
        start = 0
        for name, end in blocks[:-1]:
            stop = self.count_ids(reply, end, start)
            if stop > start:
                spans.append((name, stop))
            start = stop
        return [*spans, (blocks[-1][0], len(reply))]

    def count_ids(self, reply: Sequence[int], length: int, least: int = 0) -> int:
        """Return how many of a reply's first ids, at least `least`, show the first `length` characters of its text."""
        text = self.decode(reply)

        def shown(count: int) -> int:
            # An unfinished character is decoded to any number of U+FFFD: look at the end of the character instead.
            while not text.startswith(beginning := self.decode(reply[:count])):
                count += 1
            return len(beginning)

        return bisect_left(range(len(reply)), length, lo=least, key=shown)

    def encode_beginning(self, text: str) -> list[int]:
        """Encode the beginning of a reply that follows a prompt. `text` does not include `opening`."""
        return self._encode_after(self._before_reply, self._defuse(text, "assistant"))

    def encode_reply(self, text: str) -> list[int]:
        """Encode a reply that was not sampled, such as a demonstration, without `opening` and with the end token.

        Raises ValueError if `text` does not begin with `opening`.
        """
        opening = self.opening if text.startswith(self.opening) else self.opening.rstrip()
        if not text.startswith(opening):
            raise ValueError(f"a reply begins with {opening!r} here; this one begins with {text[:40]!r}")
        return [*self.encode_beginning(text.removeprefix(opening)), self.end]

    def _encode_first(self, system: str, user: str) -> tuple[int, ...]:
        return tuple(self.encode_conversation(system, (), user))

    def _encode_next(self, user: str) -> tuple[int, ...]:
        return tuple(self._encode_messages([_user(user)]))

    def _encode_messages(self, messages: Sequence[Mapping[str, str]]) -> list[int]:
        dummy, next_text = self._split_after_reply(messages)
        return self._encode_after(dummy, next_text + self._gap + self.prefill)

    def _encode_after(self, before: str, text: str) -> list[int]:
        """Return the ids of `text` where it follows `before`. Some tokenizers put a blank before a text alone."""
        head = self._head(before)
        ids = self.encode(before + text)
        if ids[: len(head)] == head:
            return ids[len(head) :]
        # A token spans both texts, which cannot be sampled after `before`.
        return self.encode(self._end_text + text)[1:]

    def _close_reply(self, reply: Sequence[int], next_ids: Sequence[int]) -> list[int]:
        return list(next_ids) if reply and reply[-1] == self.end else [self.end, *next_ids]

    # --- text --------------------------------------------------------------------------------------------------------

    def _render(
        self, messages: Sequence[Mapping[str, str]], *, generation: bool, tools: Sequence[Mapping[str, Any]] = ()
    ) -> str:
        items: Any = [
            {"role": message["role"], "content": self._content(message["content"], message["role"])}
            for message in messages
        ]
        extra: Any = {"tools": self._defuse_all(tools)} if tools else {}
        text: Any = self.tokenizer.apply_chat_template(items, tokenize=False, add_generation_prompt=generation, **extra)
        return cast(str, text if self.view is None else self.view.write(text))

    def _content(self, text: str, role: str) -> str | list[dict[str, str]]:
        safe_text = self._defuse(text, role)
        if not self._in_parts:
            return safe_text
        texts = [{"type": "text", "text": part} for part in (safe_text.split(MARK) if self.view else [safe_text])]
        parts = [texts[0], *(part for text in texts[1:] for part in ({"type": "image"}, text))]
        return [part for part in parts if part.get("text") != ""] or parts

    def _defuse(self, text: str, role: str) -> str:
        """Insert _SPLIT after the first character of each control token."""
        if not self.control:
            return text
        start = self._control_start_in_replies if role == "assistant" else self._control_start
        return start.sub(lambda match: NOT_A_MARK if match[0] in self.control else match[0] + _SPLIT, text)

    def _defuse_all(self, value: Any) -> Any:
        """Return a JSON value with all control tokens in its texts defused."""
        if isinstance(value, str):
            return self._defuse(value, "system")
        if isinstance(value, Mapping):
            return {self._defuse_all(key): self._defuse_all(item) for key, item in value.items()}
        return [self._defuse_all(item) for item in value] if isinstance(value, list | tuple) else value

    def _with_system(self, system: str, messages: list[dict[str, str]]) -> list[dict[str, str]]:
        if not system:
            return messages
        if self.takes_system:
            return [{"role": "system", "content": system}, *messages]
        return [_user(f"{system}\n\n{messages[0]['content']}"), *messages[1:]]

    def _split_after_reply(self, messages: Sequence[Mapping[str, str]]) -> tuple[str, str]:
        """Render a dummy conversation and then `messages`. Return the text split after the dummy reply's end token."""
        text = self._after_reply(messages)
        index = text.index(_REPLY) + len(_REPLY)
        index = text.index(self._end_text, index) + len(self._end_text)
        return text[:index], text[index:]

    def _after_reply(self, messages: Sequence[Mapping[str, str]]) -> str:
        dummy_messages = [_user(_QUESTION), {"role": "assistant", "content": _REPLY}]
        return self._render([*dummy_messages, *messages], generation=True)

    # --- properties of the template, determined once ------------------------------------------------------------------

    def _shows_plain_text(self) -> bool:
        """Return whether the template accepts messages as plain text. Vision models may need lists of parts instead."""
        self._in_parts = False
        try:
            return _QUESTION in self._render([_user(_QUESTION)], generation=True)
        except TemplateError:
            return False

    def _find_gap(self, prompt: str) -> str:
        """Return the white space that the template writes before a past reply but not at the end of a prompt.

        This class ends prompts with that white space, so that each prompt extends the previous one.
        """
        text = self._render([_user(_QUESTION), {"role": "assistant", "content": _REPLY}], generation=False)
        gap = text.removeprefix(prompt).partition(_REPLY)[0] if text.startswith(prompt) else ""
        return gap if gap.isspace() else ""

    def _has_system_role(self) -> bool:
        try:
            text = self._render([{"role": "system", "content": _SYSTEM}, _user(_QUESTION)], generation=True)
        except TemplateError:
            return False
        return _SYSTEM in text

    def _find_end(self) -> tuple[str, int]:
        """Return the token that closes a reply, as text and id.

        It is the first special token that the chat template writes after a reply.
        """
        text = self._after_reply([_user(_QUESTION)])
        if _REPLY not in text:
            raise ValueError("the chat template does not show an assistant's reply")
        tail = text[text.index(_REPLY) + len(_REPLY) :]
        tokens = {str(token): index for index, token in self.tokenizer.added_tokens_decoder.items()}
        positions = [(tail.index(token), -len(token), token) for token in tokens if token in tail]
        position, _, token = min(positions, default=(len(tail), 0, ""))
        if not token or tail[:position].strip():
            raise ValueError(
                f"the chat template closes a reply with the text {tail[:20]!r} and not with a special token, so a "
                "sampled reply would have no end"
            )
        return token, tokens[token]

    def _find_control(self) -> tuple[str, ...]:
        text = self._after_reply([_user(_QUESTION)])
        if self.takes_system:
            text += self._render([{"role": "system", "content": _SYSTEM}, _user(_QUESTION)], generation=True)
        with suppress(TemplateError):  # there need not be results of tools
            text += self._after_reply([{"role": "tool", "content": _QUESTION}])
        if self.view is not None:
            text += self.view.write(MARK)
        # Tags are part of replies, and what an image replaces is not part of a text.
        contents = {*TAGS, *FURTHER_TAGS, *([MARK] if self.view else [])}
        tokens = self.tokenizer.added_tokens_decoder.values()
        found = {str(token) for token in tokens if token.special or (str(token) in text and str(token).strip())}
        return tuple(sorted(found - contents))

    def _keeps_the_past(self) -> bool:
        """Return whether a conversation built turn by turn equals the same conversation rendered as a whole."""
        begin = self.opening or THINK
        thought = "" if begin.endswith(ANSWER) else f"starpod-thought{THINK_END}{ANSWER}"
        reply = f"{begin}{thought}starpod-action{ANSWER_END}"
        questions = [f"{_QUESTION}-{number}" for number in range(3)]
        messages = [_user(questions[0])]
        text = self._render(self._with_system(_SYSTEM, messages), generation=True) + self._gap
        for question in questions[1:]:
            text += (
                reply.removeprefix(self._think_start)
                + self._end_text
                + self._split_after_reply([_user(question)])[1]
                + self._gap
            )
            messages += [{"role": "assistant", "content": reply}, _user(question)]
        whole_text = self._render(self._with_system(_SYSTEM, messages), generation=True) + self._gap
        next_ids = self._next(questions[-1])
        return text == whole_text and tuple(self.encode(whole_text + self.prefill)[-len(next_ids) :]) == next_ids


def _starts_of(tokens: Iterable[str]) -> re.Pattern[str]:
    """Return the pattern of a token's first character where the rest of the token follows."""
    rests: dict[str, list[str]] = {}
    for token in tokens:
        rests.setdefault(token[0], []).append(re.escape(token[1:]))
    return re.compile("|".join(f"{re.escape(first)}(?={'|'.join(rest)})" for first, rest in rests.items()))


def _user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


class Prompt(NamedTuple):
    """The ids that precede a reply."""

    context: list[int]
    """Ids of the whole context, for the engine."""
    appended: list[int]
    """Ids of `Turn.prompt`: the whole context if `fresh`, otherwise the ids since the last reply."""
    fresh: bool


@dataclass(frozen=True, slots=True)
class Exchange:
    """A finished turn: the message and image of its prompt, and the reply as ids and text."""

    user: str
    image: bytes
    reply: list[int]
    text: str


def part_start(turn: int, *, window: int, pinned: int, overlap: int) -> int:
    """Return the index of the first turn of the part that contains `turn`, in a split conversation.

    Parts follow the first `pinned` turns. Each part has `window` turns, and begins with the last `overlap` turns of the
    previous part.
    """
    return pinned + max(turn - pinned - overlap, 0) // (window - overlap) * (window - overlap)


class Conversation:
    """One episode's conversation. For each turn, call `ask`, sample a reply, and call `answer`.

    While the context only grows, each prompt extends the previous one by the sampled reply and the next message. With a
    window, a single turn, or a template that rewrites the past, each turn is a fresh sample instead. Past replies are
    then untrained context, with their sampled ids if the template keeps replies unchanged. Each turn is therefore
    trained on once, even if several parts of a split conversation show it (KLong's splitting, arXiv 2602.17547).

    Args:
        template: Chat template.
        context: Context of a reply; see `prompt.Context`.
        window: Number of turns shown by `window` and `single_turn`, including the current one; None is all.
        pinned, overlap: See `part_start`.
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
        """All images of the conversation, by key."""
        self._grows = context in ("full", "split") and template.extends
        self._system = ""
        self._stream: list[int] = []
        self._question: tuple[str, bytes, list[int]] | None = None

    @classmethod
    def of(cls, template: Template, config: PromptConfig) -> Conversation:
        """Create a conversation with the configured context."""
        return cls(template, context=config.context, window=config.window, pinned=config.pinned, overlap=config.overlap)

    def system(self, text: str) -> None:
        """Set the system message before the first turn. An empty text means none."""
        self._system = text.replace(MARK, NOT_A_MARK) if self.template.view else text

    def ask(self, user: str, image: bytes = b"", *, most_tokens: int | None = None) -> Prompt:
        """Return the prompt of the next reply. A second call before `answer` replaces the message of the first.

        Args:
            user: Message of the user.
            image: Image, scaled for the model, that replaces the placeholder in `user`; empty if there is none.
            most_tokens: Maximum length of the context. `window` and `single_turn` show fewer turns to respect it, but
                always the current one.
        """
        if self.template.view and not image:
            user = user.replace(MARK, NOT_A_MARK)
        if self._grows and self.exchanges and not self._part_begins():
            appended = self.template.with_image(self.template.next_ids(user, self.exchanges[-1].reply), image)
            prompt = Prompt(self._stream + appended, appended, False)
        else:
            context = self._whole_context(user, image, most_tokens)
            prompt = Prompt(context, list(context), True)
        if image:
            self.images[image_key(image)] = image
        self._question = (user, image, prompt.context)
        return prompt

    def answer(self, reply: Sequence[int], finish: Finish, text: str) -> None:
        """Record the sampled ids of a reply and its text, decoded by `Template.decode`.

        Raises ValueError if nothing was asked, or if a reply with finish "stop" does not end with a stop id. The policy
        has to learn that id, so engines must return it.
        """
        if self._question is None:
            raise ValueError("there is no question to answer: call `ask` first")
        if finish == "stop" and not (reply and reply[-1] in self.template.stop):
            raise ValueError("a reply stopped, but the id that it stopped at is missing; the engine must return it")
        user, image, context = self._question
        self._question = None
        self.exchanges.append(Exchange(user, image, list(reply), text))
        if self._grows:
            self._stream = [*context, *reply]

    def _part(self, turn: int) -> int:
        """Return the first turn of the part to which a turn belongs; 0 if the conversation is not split."""
        if self.context != "split" or self.window is None:
            return 0
        return part_start(turn, window=self.window, pinned=self.pinned, overlap=self.overlap)

    def _part_begins(self) -> bool:
        turn = len(self.exchanges)
        return self._part(turn) != self._part(turn - 1)

    def _whole_context(self, user: str, image: bytes, most_tokens: int | None) -> list[int]:
        """Build a whole context from the turns that are shown."""
        past = self.exchanges
        if self.context == "split":
            return self._context_of(
                [*past[: self.pinned], *past[max(self._part(len(past)), self.pinned) :]], user, image
            )
        if self.context != "full" and self.window is not None:
            past = past[max(len(past) - self.window + 1, 0) :]
        context = self._context_of(past, user, image)
        while self.context != "full" and past and most_tokens is not None and len(context) > most_tokens:
            past = past[1:]
            context = self._context_of(past, user, image)
        return context

    def _context_of(self, exchanges: Sequence[Exchange], user: str, image: bytes) -> list[int]:
        template = self.template
        if self.context == "single_turn":
            pairs = [(exchange.user, exchange.text) for exchange in exchanges]
            return template.first_prompt(self._system, fold(pairs, len(self.exchanges), user))
        if not template.extends:
            return template.encode_conversation(
                self._system, [(exchange.user, exchange.text) for exchange in exchanges], user
            )
        users = [*((exchange.user, exchange.image) for exchange in exchanges), (user, image)]
        ids = template.with_image(template.first_prompt(self._system, users[0][0]), users[0][1])
        for exchange, (next_user, next_image) in zip(exchanges, users[1:], strict=True):
            ids += exchange.reply
            ids += template.with_image(template.next_ids(next_user, exchange.reply), next_image)
        return ids
