"""The layout of a conversation as text, as a tokenizer's chat template writes it."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any, cast

from jinja2 import TemplateError

from starpod.trainer.data.images import MARK, NOT_A_MARK, ImageConfig
from starpod.trainer.prompts.formats.table import FORMATS, find_format
from starpod.trainer.prompts.grammar import FURTHER_TAGS, TAGS, THINK

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# Dummy texts that occur in no template.
QUESTION, SYSTEM, _REPLY = "starpod-question", "starpod-system", "starpod-reply"

SPLIT = "\ufdd0"
"""Noncharacter of Unicode that is inserted into control tokens in the contents of messages. Rendered texts are encoded
in parts, between these characters, so that the tokens' letters are encoded as any other text."""

_CONTROL = re.compile(r"<[|\uff5c].*[|\uff5c]>")
"""Pattern of tokens that only control a model, such as <|fim_prefix|>, which Qwen does not mark as special."""
_BRACKETS = re.compile(r"[<\[].*[>\]]")
"""Pattern of added tokens that are looked for in the source of a chat template, where any word may occur."""


class TemplateLayout:
    """The text that a chat template writes around messages, found by rendering short dummy conversations.

    Args:
        view: Image processing of the model; None for a text model.
        calls: Name of the format of tool calls; "" for the one that the chat template uses.

    Attributes:
        calls: The format of tool calls.
        takes_system: Whether there is a system role. Otherwise system text is put before the first user message.
        gap: White space that the template writes before a past reply but not at the end of a prompt. `prompt` ends
            with it, so that each prompt extends the previous one.
        think_start: Tag, with the white space after it, that the generation prompt opens; "" if it opens none.
        end_text, end: Token that closes a reply, as text and id.
        control: The tokenizer's special tokens, and other added tokens that the template writes or that look like
            <|this|>. In the contents of messages they are encoded as text, so that an observation or a past reply
            cannot begin or end a turn.

    Raises:
        ValueError: If the tokenizer has no chat template, or if replies cannot be located in it.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, view: ImageConfig | None, calls: str = "") -> None:
        if not tokenizer.chat_template:
            name = tokenizer.name_or_path or type(tokenizer).__name__
            raise ValueError(
                f"the tokenizer {name} has no chat template, so there is no way to tell turns apart; "
                "choose an instruction-tuned model, or save a chat_template with the tokenizer"
            )
        self.tokenizer = tokenizer
        self.view = view
        self.calls = FORMATS[calls] if calls else find_format(tokenizer.chat_template)
        self.control: tuple[str, ...] = ()
        self._in_parts = not self._shows_plain_text()
        self.takes_system = self._has_system_role()
        prompt = self.render([user_message(QUESTION)], generation=True)
        self.gap = self._find_gap(prompt)
        self.think_start = prompt[prompt.rindex(THINK) :] if prompt.rstrip().endswith(THINK) else ""
        self.before_reply = prompt.rpartition(QUESTION)[2] + self.gap
        self.end_text, self.end = self._find_end()
        self._normalize = self._find_normalizer()
        self.control = self._find_control()
        self._control_start = _starts_of(self.control)
        self._control_start_in_replies = _starts_of(set(self.control) - set(self.calls.all_marks) | {self.end_text})

    def prompt(self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] = ()) -> str:
        """Render the prompt of the next reply, with tools in OpenAI's format.

        Raises jinja2.TemplateError if the template refuses an argument.
        """
        return self.render(messages, generation=True, tools=tools) + self.gap

    def render(
        self, messages: Sequence[Mapping[str, Any]], *, generation: bool, tools: Sequence[Mapping[str, Any]] = ()
    ) -> str:
        """Render messages as text. They may have further keys than role and content, such as `tool_calls`.

        Raises jinja2.TemplateError if the template refuses an argument.
        """
        items: Any = [
            {
                **{key: self._defuse_all(value) for key, value in message.items() if key not in ("role", "content")},
                "role": message["role"],
                "content": self._content(message["content"], message["role"]),
            }
            for message in messages
        ]
        extra: Any = {"tools": self._defuse_all(tools)} if tools else {}
        text: Any = self.tokenizer.apply_chat_template(items, tokenize=False, add_generation_prompt=generation, **extra)
        return cast(str, text if self.view is None else self.view.write(text))

    def _content(self, text: str, role: str) -> str | list[dict[str, str]]:
        safe_text = self.defuse(text, role)
        if not self._in_parts:
            return safe_text
        texts = [{"type": "text", "text": part} for part in (safe_text.split(MARK) if self.view else [safe_text])]
        parts = [texts[0], *(part for text in texts[1:] for part in ({"type": "image"}, text))]
        return [part for part in parts if part.get("text") != ""] or parts

    def defuse(self, text: str, role: str) -> str:
        """Insert SPLIT after the first character of each control token."""
        if not self.control:
            return text
        start = self._control_start_in_replies if role == "assistant" else self._control_start
        if self._normalize is not None:
            # A tokenizer may read a full-width bracket as a bracket, and so find a token that the text does not spell.
            normal = self._normalize(text)
            text = normal if len(start.findall(normal)) > len(start.findall(text)) else text
        return start.sub(lambda match: NOT_A_MARK if match[0] in self.control else match[0] + SPLIT, text)

    def _defuse_all(self, value: Any) -> Any:
        """Return a JSON value with all control tokens in its texts defused."""
        if isinstance(value, str):
            return self.defuse(value, "system")
        if isinstance(value, Mapping):
            return {self._defuse_all(key): self._defuse_all(item) for key, item in value.items()}
        return [self._defuse_all(item) for item in value] if isinstance(value, list | tuple) else value

    def with_system(self, system: str, messages: list[dict[str, str]]) -> list[dict[str, str]]:
        if not system:
            return messages
        if self.takes_system:
            return [{"role": "system", "content": system}, *messages]
        return [user_message(f"{system}\n\n{messages[0]['content']}"), *messages[1:]]

    def prompt_after_reply(self, messages: Sequence[Mapping[str, str]]) -> tuple[str, str]:
        """Return a text that ends with a reply's end token, and the prompt with `messages` that follows it."""
        text = self._after_reply(messages)
        index = text.index(_REPLY) + len(_REPLY)
        index = text.index(self.end_text, index) + len(self.end_text)
        return text[:index], text[index:] + self.gap

    def _after_reply(self, messages: Sequence[Mapping[str, str]]) -> str:
        dummy_messages = [user_message(QUESTION), {"role": "assistant", "content": _REPLY}]
        return self.render([*dummy_messages, *messages], generation=True)

    def _shows_plain_text(self) -> bool:
        """Return whether the template accepts messages as plain text. Vision models may need lists of parts instead."""
        self._in_parts = False
        try:
            return QUESTION in self.render([user_message(QUESTION)], generation=True)
        except TemplateError:
            return False

    def _find_gap(self, prompt: str) -> str:
        text = self.render([user_message(QUESTION), {"role": "assistant", "content": _REPLY}], generation=False)
        gap = text.removeprefix(prompt).partition(_REPLY)[0] if text.startswith(prompt) else ""
        return gap if gap.isspace() else ""

    def _has_system_role(self) -> bool:
        try:
            text = self.render([{"role": "system", "content": SYSTEM}, user_message(QUESTION)], generation=True)
        except TemplateError:
            return False
        return SYSTEM in text

    def _find_end(self) -> tuple[str, int]:
        """Return the token that closes a reply, as text and id.

        It is the first special token that the chat template writes after a reply.
        """
        text = self._after_reply([user_message(QUESTION)])
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
        text = self._after_reply([user_message(QUESTION)])
        if self.takes_system:
            text += self.render([{"role": "system", "content": SYSTEM}, user_message(QUESTION)], generation=True)
        with suppress(TemplateError):  # there need not be results of tools
            text += self._after_reply([{"role": "tool", "content": QUESTION}])
        if self.view is not None:
            text += self.view.write(MARK)
        source = str(self.tokenizer.chat_template)  # writes tokens that no dummy message needs, such as those of tools
        # Tags are part of replies, and what an image replaces is not part of a text.
        contents = {*TAGS, *FURTHER_TAGS, *([MARK] if self.view else [])}
        tokens = {str(token): token.special for token in self.tokenizer.added_tokens_decoder.values()}
        written = {token for token in tokens if token in text and token.strip()}
        written |= {token for token in tokens if token in source and _BRACKETS.fullmatch(token)}
        control = {token for token, special in tokens.items() if special or _CONTROL.fullmatch(token)}
        return tuple(sorted((control | written) - contents))

    def _find_normalizer(self) -> Callable[[str], str] | None:
        """Return the tokenizer's normalization of texts if it looks for added tokens after it; otherwise None."""
        inner = getattr(self.tokenizer, "backend_tokenizer", None)
        tokens = self.tokenizer.added_tokens_decoder.values()
        if inner is None or inner.normalizer is None or not any(token.normalized for token in tokens):
            return None
        return cast("Callable[[str], str]", inner.normalizer.normalize_str)


def _starts_of(tokens: Iterable[str]) -> re.Pattern[str]:
    """Return the pattern of a token's first character where the rest of the token follows."""
    rests: dict[str, list[str]] = {}
    for token in tokens:
        rests.setdefault(token[0], []).append(re.escape(token[1:]))
    return re.compile("|".join(f"{re.escape(first)}(?={'|'.join(rest)})" for first, rest in rests.items()))


def user_message(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}
