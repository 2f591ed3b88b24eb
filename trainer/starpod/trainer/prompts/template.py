"""Conversations as token ids: sampled ids are kept, and only the environment's text is encoded.

The tokenizer's chat template defines the layout of a conversation. To get the ids between two replies without decoding
either of them, a short dummy conversation with the new turn at its end is rendered, and the dummy part is cut off.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import lru_cache
from itertools import accumulate
from typing import TYPE_CHECKING, Any, cast

from starpod.trainer.data.images import MARK, ImageConfig, image_ids
from starpod.trainer.prompts.continuity import ACTION, THOUGHT, Rewrite, compare_past
from starpod.trainer.prompts.grammar import ANSWER, ANSWER_END, THINK, THINK_END
from starpod.trainer.prompts.layout import QUESTION, SPLIT, SYSTEM, TemplateLayout, user_message

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_CACHED = 1 << 12
"""Number of user messages whose ids are cached. Small environments show the same states again and again."""
_LONGEST_CACHED = 2000
"""Maximum number of characters of a prompt whose ids are cached, so that a cache takes at most about 100 MB."""


class Template:
    """A tokenizer's chat template: it encodes prompts and replies, and decodes replies.

    Args:
        prefill: Text at the end of every prompt, such as a reply's first tag. It is neither sampled nor trained on.
        view: Image processing of the model; None for a text model.
        calls: Name of the format of tool calls; "" for the one that the chat template uses.

    Attributes:
        end: Id with which the template closes a reply.
        stop: Ids that end a reply: `end` unless it also closes other messages in this format, the tokenizer's end of
            text, and the format's `stops`.
        opening: Beginning of every reply's text that is not sampled: `prefill`, preceded by a tag that the template's
            generation prompt opens.
        rewrite: What the template changes in the past of a growing conversation, with system text, thoughts and images;
            None if it changes nothing.
        extends: Whether there is no `rewrite`. Otherwise each turn must begin a fresh sample.

    Raises:
        ValueError: If the tokenizer has no chat template, or if replies cannot be located in it.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        *,
        prefill: str = "",
        view: ImageConfig | None = None,
        calls: str = "",
    ) -> None:
        self.tokenizer = tokenizer
        self.view = view
        self.layout = TemplateLayout(tokenizer, view, calls)
        self.prefill = "" if self.layout.think_start and prefill == THINK else prefill
        self.opening = self.layout.think_start + self.prefill
        self.end = self.layout.end
        eos = tokenizer.eos_token_id
        added = {str(text): id_ for id_, text in tokenizer.added_tokens_decoder.items()}
        stops = [added[text] for text in self.layout.calls.stops if text in added]
        closes_more = bool(stops) and self.layout.end_text in self.layout.calls.all_marks
        self.stop = frozenset({*stops, *([] if closes_more else [self.end]), *([eos] if isinstance(eos, int) else [])})
        self._last = stops[-1] if closes_more else self.end
        self._closing = {self.end, *stops}
        self._next = _cached(lambda user: tuple(self._encode_messages([user_message(user)])))
        self._first_prompt = _cached(lambda system, user: tuple(self.encode_conversation(system, (), user)))
        self._head = lru_cache(8)(self.encode)
        self.rewrite = self._find_rewrite()
        self.extends = self.rewrite is None
        if view is not None and not self.extends:
            raise ValueError(f"the chat template {self.rewrite}; images would lose their place")

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

        Args:
            before: Text of an earlier prompt and of the reply to it, without its end token.
            whole: Text of a later prompt.
            reply: Ids of that reply.
        """
        closed = before + self.layout.end_text
        if not whole.startswith(closed):
            return None
        return self._close_reply(reply, self._encode_after(self.layout.end_text, whole[len(closed) :]))

    def encode_conversation(self, system: str, exchanges: Sequence[tuple[str, str]], user: str) -> list[int]:
        """Encode a prompt from text.

        Args:
            system: System message; an empty one is left out.
            exchanges: User message and reply text of each previous turn.
        """
        messages = []
        for message, reply in exchanges:
            messages += [user_message(message), {"role": "assistant", "content": reply}]
        return self.encode(self.text(self.layout.with_system(system, [*messages, user_message(user)])))

    def text(self, messages: Sequence[Mapping[str, str]], tools: Sequence[Mapping[str, Any]] = ()) -> str:
        """Render the prompt of the next reply as text, with tools in OpenAI's format.

        Raises jinja2.TemplateError if the template refuses an argument.
        """
        return self.layout.prompt(messages, tools) + self.prefill

    def with_image(self, ids: Sequence[int], image: bytes) -> list[int]:
        """Return a message's ids. If there is an image, its ids replace the placeholder id in the message."""
        if not image:
            return list(ids)
        assert self.view is not None
        index = ids.index(cast(int, self.tokenizer.convert_tokens_to_ids(self.view.mark)))
        return [*ids[:index], *image_ids(image, self.view.tokens), *ids[index + 1 :]]

    def encode(self, text: str) -> list[int]:
        """Encode a rendered text. Control tokens of the layout become single ids, those in contents do not."""
        parts = text.split(SPLIT)
        # A tokenizer may put a blank before a text, but not after a special token. All parts are encoded at once,
        # because a text may have a million of them.
        ids = cast("list[int]", self.tokenizer.encode(self.layout.end_text.join(parts), add_special_tokens=False))
        if len(parts) == 1:
            return ids
        ends = [index for index, id_ in enumerate(ids) if id_ == self.end]
        counts = accumulate(part.count(self.layout.end_text) for part in parts[:-1])
        joints = {ends[count + number] for number, count in enumerate(counts)}
        return [id_ for index, id_ in enumerate(ids) if index not in joints]

    def decode(self, reply: Sequence[int]) -> str:
        """Decode a reply. The text includes `opening` but not the stop token."""
        ids = list(reply)
        if ids and ids[-1] in self.stop:
            ids.pop()
        return self.opening + cast(str, self.tokenizer.decode(ids, clean_up_tokenization_spaces=False))

    def cut(self, reply: Sequence[int], stops: Iterable[str]) -> tuple[str, int, str]:
        """Return the text before the first stop text, the number of ids up to the stop text's end, and the stop text.

        Without a stop text, these are the whole text, all ids and "". Stop texts are not looked for in `opening`.
        """
        text, start = self.decode(reply), len(self.opening)
        places = [(index, stop) for stop in stops if stop and (index := text.find(stop, start)) >= 0]
        if not places:
            return text, len(reply), ""
        index, stop = min(places)
        return text[:index], self.count_ids(reply, index + len(stop), 1), stop

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
        """Return how many of a reply's first ids show the beginning of its text.

        Args:
            length: Number of characters of the beginning.
            least: Minimum result.
        """
        text = self.decode(reply)

        def shown(count: int) -> int:
            # An unfinished character is decoded to any number of U+FFFD: look at the end of the character instead.
            while not text.startswith(beginning := self.decode(reply[:count])):
                count += 1
            return len(beginning)

        return bisect_left(range(len(reply)), length, lo=least, key=shown)

    def encode_beginning(self, text: str) -> list[int]:
        """Encode the beginning of a reply that follows a prompt. `text` does not include `opening`."""
        return self._encode_after(self.layout.before_reply + self.prefill, self.layout.defuse(text, "assistant"))

    def encode_reply(self, text: str, *, rendered: bool = False) -> list[int]:
        """Encode a reply that was not sampled, such as a demonstration, without `opening` and with the end token.

        Args:
            rendered: Whether the chat template wrote `text`. Control tokens that it wrote then become single ids.

        Raises:
            ValueError: `text` does not begin with `opening`.
        """
        opening = self.opening if text.startswith(self.opening) else self.opening.rstrip()
        if not text.startswith(opening):
            raise ValueError(f"a reply begins with {opening!r} here; this one begins with {text[:40]!r}")
        text = text.removeprefix(opening)
        before = self.layout.before_reply + self.prefill
        return [*(self._encode_after(before, text) if rendered else self.encode_beginning(text)), self._last]

    def _encode_messages(self, messages: Sequence[Mapping[str, str]]) -> list[int]:
        before, prompt = self.layout.prompt_after_reply(messages)
        return self._encode_after(before, prompt + self.prefill)

    def _encode_after(self, before: str, text: str) -> list[int]:
        """Return the ids of `text` where it follows `before`. Some tokenizers put a blank before a text alone."""
        head = self._head(before)
        ids = self.encode(before + text)
        if ids[: len(head)] == head:
            return ids[len(head) :]
        # A token spans both texts, which cannot be sampled after `before`.
        return self.encode(self.layout.end_text + text)[1:]

    def _close_reply(self, reply: Sequence[int], next_ids: Sequence[int]) -> list[int]:
        return list(next_ids) if reply and reply[-1] in self._closing else [self.end, *next_ids]

    def _find_rewrite(self) -> Rewrite | None:
        """Compare a conversation built turn by turn with the same conversation rendered as a whole."""
        begin = self.opening or THINK
        thought = "" if begin.endswith(ANSWER) else f"{THOUGHT}{THINK_END}{ANSWER}"
        reply = f"{begin}{thought}{ACTION}{ANSWER_END}"
        image = f"{MARK}\n" if self.view else ""
        questions = [f"{image}{QUESTION}-{number}" for number in range(3)]
        messages = [user_message(questions[0])]
        layout = self.layout
        text = layout.prompt(layout.with_system(SYSTEM, messages))
        for question in questions[1:]:
            text += reply.removeprefix(layout.think_start) + layout.end_text
            text += layout.prompt_after_reply([user_message(question)])[1]
            messages += [{"role": "assistant", "content": reply}, user_message(question)]
        whole_text = layout.prompt(layout.with_system(SYSTEM, messages))
        next_ids = self._next(questions[-1])
        if text == whole_text and tuple(self.encode(whole_text + self.prefill)[-len(next_ids) :]) != next_ids:
            return Rewrite("the ids of later messages", questions[-1], questions[-1])
        return compare_past(text, whole_text)


def _cached(encode: Callable[..., tuple[int, ...]]) -> Callable[..., tuple[int, ...]]:
    """Cache the ids that `encode` returns for short texts."""
    cached = lru_cache(_CACHED)(encode)
    return lambda *texts: (cached if sum(map(len, texts)) <= _LONGEST_CACHED else encode)(*texts)
