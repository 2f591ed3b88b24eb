"""Conversations in OpenAI's chat format, as files for supervised fine-tuning have them: one JSON object per line.

See https://platform.openai.com/docs/guides/supervised-fine-tuning. A line has `messages`, and may have `tools`. We also
write and read `reward`, `success`, `environment` and `seed`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, Field, ValidationError, model_validator

from starpod.trainer.data.episode import Episode


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
    failed: bool = False
    """Whether it is an episode that the infrastructure lost."""
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
    try:
        line = _Line.model_validate(values)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        raise ValueError(f"{'.'.join(map(str, first['loc']))}: {first['msg'].removeprefix('Value error, ')}") from None
    weights = [float(message.weight) if message.role == "assistant" else 0.0 for message in line.messages]
    if not any(weights):
        raise ValueError("no message of the role assistant is to be imitated")
    messages = [message.model_dump(exclude={"weight"}, exclude_defaults=True) for message in line.messages]
    facts = line.model_dump(exclude={"messages", "tools"})
    return Chat(messages, weights, list(values.get("tools") or ()), **facts)


class _Function(BaseModel):
    name: str


class _Call(_Function):
    # A mapping, because templates would write a text as a JSON string.
    arguments: Annotated[
        dict[str, Any], BeforeValidator(lambda value: json.loads(value) if type(value) is str else value)
    ]


class _ToolCall(BaseModel, extra="allow"):
    function: _Call


class _Tool(BaseModel):
    function: _Function


class _Part(BaseModel):
    type: Literal["text", "input_text", "output_text"]
    text: str


class _Message(BaseModel):
    role: Literal["system", "user", "assistant", "tool"]
    content: str
    name: str | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[_ToolCall] | None = None
    weight: Literal[0, 1] = 1

    @model_validator(mode="before")
    @classmethod
    def _simplify(cls, message: Any) -> Any:
        """Give instructions of newer models their old role, a message that only calls tools a text, and join parts."""
        if not isinstance(message, dict):
            return message
        role, content = message.get("role"), message.get("content")
        if isinstance(content, list):
            content = "".join(_Part.model_validate(part).text for part in content)
        elif content is None and message.get("tool_calls"):
            content = ""
        return {**message, "role": "system" if role == "developer" else role, "content": content}


class _Line(BaseModel):
    messages: list[_Message]
    tools: list[_Tool] | None = None
    reward: float | None = Field(default=None, strict=True)
    success: bool | None = Field(default=None, strict=True)
    environment: str = ""
    seed: int = Field(default=0, strict=True)
    failed: bool = Field(default=False, strict=True)
