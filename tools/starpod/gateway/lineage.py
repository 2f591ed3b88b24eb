"""The token stream of a session: prompts extend the sampled tokens, and an edited history begins a branch.

Every reply is a node. Its stream consists of the ids of its prompt and of its own ids as they were sampled. A request
whose messages begin with a node's messages and reply extends that stream: only the new messages are encoded, and no
sampled id is decoded and encoded again. A request with any other history begins a new stream. Streams that share a
beginning form a tree, and each sampled id is trained on only in the turn that sampled it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from jinja2 import TemplateError

from starpod.gateway.requests import Ask, Message, Rejected, bad_request, extended
from starpod.gateway.tools import describe_results, describe_tools
from starpod.gateway.turns import Rotation
from starpod.trainer.data.episode import Turn
from starpod.trainer.prompts.continuity import ACTION, THOUGHT, Rewrite, compare_past
from starpod.trainer.prompts.formats.base import ReplyCall
from starpod.trainer.prompts.layout import QUESTION, SYSTEM
from starpod.trainer.prompts.structure import structure_of
from starpod.trainer.prompts.template import Template

_PROBE, _DESCRIPTION, _ARGUMENT, _RESULT = "starpod-probe", "starpod-tool", "starpod-argument", "starpod-result"
_TEMPLATE_ERRORS = (TemplateError, ValueError, TypeError, LookupError, AttributeError)
"""Exceptions that a chat template raises for a conversation or for tools that it cannot render."""
_TOOL_PARTS = {_DESCRIPTION: "the tools", _ARGUMENT: "earlier calls of tools", _RESULT: "earlier results of tools"}
Written = TypeVar("Written", str, list[int])


class ChatLayout:
    """Renders messages with the roles that a chat template supports.

    Features that the template lacks are replaced: tool results become a user message, tools become part of the system
    message, and neighbouring messages of one role are joined.
    """

    def __init__(self, template: Template) -> None:
        self.template = template
        self.encoding = Rotation()
        """Encodes one conversation at a time, because a long one takes many times its size in memory."""
        self._longest = max(map(len, template.tokenizer.get_vocab()))
        exchange = [{"role": "user", "content": "?"}, {"role": "assistant", "content": "!"}]
        probe = {"role": "user", "content": _PROBE}
        self._takes_results = self._renders_probe([*exchange, {**probe, "role": "tool"}])
        self._takes_neighbours = self._renders_probe([probe, *exchange[:1]]) and self._renders_probe(
            [*exchange, *exchange[1:], probe]
        )
        function = {"name": _PROBE, "parameters": {"type": "object", "properties": {}}}
        undescribed = {"type": "function", "function": function}
        tool = {"type": "function", "function": {**function, "description": _DESCRIPTION}}
        self._takes_tools = self._renders_probe(exchange[:1], [tool])
        self._needs_descriptions = self._takes_tools and not self._renders_probe(exchange[:1], [undescribed])
        self.tool_rewrite = self._find_tool_rewrite(tool)

    def extends(self, ask: Ask) -> bool:
        """Return whether the chat template keeps the past of such a conversation, so that its stream only grows."""
        return self.template.extends and not (ask.tools and self.tool_rewrite)

    def warnings(self) -> list[str]:
        """Return a sentence for each part of the past that the chat template changes."""
        found = {"": self.template.rewrite, "with tools, ": self.tool_rewrite if self.template.extends else None}
        return [
            f"{when}the chat template {rewrite}; a request whose past has changed begins a fresh sample of its episode"
            for when, rewrite in found.items()
            if rewrite
        ]

    def _find_tool_rewrite(self, tool: Mapping[str, Any]) -> Rewrite | None:
        """Compare a conversation with calls that is built turn by turn with the same conversation rendered at once."""
        layout, opening = self.template.layout, self.template.opening
        thought = f"{opening}{THOUGHT}{layout.calls.thought[1]}\n" if opening else ""
        call = thought + layout.calls.write(None, "", [ReplyCall(_PROBE, f'{{"a": "{_ARGUMENT}"}}')])
        messages = [Message("system", SYSTEM), Message("user", QUESTION)]
        try:
            grown = self.whole(messages, [message.text for message in messages], [tool])
            for raw, message in ((call, Message("tool", _RESULT)), (thought + ACTION, messages[-1])):
                turns = self._merge_roles([(message.role, message.text)])
                grown += raw.removeprefix(opening) + layout.end_text + layout.prompt_after_reply(turns)[1]
                messages += [Message("assistant", raw), message]
            whole = self.whole(messages, [message.text for message in messages], [tool])
        except (Rejected, *_TEMPLATE_ERRORS):
            return None  # each request of this kind is refused, or begins a fresh sample
        return compare_past(grown, whole, _TOOL_PARTS)

    def _renders_probe(self, messages: Sequence[Mapping[str, str]], tools: Sequence[Mapping[str, Any]] = ()) -> bool:
        try:
            return _PROBE in self.template.text(messages, tools)
        except _TEMPLATE_ERRORS:
            return False

    def least_tokens(self, ask: Ask) -> int:
        """Return a lower bound for the number of tokens in a request's texts, tools and calls, without encoding them.

        A token represents at most as many characters as the longest vocabulary entry. Texts that a chat template may
        leave out (blanks around a text, earlier thoughts) count, because encoding them costs as much.
        """
        return ask.characters // self._longest

    def whole(self, messages: Sequence[Message], raw: Sequence[str], tools: Sequence[Mapping[str, Any]]) -> str:
        """Return the prompt of a conversation as text.

        Args:
            messages: the conversation.
            raw: text of each message. An assistant's message must be as the policy wrote it or would have written it.
            tools: OpenAI function definitions. They become part of the system message if the chat template takes none.
        """
        texts = list(raw)
        system = [text for message, text in zip(messages, texts, strict=True) if message.role == "system"]
        if self._needs_descriptions:
            functions = [tool["function"] for tool in tools]
            described = [{**each, "description": each.get("description", "")} for each in functions]
            tools = [{"type": "function", "function": each} for each in described]
        if tools and not self._takes_tools:
            system.append(describe_tools(tools, self.template.layout.calls))
        chat_messages = [
            (message.role, text) for message, text in zip(messages, texts, strict=True) if message.role != "system"
        ]
        turns = self._merge_roles(chat_messages)
        if system and self.template.layout.takes_system:
            turns.insert(0, {"role": "system", "content": "\n\n".join(system)})
        elif system:
            opening_text = turns[0]["content"] if turns and turns[0]["role"] == "user" else ""
            turns[: bool(opening_text)] = [
                {"role": "user", "content": "\n\n".join([*system, *([opening_text] if opening_text else [])])}
            ]
        return self._refuse_template_errors(lambda: self.template.text(turns, tools if self._takes_tools else ()))

    def next_ids(self, messages: Sequence[Message], reply: Sequence[int]) -> list[int]:
        """Return the token ids that append new messages to a reply. No message may be an assistant's message."""
        turns = self._merge_roles(
            [("user" if message.role == "system" else message.role, message.text) for message in messages]
        )
        return self._refuse_template_errors(lambda: self.template.following_messages(turns, reply))

    def _merge_roles(self, messages: Sequence[tuple[str, str]]) -> list[dict[str, str]]:
        turns: list[dict[str, str]] = []
        for role, text in messages:
            if role == "tool" and not self._takes_results:
                role, text = "user", describe_results([text])
            if turns and turns[-1]["role"] == role and role != "tool" and not self._takes_neighbours:
                turns[-1]["content"] += f"\n\n{text}"
            else:
                turns.append({"role": role, "content": text})
        return turns

    def _refuse_template_errors(self, write: Callable[[], Written]) -> Written:
        try:
            return write()
        except (TemplateError, ValueError) as error:
            raise bad_request(f"the model's chat template refuses this conversation: {error}") from error
        except _TEMPLATE_ERRORS as error:
            raise bad_request(
                f"the model's chat template cannot render this conversation ({error!r}): if it has tools, simplify "
                "their schemas, such as a `default` that is not text"
            ) from error


@dataclass(slots=True, eq=False)
class Node:
    """A sampled reply, and the ids between it and the parent's reply."""

    number: int
    """Index among the session's replies, from 1."""
    key: bytes
    """Key of the history up to this reply. Replies that differ only in their thoughts share it."""
    parent: Node | None
    appended: list[int]
    reply: list[int]
    raw: str
    """Text of the reply."""
    text: str = ""
    """Text of prompt and reply. Needed for templates that rewrite earlier messages, to compare later prompts."""

    def stream(self) -> list[int]:
        """Return all ids from the root of the branch to the end of the reply."""
        parts: list[list[int]] = []
        node: Node | None = self
        while node is not None:
            parts += [node.reply, node.appended]
            node = node.parent
        return [token for part in reversed(parts) for token in part]


@dataclass(frozen=True, slots=True)
class Draft:
    """A prompt that waits for its reply."""

    ask: Ask
    parent: Node | None
    context: list[int]
    """All ids of the prompt."""
    appended: list[int]
    """Ids of the prompt that come after the parent's stream."""
    text: str
    opened: str
    """Text that every reply begins with although it is not sampled."""
    structure: str
    """Structure that the reply must have; "" for any."""

    def complete_text(self, text: str) -> str:
        """Return the text of a reply with the beginning that was not sampled."""
        return self.opened + text.removeprefix(self.opened)


class Lineage:
    """The replies of one session. Each is found by the key of the conversation that ends with it."""

    def __init__(self, layout: ChatLayout) -> None:
        self._layout = layout
        self._template = layout.template
        self._calls = layout.template.layout.calls
        self._nodes: dict[bytes, Node] = {}
        self._in_order: list[Node] = []
        self._replies: dict[bytes, Node] = {}
        self._last: Node | None = None

    def ask(self, ask: Ask) -> Draft:
        """Return the prompt of a request. Raise Rejected if the chat template refuses the conversation."""
        length = next((n for n in range(len(ask.messages), 0, -1) if ask.history[n - 1] in self._nodes), 0)
        parent = self._nodes[ask.history[length - 1]] if length else None
        new_messages = ask.messages[length:]
        appended: list[int] | None = None
        text = ""
        if self._layout.extends(ask):
            if parent is not None and not any(message.role == "assistant" for message in new_messages):
                appended = self._layout.next_ids(new_messages, parent.reply)
        else:
            text = self._render(ask)
            if parent is not None:
                appended = self._template.following_text(parent.text, text, parent.reply)
        if parent is None or appended is None:
            parent, appended = None, self._encode_anew(ask, text)
        context = [*parent.stream(), *appended] if parent is not None else appended
        return Draft(ask, parent, context, appended, text, self._template.opening, self._structure_of(ask))

    def _structure_of(self, ask: Ask) -> str:
        """Return the structure of a reply that must call a tool or have a schema. Raise Rejected if there is none."""
        required, tools = ask.choice.kind == "required", ask.callable_tools
        if not required and ask.schema is None:
            return ""
        schema = None if required else ask.schema
        try:
            return structure_of(self._template, schema=schema, tools=tools, name=ask.choice.name, one_call=ask.one_call)
        except ValueError as error:
            raise bad_request(str(error)) from error

    def node(self, draft: Draft, reply: Sequence[int], raw: str, message: Message) -> tuple[Node, bool]:
        """Return the node of a sampled reply, for `add`, and whether its turn begins a new sample.

        The turn continues the last sample only if it extends the session's last reply.

        Args:
            draft: the prompt.
            reply: the sampled ids.
            raw: the text of the reply, from its beginning.
            message: the reply as the client gets it.
        """
        text = draft.text and draft.text + raw.removeprefix(self._template.opening)
        key = extended(draft.ask.history[-1], message)
        node = Node(len(self._in_order) + 1, key, draft.parent, draft.appended, list(reply), raw, text)
        return node, draft.parent is None or draft.parent is not self._last

    def restore(self, key: bytes, parent: int, turn: Turn, message: Message, *, text: str) -> None:
        """Add a reply from before a restart. Replies must come in order.

        Args:
            key: key of the history up to the reply.
            parent: number of the parent reply, from 1; 0: none.
            turn: recorded turn, with the ids of prompt and reply.
            message: the reply as the client gets it.
            text: text of prompt and reply, as in `Node.text`.
        """
        parent_node = self._in_order[parent - 1] if parent else None
        appended = turn.prompt if parent_node is None or not turn.fresh else turn.prompt[len(parent_node.stream()) :]
        self.add(Node(len(self._in_order) + 1, key, parent_node, appended, turn.reply, turn.text, text), message)

    def add(self, node: Node, message: Message) -> None:
        """Add a reply, so that prompts may extend it."""
        self._in_order.append(node)
        self._nodes[node.key] = node
        self._replies[message.key] = node
        self._last = node

    # --- conversations without a parent ------------------------------------------------------------------------------

    def _render(self, ask: Ask) -> str:
        """Return the prompt as text, with this session's replies as they were sampled, thoughts included."""
        return self._layout.whole(ask.messages, [self._text_of(ask, n) for n in range(len(ask.messages))], ask.tools)

    def _text_of(self, ask: Ask, index: int) -> str:
        message = ask.messages[index]
        if message.role != "assistant":
            return message.text
        node = self._nodes.get(ask.history[index]) or self._replies.get(message.key)
        return self._calls.write(None, message.text, message.calls) if node is None else node.raw

    def _encode_anew(self, ask: Ask, text: str) -> list[int]:
        """Return the prompt as ids. If the template never rewrites replies, known replies keep their sampled ids."""
        if text:
            return self._template.encode(text)
        start = next((n for n, message in enumerate(ask.messages) if message.role == "assistant"), len(ask.messages))
        rounds = _group_by_reply(ask.messages[start:])
        if not rounds or not start or not all(next_messages for _, next_messages in rounds):
            return self._template.encode(self._render(ask))
        head = ask.messages[:start]
        ids = self._template.encode(self._layout.whole(head, [message.text for message in head], ask.tools))
        for reply, next_messages in rounds:
            node = self._replies.get(reply.key)
            if node is None:
                opening = self._template.opening
                written = self._calls.write(None, reply.text, reply.calls)
                text_ids = self._template.encode_reply(opening + written.removeprefix(opening))
            else:
                text_ids = node.reply
            ids += text_ids
            ids += self._layout.next_ids(next_messages, text_ids)
        return ids


def _group_by_reply(messages: Sequence[Message]) -> list[tuple[Message, list[Message]]]:
    """Return each reply with the messages after it. The first of `messages` must be a reply."""
    rounds: list[tuple[Message, list[Message]]] = []
    for message in messages:
        if message.role == "assistant":
            rounds.append((message, []))
        else:
            rounds[-1][1].append(message)
    return rounds
