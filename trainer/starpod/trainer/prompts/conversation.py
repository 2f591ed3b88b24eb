"""Conversations: what a policy sees before each reply, with the ids of its own earlier replies."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from starpod.trainer.data.episode import Finish
from starpod.trainer.data.images import MARK, NOT_A_MARK, image_key
from starpod.trainer.prompts.prompt import Context, PromptConfig, fold
from starpod.trainer.prompts.template import Template


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

    Args:
        turn: Index of a turn, from 0.
        window: Number of turns of each part.
        pinned: Number of first turns that all parts follow.
        overlap: Number of last turns of the previous part with which a part begins, below `window`.
    """
    return pinned + max(turn - pinned - overlap, 0) // (window - overlap) * (window - overlap)


class Conversation:
    """One episode's conversation. For each turn, call `ask`, sample a reply, and call `answer`.

    While the context only grows, each prompt extends the previous one by the sampled reply and the next message. With a
    window, a single turn, or a template that rewrites the past, each turn is a fresh sample instead. Past replies are
    then untrained context, with their sampled ids if the template keeps replies unchanged. Each turn is therefore
    trained on once, even if several parts of a split conversation show it (KLong's splitting, arXiv 2602.17547).

    Args:
        context: Context of a reply; see `prompt.ContextConfig`.
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
        keys = dict(config.context)
        return cls(template, context=keys.pop("kind"), **keys)

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
        """Record a sampled reply.

        Args:
            reply: Sampled ids. A reply that stopped includes its stop id, because the policy has to learn that id.
            text: Text of the reply, decoded by `Template.decode`.

        Raises:
            ValueError: Nothing was asked, or a reply with finish "stop" does not end with a stop id.
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
