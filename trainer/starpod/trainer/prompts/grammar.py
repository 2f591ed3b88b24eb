"""Response grammar: reasoning and actions between tags, several actions with a separator between them.

The tags and their parsing are RAGEN's (arXiv 2504.20073); docs/prompts.md has the rules.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

THINK, THINK_END = "<think>", "</think>"
ANSWER, ANSWER_END = "<answer>", "</answer>"
TAGS = (THINK, THINK_END, ANSWER, ANSWER_END)

SEPARATOR = "||"
"""Separator between the actions of an answer."""

MOST_ACTIONS = 256
"""Limit of one reply where none is given: servers bound the list of a step."""

_MARKERS = (*TAGS, "<|im_start|>", "<|im_end|>")
"""Deleted from the text between the tags."""

_TURNING_POINT = re.compile(r"</think>\s*<answer>")


@dataclass(frozen=True, slots=True)
class Parsed:
    """A parsed reply.

    thought: the reasoning, stripped; None where the tags were not found or thinking is off.
    actions: in order; those that the environment lists in its own spelling, others as they were written.
    unknown: those among `actions` that the environment does not list. Empty where it lists none: then every text may be
        an action. They are sent like the others: that an action makes no sense is for the environment to say.
    well_formed: the tags were found, and there is an action, and none is unknown. Where this is False RAGEN fines the
        turn, once; actions that a limit cut off cost nothing.
    """

    thought: str | None
    actions: tuple[str, ...]
    unknown: tuple[str, ...]
    well_formed: bool


_NOTHING = Parsed(None, (), (), False)


class Grammar:
    """Reads and writes replies.

    thinking: whether an answer must follow reasoning directly.
    actions: the environment's own action names, matched without regard to case; empty: it lists none.
    """

    def __init__(self, thinking: bool = True, actions: Iterable[str] = ()) -> None:
        self.thinking = thinking
        self.actions = tuple(actions)
        self._spelling = {name.lower(): name for name in self.actions}

    @property
    def opening(self) -> str:
        """The tag that a reply begins with: what a prompt may end with, so that it need not be sampled."""
        return THINK if self.thinking else ANSWER

    def parse(self, text: str, max_actions: int | None = None) -> Parsed:
        """Reads any text, in time linear in its length.

        max_actions: further actions are dropped, known or not. None: MOST_ACTIONS.
        """
        blocks = self._blocks(text)
        if blocks is None:
            return _NOTHING
        thought, answer = blocks
        pieces = (piece.strip() for piece in _clean(answer).split(SEPARATOR))
        written = [piece for piece in pieces if piece][: MOST_ACTIONS if max_actions is None else max_actions]
        unknown = [piece for piece in written if piece.lower() not in self._spelling] if self._spelling else []
        return Parsed(
            thought=None if thought is None else _clean(thought),
            actions=tuple(self._spelling.get(piece.lower(), piece) for piece in written),
            unknown=tuple(unknown),
            well_formed=bool(written) and not unknown,
        )

    def compose(self, thought: str | None, actions: Iterable[str]) -> str:
        """A well-formed reply, as a demonstration would give it. `thought` is left out where thinking is off."""
        answer = f"{ANSWER}{f' {SEPARATOR} '.join(actions)}{ANSWER_END}"
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
        if self.thinking:
            what = f"your reasoning, then {what}"
            form = f"{THINK} your reasoning {THINK_END} {form}"
        return f"Reply with {what}, in exactly this form and with nothing around it: {form}"

    def _blocks(self, text: str) -> tuple[str | None, str] | None:
        """The insides of the think and answer blocks; None where they are not found.

        The first opening tag counts, and what follows is as short as it can be. Whatever fits from a later opening tag
        fits from the first one too, and whatever fits after a later turning point fits after the first one: so one
        pass is enough, where a pattern with two open ends would try them all.
        """
        begin = text.find(self.opening)
        if begin < 0:
            return None
        begin += len(self.opening)
        if not self.thinking:
            end = text.find(ANSWER_END, begin)
            return None if end < 0 else (None, text[begin:end])
        turn = _TURNING_POINT.search(text, begin)
        if turn is None:
            return None
        end = text.find(ANSWER_END, turn.end())
        return None if end < 0 else (text[begin : turn.start()], text[turn.end() : end])


def _clean(text: str) -> str:
    for marker in _MARKERS:
        text = text.replace(marker, "")
    return text.strip()
