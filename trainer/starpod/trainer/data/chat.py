"""Conversations in OpenAI's chat format, as files for supervised fine-tuning have them: one JSON object per line.

See https://platform.openai.com/docs/guides/supervised-fine-tuning. A line has `messages`, and may have `tools`. We also
write and read `reward`, `success`, `environment` and `seed`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from starpod.trainer.data.episode import Episode

ROLES = ("system", "user", "assistant", "tool")


@dataclass(frozen=True, slots=True)
class Chat:
    """A conversation of a file."""

    messages: list[dict[str, Any]]
    """Messages as a chat template takes them: contents are texts, and arguments of tool calls are mappings."""
    weights: list[float]
    """For each message, its weight in the loss; 0 for all but replies of the assistant."""
    tools: list[dict[str, Any]]
    """Descriptions of tools in OpenAI's format."""
    reward: float | None = None
    success: bool | None = None
    environment: str = ""
    """Environment of an episode that was exported; "" if the conversation comes from elsewhere."""
    seed: int = 0
    place: str = ""
    """File and line, for messages."""


def to_chat(episode: Episode) -> dict[str, Any]:
    """Return an episode as a conversation: instructions, observations and replies, without the run's prompts."""
    messages = [{"role": "system", "content": episode.instructions}] if episode.instructions else []
    for turn in episode.turns:
        messages += [{"role": "user", "content": turn.observation}, {"role": "assistant", "content": turn.text}]
    facts = {"reward": episode.own_return, "success": episode.success}
    return {"messages": messages, **facts, "environment": episode.environment, "seed": episode.seed}


def parse_chat(values: Mapping[str, Any]) -> Chat:
    """Return the conversation in a line. Raises ValueError if it is none, or has nothing to imitate."""
    messages, tools = values["messages"], values.get("tools") or []
    if not isinstance(messages, list) or not all(isinstance(message, dict) for message in messages):
        raise ValueError("`messages` must be a list of objects with `role` and `content`")
    if not isinstance(tools, list) or not all(isinstance(_function_of(tool).get("name"), str) for tool in tools):
        raise ValueError("`tools` must be a list of {type: function, function: {name, description, parameters}}")
    reward, success, seed = values.get("reward"), values.get("success"), values.get("seed", 0)
    if not (reward is None or type(reward) in (int, float)) or not (success is None or isinstance(success, bool)):
        raise ValueError(f"`reward` must be a number and `success` true or false, not {reward!r} and {success!r}")
    if type(seed) is not int or not isinstance(environment := values.get("environment", ""), str):
        raise ValueError("`seed` must be a whole number, and `environment` a name")
    parsed = [_message(message, number) for number, message in enumerate(messages, 1)]
    weights = [_weight(message) for message in messages]
    if not any(weights):
        raise ValueError("no message of the role assistant is to be imitated")
    return Chat(parsed, weights, tools, reward, success, environment, seed)


def _message(message: Mapping[str, Any], number: int) -> dict[str, Any]:
    role = "system" if message.get("role") == "developer" else message.get("role")
    if role not in ROLES:
        raise ValueError(f"message {number} has the role {role!r}, but roles are {', '.join(ROLES)}")
    if message.get("function_call"):
        raise ValueError(f"message {number} has `function_call`, which OpenAI has replaced: write `tool_calls`")
    calls = message.get("tool_calls") or []
    content = message.get("content", "" if calls else None)
    if content is None and role == "assistant" and calls:
        content = ""
    if isinstance(content, list):
        content = "".join(str(part.get("text")) if _is_text(part) else _refuse_part(part, number) for part in content)
    if not isinstance(content, str):
        raise ValueError(f"message {number} has no text in `content`")
    extra = {key: message[key] for key in ("name", "tool_call_id", "reasoning_content") if message.get(key)}
    if calls:
        extra["tool_calls"] = (
            [_call(call, number) for call in calls] if isinstance(calls, list) else _call(calls, number)
        )
    return {"role": role, "content": content, **extra}


def _call(call: Any, number: int) -> dict[str, Any]:
    """Return a tool call with its arguments as a mapping, because templates would write a text as a JSON string."""
    function = _function_of(call)
    arguments = function.get("arguments") or {}
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except json.JSONDecodeError as error:
            raise ValueError(f"the arguments of a tool call in message {number} are not JSON: {error}") from None
    if not isinstance(function.get("name"), str) or not isinstance(arguments, dict):
        raise ValueError(f"a tool call in message {number} needs {{function: {{name, arguments}}}}")
    return {**call, "type": "function", "function": {"name": function["name"], "arguments": arguments}}


def _weight(message: Mapping[str, Any]) -> float:
    weight = message.get("weight", 1)
    if weight not in (0, 1):
        raise ValueError(f"the `weight` of a message must be 0 or 1, not {weight!r}")
    return float(weight) if message.get("role") == "assistant" else 0.0


def _function_of(value: Any) -> Mapping[str, Any]:
    function = value.get("function") if isinstance(value, dict) else None
    return function if isinstance(function, dict) else {}


def _is_text(part: Any) -> bool:
    return isinstance(part, dict) and part.get("type") in ("text", "input_text", "output_text")


def _refuse_part(part: Any, number: int) -> str:
    kind = part.get("type") if isinstance(part, dict) else type(part).__name__
    raise ValueError(f"message {number} has a part of the type {kind!r}: only texts can be imitated from a file")
