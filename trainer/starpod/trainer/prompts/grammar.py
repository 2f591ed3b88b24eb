"""Response grammar: reasoning and actions between tags, with optional blocks.

The tags think and answer and their parsing are RAGEN's (arXiv 2504.20073). See docs/prompts.md for the rules.
"""

from __future__ import annotations

import re
import reprlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, TypeVar, get_args

from starpod.client.answers import find_mark, split_actions, split_objects
from starpod.trainer.configuration.user_file import UserFunction

Result = TypeVar("Result")

THINK, THINK_END = "<think>", "</think>"
ANSWER, ANSWER_END = "<answer>", "</answer>"
TAGS = (THINK, THINK_END, ANSWER, ANSWER_END)
"""The tags of the default grammar."""

Further = Literal["switch", "subgoal", "description", "prediction"]
"""Name of an optional block between reasoning and answer."""
Block = Literal["think", "switch", "subgoal", "description", "prediction", "answer"]
"""Name of a block of a reply."""
BLOCKS: tuple[Block, ...] = get_args(Block)
"""Names of all blocks, in the order in which a reply has them."""
FURTHER_TAGS = tuple(tag for name in get_args(Further) for tag in (f"<{name}>", f"</{name}>"))
"""Tags of the optional blocks."""

_ASKED: dict[Further, str] = {
    "switch": "KEEP or SWITCH",
    "subgoal": "your subgoal",
    "description": "what you see",
    "prediction": "what you will see then",
}

SEPARATOR = "||"
"""Separator between the actions of an answer. Inside a JSON object it is part of an action."""

MOST_ACTIONS = 256
"""Default maximum number of actions per reply. Servers limit the number of actions per step."""

_MARKERS = (*TAGS, "<|im_start|>", "<|im_end|>")
"""Markers that are deleted from the text between the tags, but not inside JSON objects."""


@dataclass(frozen=True, slots=True)
class Parsed:
    """A parsed reply."""

    thought: str | None
    """The stripped reasoning; None if the tags are missing or thinking is off."""
    actions: tuple[str, ...]
    """Actions in order. Actions that the environment lists have its spelling; other actions are left as written."""
    unknown: tuple[str, ...]
    """Actions that the environment does not list; empty if it lists none. They are sent nevertheless, because the
    environment decides whether an action is valid."""
    well_formed: bool
    """Whether the tags of all blocks were found, and there is at least one action and no unknown one. RAGEN penalizes a
    turn once if it is False. Actions that a limit cut off do not matter."""
    blocks: Mapping[str, str] = field(default_factory=dict)
    """Stripped contents of the optional blocks that were found, by name."""


_NOTHING = Parsed(None, (), (), False)


class Inside(NamedTuple):
    """Position of a block `name` in a reply: its content is text[`begin`:`end`], and its opening tag is at `start`."""

    name: Block
    start: int
    begin: int
    end: int


class Grammar:
    """Parser and writer of replies.

    To use another reply format, derive a class that overrides `opening`, `find_blocks`, `compose` and `describe`, and
    set prompt.grammar.

    Args:
        thinking: Whether replies begin with reasoning, which the answer must follow directly.
        actions: The environment's action names, matched case-insensitively; empty if it lists none.
        blocks: Optional blocks between reasoning and answer, in order. Their contents have no `<`.
    """

    def __init__(self, thinking: bool = True, actions: Iterable[str] = (), blocks: Sequence[Further] = ()) -> None:
        self.thinking = thinking
        self.actions = tuple(actions)
        self.blocks = tuple(blocks)
        self._spelling = {name.lower(): name for name in self.actions}
        # These blocks are optional in the pattern, so that the actions of a reply without them still count.
        pattern = "".join(rf"(?:<{name}>(?P<{name}>[^<]*)</{name}>\s*)?" for name in self.blocks)
        self._turning_point = re.compile(rf"{THINK_END if thinking else ''}\s*{pattern}{ANSWER}")

    @property
    def opening(self) -> str:
        """The first tag of a reply. A prompt may end with it, so that it need not be sampled."""
        return f"<{('think', *self.blocks, 'answer')[not self.thinking]}>"

    def parse(self, text: str, max_actions: int | None = None) -> Parsed:
        """Parse any text in linear time. Actions after the first `max_actions` are dropped; None is MOST_ACTIONS."""
        insides = self.find_blocks(text)
        if insides is None:
            return _NOTHING
        blocks: dict[str, str] = {inside.name: text[inside.begin : inside.end].strip() for inside in insides[:-1]}
        thought = _clean(blocks.pop("think")) if self.thinking else None
        answer = text[insides[-1].begin : insides[-1].end]
        pieces = (piece.strip() for piece in split_actions(_clean(answer), SEPARATOR))
        actions = [piece for piece in pieces if piece][: MOST_ACTIONS if max_actions is None else max_actions]
        return self.parsed(thought, actions, blocks)

    def parsed(self, thought: str | None, actions: Sequence[str], blocks: Mapping[str, str]) -> Parsed:
        """Return a reply with these parts, with the spelling of the actions that the environment lists."""
        unknown = [piece for piece in actions if piece.lower() not in self._spelling] if self._spelling else []
        return Parsed(
            thought=thought,
            actions=tuple(self._spelling.get(piece.lower(), piece) for piece in actions),
            unknown=tuple(unknown),
            well_formed=bool(actions) and not unknown and len(blocks) == len(self.blocks),
            blocks=blocks,
        )

    def cut(self, text: str) -> list[tuple[str, int]]:
        """Split a text into blocks. Return each block's name and the character index of its end.

        A block begins at its opening tag, except that the first block begins at index 0. The last block ends at the end
        of the text. A text that cannot be parsed is a single block with the name "".
        """
        insides = self.find_blocks(text)
        if insides is None:
            return [("", len(text))]
        ends = [*(inside.start for inside in insides[1:]), len(text)]
        return [(inside.name, end) for inside, end in zip(insides, ends, strict=True)]

    def compose(self, thought: str | None, actions: Iterable[str], blocks: Mapping[Further, str] | None = None) -> str:
        """Return a well-formed reply, as demonstrations contain it.

        Args:
            thought: The reasoning; ignored if thinking is off, empty if None.
            blocks: Text of each further block by name. All blocks of the grammar are required.

        Raises:
            KeyError: A block of the grammar is missing.
        """
        blocks_text = "".join(f"<{name}>{(blocks or {})[name]}</{name}>" for name in self.blocks)
        answer = f"{blocks_text}{ANSWER}{f' {SEPARATOR} '.join(actions)}{ANSWER_END}"
        return f"{THINK}{thought or ''}{THINK_END}{answer}" if self.thinking else answer

    def describe(self, max_actions: int | None = None) -> str:
        """Return the sentence that explains the format to a policy. max_actions: limit per turn; None is no limit."""
        if max_actions == 1:
            contents, answer = "one action", "your action"
        else:
            contents = f"up to {max_actions} actions" if max_actions else "your actions"
            contents += f", separated by {SEPARATOR}"
            answer = f"action {SEPARATOR} action"
        form = f"{ANSWER} {answer} {ANSWER_END}"
        for name in reversed(self.blocks):
            contents = f"{_ASKED[name]}, then {contents}"
            form = f"<{name}> {_ASKED[name]} </{name}> {form}"
        if self.thinking:
            contents = f"your reasoning, then {contents}"
            form = f"{THINK} your reasoning {THINK_END} {form}"
        return f"Reply with {contents}, in exactly this form and with nothing around it: {form}"

    def find_blocks(self, text: str) -> list[Inside] | None:
        """Return the position of each block that was found, the answer last; None if think or answer is missing.

        The first opening tag counts, and blocks are as short as possible. If the tags that follow are found after a
        later opening tag, they are also found after the first one, so one pass is enough.
        """
        begin = text.find(self.opening)
        if begin < 0:
            return None
        thought: list[Inside] = []
        if self.thinking:
            begin += len(THINK)
            match = self._turning_point.search(text, begin)
            thought = [Inside("think", begin - len(THINK), begin, match.start())] if match else []
        else:
            match = self._turning_point.match(text, begin)
        end = find_mark(text, ANSWER_END, match.end()) if match else -1
        if match is None or end < 0:
            return None
        further = [
            Inside(name, match.start(name) - len(f"<{name}>"), *match.span(name))
            for name in self.blocks
            if match[name] is not None
        ]
        return [*thought, *further, Inside("answer", match.end() - len(ANSWER), match.end(), end)]


class UserGrammar(Grammar):
    """A grammar of a user's file, whose methods are called through the border to users' code."""

    def __init__(self, grammar: Grammar, name: str) -> None:
        super().__init__(grammar.thinking, grammar.actions, grammar.blocks)
        self._grammar = grammar
        self._name = name

    @property
    def opening(self) -> str:
        return self._call(lambda: self._grammar.opening, str)

    def parse(self, text: str, max_actions: int | None = None) -> Parsed:
        return self._call(self._grammar.parse, Parsed, text, max_actions)

    def cut(self, text: str) -> list[tuple[str, int]]:
        return self._call(self._grammar.cut, list, text)

    def compose(self, thought: str | None, actions: Iterable[str], blocks: Mapping[Further, str] | None = None) -> str:
        return self._call(self._grammar.compose, str, thought, actions, blocks)

    def describe(self, max_actions: int | None = None) -> str:
        return self._call(self._grammar.describe, str, max_actions)

    def _call(self, method: Callable[..., Any], kind: type[Result], *arguments: Any) -> Result:
        function = UserFunction(self._name, method)
        result = function("", *arguments)
        if not isinstance(result, kind):
            raise function.refuse(f"must return {kind.__name__}; it returned {reprlib.repr(result)}")
        return result


def _clean(text: str) -> str:
    pieces = split_objects(text)
    for marker in _MARKERS:
        pieces[::2] = [piece.replace(marker, "") for piece in pieces[::2]]
    return "".join(pieces).strip()
