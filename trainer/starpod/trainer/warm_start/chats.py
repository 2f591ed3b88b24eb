"""Conversations of a file as episodes with token ids, which are made once, by the policy's own chat template."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from jinja2 import TemplateError

from starpod.trainer.data.chat import Chat
from starpod.trainer.data.episode import EXTERNAL, Episode, Turn
from starpod.trainer.data.images import MARK, NOT_A_MARK
from starpod.trainer.prompts.layout import SPLIT
from starpod.trainer.prompts.template import Template
from starpod.trainer.warm_start.files import FileContents


def encode_chats(
    contents: FileContents, template: Template, *, most_tokens: int, group: int, task: str = ""
) -> list[Episode]:
    """Return the conversations of a file with token ids. Conversations that get no ids are counted in `left_out`.

    Args:
        most_tokens: Maximum tokens of a context with its reply.
        group: Number of the first conversation's group.
        task: Key in the run's `environments`.
    """
    episodes: list[Episode] = []
    written: list[Chat] = []
    for chat in contents.chats:
        writer = ChatWriter(chat, template)
        try:
            turns = writer.turns(most_tokens)
        except TooLong as error:
            contents.leave_out(f"longer than {most_tokens} tokens", f"{chat.place}, {error}")
        except (ValueError, TypeError, RecursionError, TemplateError) as error:
            contents.leave_out("that the chat template does not reproduce", f"{chat.place}: {error}")
        else:
            written.append(chat)
            episodes.append(Episode(group + len(episodes), 0, EXTERNAL, seed=chat.seed, turns=turns, task=task))
    contents.chats = written
    return episodes


class TooLong(ValueError):
    """A conversation has more tokens than a context of the run."""


class ChatWriter:
    """Writer of one conversation's turns: a turn is a reply of the assistant and the messages before it."""

    def __init__(self, chat: Chat, template: Template) -> None:
        layout, messages = template.layout, list(chat.messages)
        if template.view is not None:
            messages = [{**each, "content": each["content"].replace(MARK, NOT_A_MARK)} for each in messages]
        self._offset = 0
        starts_with_system = [each["role"] for each in messages[:2]] == ["system", "user"]
        if starts_with_system and not layout.takes_system:
            messages, self._offset = layout.with_system(messages[0]["content"], messages[1:]), 1
        self._messages: list[dict[str, Any]] = messages
        self._chat = chat
        self._template = template
        self._layout = layout

    def turns(self, most_tokens: int) -> list[Turn]:
        """Return the turns.

        Raises:
            TooLong: A context and its reply have more than `most_tokens` tokens.
            ValueError: The template drops a text, changes earlier ones, or its ids do not decode to the reply.
            TemplateError: The template refuses the conversation, such as one of other roles than it knows.
        """
        template, turns = self._template, list[Turn]()
        before, length, shown = "", 0, 0
        for index, message in enumerate(self._messages):
            if message["role"] != "assistant":
                continue
            prompt, text = self._render(index, shown)
            reply = template.encode_reply(text, rendered=True)
            plain, opening = text.replace(SPLIT, ""), template.opening
            rest = plain.removeprefix(opening if plain.startswith(opening) else opening.rstrip())
            if (decoded := template.decode(reply)) != opening + rest:
                raise ValueError(f"message {index + 1} reads {decoded[:60]!r} when its tokens are decoded")
            fresh = not turns or not template.extends
            if fresh:
                ids, length = template.encode(prompt + template.opening), 0
            else:
                following = template.following_text(before, prompt + template.opening, turns[-1].reply)
                if following is None:
                    raise ValueError(f"the prompt of message {index + 1} does not begin with the earlier messages")
                ids = following
            length += len(ids) + len(reply)
            if length > most_tokens:
                raise TooLong(f"{length} tokens up to message {index + 1}")
            turns.append(
                Turn(
                    observation=self._messages[index - 1]["content"] if index else "",
                    prompt=ids,
                    fresh=fresh,
                    reply=reply,
                    logprobs=[0.0] * len(reply),
                    versions=[0] * len(reply),
                    text=decoded,
                    weight=self._chat.weights[index + self._offset],
                )
            )
            before, shown = prompt + text, index + 1
        return turns

    def _render(self, index: int, shown: int) -> tuple[str, str]:
        """Return the prompt of a reply without `Template.opening`, and the reply as the template writes it.

        index: Index of the reply's message. shown: number of messages whose texts earlier prompts contain.
        Raises ValueError if they cannot be found in what the template writes.
        """
        layout, tools, number = self._layout, self._chat.tools, index + 1
        prompt = layout.prompt(self._messages[:index], tools).removesuffix(layout.think_start)
        whole = layout.render(self._messages[: index + 1], generation=False, tools=tools)
        message = self._messages[index]
        if whole.startswith(prompt):
            reply, end, _ = whole[len(prompt) :].rpartition(layout.end_text)
        elif self._template.extends or "tool_calls" in message:
            raise ValueError(f"the template does not write message {number} after its own prompt")
        else:  # The template rewrites prompts, so that the reply is only what the policy must sample.
            reply, end = layout.defuse(message["content"], "assistant"), layout.end_text
        if not end:
            raise ValueError(f"the template does not end message {number} with {layout.end_text}")
        others = [call["function"]["name"] for call in message.get("tool_calls", ())]
        others.append(message.get("reasoning_content") or "")
        self._check_shown([(message["content"], "assistant"), *((text, "system") for text in others)], reply)
        texts = [(each["content"], each["role"]) for each in self._messages[shown:index]]
        self._check_shown([*texts, *((tool["function"]["name"], "system") for tool in tools if not shown)], prompt)
        return prompt, reply

    def _check_shown(self, texts: Sequence[tuple[str, str]], rendered: str) -> None:
        """Raise ValueError if a text of a role is missing in a rendered text. White space may differ."""
        shown = "".join(rendered.split())
        for text, role in texts:
            if "".join(self._layout.defuse(text, role).split()) not in shown:
                raise ValueError(f"the template drops {text[:60]!r}")
