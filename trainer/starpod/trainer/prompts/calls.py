"""Replies whose actions are tool calls, in the format of a family of models."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import replace

from starpod.trainer.prompts.formats.base import CallFormat, ReplyCall, decode
from starpod.trainer.prompts.formats.tags import guess_type
from starpod.trainer.prompts.grammar import MOST_ACTIONS, Further, Grammar, Inside, Parsed

ACT, ACTION = "act", "action"
"""The tool that takes actions of environments without tools, and its argument."""
_TEXT = {"properties": {ACTION: {"type": "string"}}}
_TOOLS = ({"type": "function", "function": {"name": ACT, "parameters": _TEXT}},)
_CALL = re.compile(r"([A-Za-z_][\w.-]*)\s*(\{.*\})", re.DOTALL)


class CallGrammar(Grammar):
    """Parser and writer of replies with tool calls.

    A call is the action `name {"argument": 1}`, as environments with tools read it. Any other action, such as `Up` or a
    program, is the argument of the tool `act`.

    Args:
        actions: The environment's action names, matched case-insensitively; empty if it lists none.
    """

    def __init__(self, calls: CallFormat, thinking: bool = True, actions: Iterable[str] = ()) -> None:
        super().__init__(thinking, actions)
        self.calls = calls

    @property
    def opening(self) -> str:
        return self.calls.thought[0] if self.thinking else ""

    def parse(self, text: str, max_actions: int | None = None) -> Parsed:
        parts = self.calls.parse(text, _TOOLS)
        actions = [_action_of(call) for call in parts.calls][: MOST_ACTIONS if max_actions is None else max_actions]
        parsed = self.parsed(parts.thought if self.thinking else None, actions, {})
        return replace(parsed, well_formed=False) if self.thinking and parts.thought is None else parsed

    def find_blocks(self, text: str) -> list[Inside] | None:
        if not self.calls.parse(text).calls:
            return None
        begin = len(text) - len(text.lstrip())
        end = text.find(self.calls.thought[1]) if text.startswith(self.calls.thought[0], begin) else -1
        if end < 0:
            return [Inside("answer", begin, begin, len(text))]
        answer = end + len(self.calls.thought[1])
        return [Inside("think", begin, begin, end), Inside("answer", answer, answer, len(text))]

    def compose(self, thought: str | None, actions: Iterable[str], blocks: Mapping[Further, str] | None = None) -> str:
        thought = (thought or "") if self.thinking else None
        return self.calls.write(thought, "", [self._call_of(action) for action in actions])

    def _call_of(self, action: str) -> ReplyCall:
        match = _CALL.fullmatch(action.strip())
        values = decode(match[2]) if match else None
        if not match or not isinstance(values, dict):
            return ReplyCall(ACT, json.dumps({ACTION: action}, ensure_ascii=False))
        if not self.calls.typed:  # the policy reads no schemas, so a text such as 12 is written as JSON
            texts = {
                key: value for key, value in values.items() if isinstance(value, str) and guess_type(value) != value
            }
            values = {**values, **{key: json.dumps(text, ensure_ascii=False) for key, text in texts.items()}}
        return ReplyCall(match[1], json.dumps(values, ensure_ascii=False))

    def describe(self, max_actions: int | None = None) -> str:
        number = "one tool" if max_actions == 1 else f"up to {max_actions} tools" if max_actions else "tools"
        thought = f"your reasoning between {' and '.join(self.calls.thought)}, then " if self.thinking else ""
        return (
            f"Reply with {thought}calls of {number}. An action that is no tool, such as a word, is the argument "
            f"{ACTION} of the tool {ACT}. Write a call in exactly this form: {self.calls.example}"
        )


def _action_of(call: ReplyCall) -> str:
    action = call.values.get(ACTION)
    return action if call.name == ACT and isinstance(action, str) else f"{call.name} {call.arguments}"
