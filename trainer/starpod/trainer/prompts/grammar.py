"""Response grammar: reasoning and actions between tags, further blocks where they are asked for.

The tags think and answer and their parsing are RAGEN's (arXiv 2504.20073); docs/prompts.md has the rules.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple, get_args

from starpod.client.answers import find_mark, split_actions, split_objects

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
"""Limit of one reply where none is given: servers bound the list of a step."""

_MARKERS = (*TAGS, "<|im_start|>", "<|im_end|>")
"""Deleted from the text between the tags, but not inside JSON objects."""


@dataclass(frozen=True, slots=True)
class Parsed:
    """A parsed reply.

    thought: the reasoning, stripped; None where the tags were not found or thinking is off.
    actions: in order; those that the environment lists in its own spelling, others as they were written.
    unknown: those among `actions` that the environment does not list. Empty where it lists none: then every text may be
        an action. They are sent like the others: that an action makes no sense is for the environment to say.
    well_formed: the tags were found, those of every further block too, and there is an action, and none is unknown.
        Where this is False RAGEN fines the turn, once; actions that a limit cut off cost nothing.
    blocks: what further blocks hold, by name, stripped; without those that are missing.
    """

    thought: str | None
    actions: tuple[str, ...]
    unknown: tuple[str, ...]
    well_formed: bool
    blocks: Mapping[str, str] = field(default_factory=dict)


_NOTHING = Parsed(None, (), (), False)


class Inside(NamedTuple):
    """Position of a block `name` in a reply: its content is text[begin:end], and its opening tag is at `start`."""

    name: Block
    start: int
    begin: int
    end: int


class Grammar:
    """Reads and writes replies. Another form of replies is a subclass with `opening`, `find_blocks`, `compose` and
    `describe` (prompt.grammar).

    thinking: whether an answer must follow reasoning directly.
    actions: the environment's own action names, matched without regard to case; empty: it lists none.
    blocks: further blocks between reasoning and answer, in order. What they hold has no `<`.
    """

    def __init__(self, thinking: bool = True, actions: Iterable[str] = (), blocks: Sequence[Further] = ()) -> None:
        self.thinking = thinking
        self.actions = tuple(actions)
        self.blocks = tuple(blocks)
        self._spelling = {name.lower(): name for name in self.actions}
        # A block that is missing is passed over: the actions count even so.
        rest = "".join(rf"(?:<{name}>(?P<{name}>[^<]*)</{name}>\s*)?" for name in self.blocks)
        self._turning_point = re.compile(rf"{THINK_END if thinking else ''}\s*{rest}{ANSWER}")

    @property
    def opening(self) -> str:
        """The tag that a reply begins with: what a prompt may end with, so that it need not be sampled."""
        return f"<{('think', *self.blocks, 'answer')[not self.thinking]}>"

    def parse(self, text: str, max_actions: int | None = None) -> Parsed:
        """Reads any text, in time linear in its length.

        max_actions: further actions are dropped, known or not. None: MOST_ACTIONS.
        """
        insides = self.find_blocks(text)
        if insides is None:
            return _NOTHING
        blocks: dict[str, str] = {each.name: text[each.begin : each.end].strip() for each in insides[:-1]}
        thought = _clean(blocks.pop("think")) if self.thinking else None
        answer = text[insides[-1].begin : insides[-1].end]
        pieces = (piece.strip() for piece in split_actions(_clean(answer), SEPARATOR))
        written = [piece for piece in pieces if piece][: MOST_ACTIONS if max_actions is None else max_actions]
        unknown = [piece for piece in written if piece.lower() not in self._spelling] if self._spelling else []
        return Parsed(
            thought=thought,
            actions=tuple(self._spelling.get(piece.lower(), piece) for piece in written),
            unknown=tuple(unknown),
            well_formed=bool(written) and not unknown and len(blocks) == len(self.blocks),
            blocks=blocks,
        )

    def cut(self, text: str) -> list[tuple[str, int]]:
        """The text cut into its blocks: name and end of each, in characters; one without a name if it cannot be read.

        A block begins with its tag, the first one with the text; the last one ends with it.
        """
        insides = self.find_blocks(text)
        if insides is None:
            return [("", len(text))]
        ends = [*(each.start for each in insides[1:]), len(text)]
        return [(each.name, end) for each, end in zip(insides, ends, strict=True)]

    def compose(self, thought: str | None, actions: Iterable[str], blocks: Mapping[Further, str] | None = None) -> str:
        """A well-formed reply, as a demonstration would give it. `thought` is left out where thinking is off.

        blocks: what further blocks hold, by name.
        """
        told = "".join(f"<{name}>{(blocks or {})[name]}</{name}>" for name in self.blocks)
        answer = f"{told}{ANSWER}{f' {SEPARATOR} '.join(actions)}{ANSWER_END}"
        return f"{THINK}{thought or ''}{THINK_END}{answer}" if self.thinking else answer

    def describe(self, max_actions: int | None = None) -> str:
        """The sentence that tells a policy how to write. max_actions: the limit of one turn; None: no limit."""
        if max_actions == 1:
            what, answer = "one action", "your action"
        else:
            what = f"up to {max_actions} actions" if max_actions else "your actions"
            what += f", separated by {SEPARATOR}"
            answer = f"action {SEPARATOR} action"
        form = f"{ANSWER} {answer} {ANSWER_END}"
        for name in reversed(self.blocks):
            what = f"{_ASKED[name]}, then {what}"
            form = f"<{name}> {_ASKED[name]} </{name}> {form}"
        if self.thinking:
            what = f"your reasoning, then {what}"
            form = f"{THINK} your reasoning {THINK_END} {form}"
        return f"Reply with {what}, in exactly this form and with nothing around it: {form}"

    def find_blocks(self, text: str) -> list[Inside] | None:
        """Return what is inside each block that is there, the answer last; None where think and answer are not found.

        The first opening tag counts, and what follows is as short as it can be. Whatever fits from a later opening tag
        fits from the first one too, and whatever fits after a later turning point fits after the first one: so one
        pass is enough, where a pattern with two open ends would try them all.
        """
        begin = text.find(self.opening)
        if begin < 0:
            return None
        thought: list[Inside] = []
        if self.thinking:
            begin += len(THINK)
            turn = self._turning_point.search(text, begin)
            thought = [Inside("think", begin - len(THINK), begin, turn.start())] if turn else []
        else:
            turn = self._turning_point.match(text, begin)
        end = find_mark(text, ANSWER_END, turn.end()) if turn else -1
        if turn is None or end < 0:
            return None
        further = [
            Inside(name, turn.start(name) - len(f"<{name}>"), *turn.span(name))
            for name in self.blocks
            if turn[name] is not None
        ]
        return [*thought, *further, Inside("answer", turn.end() - len(ANSWER), turn.end(), end)]


def _clean(text: str) -> str:
    pieces = split_objects(text)
    for marker in _MARKERS:
        pieces[::2] = [piece.replace(marker, "") for piece in pieces[::2]]
    return "".join(pieces).strip()
