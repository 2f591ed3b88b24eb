"""The token stream of a session: prompts extend what was sampled, and a history that was edited begins a branch.

Every reply is a node. Its stream is the ids of the prompt that it answered and its own, as they were sampled. A request
whose messages begin with those of a node and its reply extends the stream by the ids of what is new: nothing is decoded
and encoded again. Another history is a stream of its own, from its first id. Streams that share a beginning thus form a
tree, and each sampled id is trained on in the turn that sampled it alone.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from jinja2 import TemplateError

from starpod.gateway.requests import Ask, Message, bad_request, extended
from starpod.gateway.tools import begin_call, describe_results, describe_tools, write_reply
from starpod.gateway.turns import Turns
from starpod.trainer.data.episode import Turn
from starpod.trainer.prompts.conversation import Template
from starpod.trainer.prompts.grammar import THINK, THINK_END

_PROBE = "starpod-probe"
Written = TypeVar("Written", str, list[int])


class Layout:
    """Writes messages in the roles that a chat template has.

    Results of tools become a user's message, tools a part of the system's, and neighbours of one role one message,
    where the template cannot do with them.
    """

    def __init__(self, template: Template) -> None:
        self.template = template
        self.encoding = Turns()
        """One conversation is encoded at a time: a long one takes many times its size in memory."""
        self._longest = max(map(len, template.tokenizer.get_vocab()))
        asked = [{"role": "user", "content": "?"}, {"role": "assistant", "content": "!"}]
        probe = {"role": "user", "content": _PROBE}
        self._takes_results = self._shows([*asked, {**probe, "role": "tool"}])
        self._takes_neighbours = self._shows([probe, *asked[:1]]) and self._shows([*asked, *asked[1:], probe])
        tool = {"type": "function", "function": {"name": _PROBE, "description": "", "parameters": {"type": "object"}}}
        self._takes_tools = self._shows(asked[:1], [tool])

    def _shows(self, messages: Sequence[Mapping[str, str]], tools: Sequence[Mapping[str, Any]] = ()) -> bool:
        try:
            return _PROBE in self.template.text(messages, tools)
        except (TemplateError, TypeError, KeyError):
            return False

    def least_tokens(self, ask: Ask) -> int:
        """Return a lower bound for the tokens of a request's texts, tools and calls, without encoding them.

        A token stands for no more characters than the longest entry of the vocabulary has. Texts that a chat template
        may leave out (blanks around a text, earlier thoughts) count, because encoding them costs as much.
        """
        return ask.characters // self._longest

    def whole(self, messages: Sequence[Message], raw: Sequence[str], tools: Sequence[Mapping[str, Any]]) -> str:
        """The prompt of a conversation as text. raw: each message's text, as a policy wrote it or would have."""
        texts = list(raw)
        system = [text for message, text in zip(messages, texts, strict=True) if message.role == "system"]
        if tools and not self._takes_tools:
            system.append(describe_tools(tools))
        rest = [(message.role, text) for message, text in zip(messages, texts, strict=True) if message.role != "system"]
        told = self._told(rest)
        if system and self.template.takes_system:
            told.insert(0, {"role": "system", "content": "\n\n".join(system)})
        elif system:
            first = told[0]["content"] if told and told[0]["role"] == "user" else ""
            told[: bool(first)] = [{"role": "user", "content": "\n\n".join([*system, *([first] if first else [])])}]
        return self._checked(lambda: self.template.text(told, tools if self._takes_tools else ()))

    def following(self, messages: Sequence[Message], reply: Sequence[int]) -> list[int]:
        """The ids after a reply, for messages of which none is the assistant's."""
        told = self._told([("user" if each.role == "system" else each.role, each.text) for each in messages])
        return self._checked(lambda: self.template.following_messages(told, reply))

    def _told(self, messages: Sequence[tuple[str, str]]) -> list[dict[str, str]]:
        told: list[dict[str, str]] = []
        for role, text in messages:
            if role == "tool" and not self._takes_results:
                role, text = "user", describe_results([text])
            if told and told[-1]["role"] == role and role != "tool" and not self._takes_neighbours:
                told[-1]["content"] += f"\n\n{text}"
            else:
                told.append({"role": role, "content": text})
        return told

    def _checked(self, write: Callable[[], Written]) -> Written:
        try:
            return write()
        except (TemplateError, ValueError) as error:
            raise bad_request(f"the model's chat template refuses this conversation: {error}") from error


@dataclass(slots=True, eq=False)
class Node:
    """A reply, and the ids that precede it since the parent's.

    number: among the session's, from 1. key: of the history that it ends, as another reply may that differs in its
    thoughts alone. raw: the reply's text. text: of prompt and reply, where the template rewrites the past and it has to
    be compared. given: how many ids the prompt ends with that begin the reply's text.
    """

    number: int
    key: bytes
    parent: Node | None
    appended: list[int]
    reply: list[int]
    raw: str
    text: str = ""
    given: int = 0

    @property
    def said(self) -> list[int]:
        """The ids of the reply's text: those that it was given, and those that were sampled."""
        return [*self.appended[len(self.appended) - self.given :], *self.reply]

    def stream(self) -> list[int]:
        """All ids from the beginning of its segment's root to its last one."""
        parts: list[list[int]] = []
        node: Node | None = self
        while node is not None:
            parts += [node.reply, node.appended]
            node = node.parent
        return [token for part in reversed(parts) for token in part]


@dataclass(frozen=True, slots=True)
class Draft:
    """A prompt that waits for its reply. context: all its ids; appended: those after the parent's stream.

    opened: how the text of every reply begins although it is not sampled. forced: how this one goes on, as the last
    `given` of the ids.
    """

    ask: Ask
    parent: Node | None
    context: list[int]
    appended: list[int]
    text: str
    opened: str
    forced: str
    given: int

    def begun(self, text: str) -> str:
        """The text of a reply, with what it was forced to begin with."""
        return self.opened + self.forced + text.removeprefix(self.opened)


class Lineage:
    """The replies of one session by the history that each ends."""

    def __init__(self, layout: Layout) -> None:
        self._layout = layout
        self._template = layout.template
        self._nodes: dict[bytes, Node] = {}
        self._in_order: list[Node] = []
        self._replies: dict[bytes, Node] = {}
        self._last: Node | None = None

    def ask(self, ask: Ask) -> Draft:
        """The prompt of a request. Raises Refused for a conversation that the chat template refuses."""
        place = next((n for n in range(len(ask.messages), 0, -1) if ask.history[n - 1] in self._nodes), 0)
        parent = self._nodes[ask.history[place - 1]] if place else None
        new = ask.messages[place:]
        appended: list[int] | None = None
        text = ""
        if self._template.extends:
            if parent is not None and not any(message.role == "assistant" for message in new):
                appended = self._layout.following(new, parent.reply)
        else:
            text = self._text(ask)
            if parent is not None:
                appended = self._template.following_text(parent.text, text, parent.reply)
        forced = self._forced(ask)
        given = self._template.encode(forced)
        if parent is None or appended is None:
            parent, appended = None, self._fresh(ask, text)
        appended = [*appended, *given]
        context = [*parent.stream(), *appended] if parent is not None else appended
        return Draft(ask, parent, context, appended, text, self._template.opening, forced, len(given))

    def _forced(self, ask: Ask) -> str:
        """What a reply that must call a tool is given to go on from; empty for others."""
        if ask.choice.kind != "required":
            return ""
        thought = f"{THINK_END}\n\n" if self._template.opening.startswith(THINK) else ""
        return thought + begin_call(ask.tools, ask.choice.name)

    def node(self, draft: Draft, reply: Sequence[int], raw: str, message: Message) -> tuple[Node, bool]:
        """The node of a sampled reply, for `add`. raw: its text, from the beginning. message: as the client gets it.

        With it, whether its turn begins a sample: it does unless it extends the reply before in time.
        """
        text = draft.text and draft.text + raw.removeprefix(self._template.opening)
        key = extended(draft.ask.history[-1], message)
        node = Node(len(self._in_order) + 1, key, draft.parent, draft.appended, list(reply), raw, text, draft.given)
        return node, draft.parent is None or draft.parent is not self._last

    def restore(self, key: bytes, parent: int, turn: Turn, message: Message, *, text: str, given: int) -> None:
        """Take over a reply that was sampled before, in the order of their numbers. parent: its parent's; 0: none."""
        above = self._in_order[parent - 1] if parent else None
        appended = turn.prompt if above is None or not turn.fresh else turn.prompt[len(above.stream()) :]
        self.add(Node(len(self._in_order) + 1, key, above, appended, turn.reply, turn.text, text, given), message)

    def add(self, node: Node, message: Message) -> None:
        """Take a reply over: prompts may extend it."""
        self._in_order.append(node)
        self._nodes[node.key] = node
        self._replies[message.key] = node
        self._last = node

    # --- conversations without a parent ------------------------------------------------------------------------------

    def _text(self, ask: Ask) -> str:
        """The prompt as text; of replies that were sampled here what was sampled, thoughts included."""
        return self._layout.whole(ask.messages, [self._raw(ask, n) for n in range(len(ask.messages))], ask.tools)

    def _raw(self, ask: Ask, index: int) -> str:
        message = ask.messages[index]
        if message.role != "assistant":
            return message.text
        known = self._nodes.get(ask.history[index]) or self._replies.get(message.key)
        return write_reply(message) if known is None else known.raw

    def _fresh(self, ask: Ask, text: str) -> list[int]:
        """The whole prompt as ids. Where the template keeps replies as they are, known ones have their sampled ids."""
        if text:
            return self._template.encode(text)
        first = next((n for n, message in enumerate(ask.messages) if message.role == "assistant"), len(ask.messages))
        rounds = _rounds(ask.messages[first:])
        if not rounds or not first or not all(after for _, after in rounds):
            return self._template.encode(self._text(ask))
        head = ask.messages[:first]
        ids = self._template.encode(self._layout.whole(head, [message.text for message in head], ask.tools))
        for reply, after in rounds:
            known = self._replies.get(reply.key)
            if known is None:
                written = write_reply(reply).removeprefix(self._template.opening)
                said = [*self._template.encode(written), self._template.end]
            else:
                said = known.said
            ids += said
            ids += self._layout.following(after, said)
        return ids


def _rounds(messages: Sequence[Message]) -> list[tuple[Message, list[Message]]]:
    """Each reply with what follows it. messages: beginning with a reply, or none."""
    rounds: list[tuple[Message, list[Message]]] = []
    for message in messages:
        if message.role == "assistant":
            rounds.append((message, []))
        else:
            rounds[-1][1].append(message)
    return rounds
