"""Tools as text, for chat templates that do not describe tools or their results."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from starpod.trainer.prompts.formats.base import CallFormat


def describe_tools(tools: Sequence[Mapping[str, Any]], calls: CallFormat) -> str:
    """Return a system text that describes tools, worded as in Hermes, and how to call them."""
    lines = "\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools)
    return (
        "You may call one or more of these functions, described as JSON:\n"
        f"<tools>\n{lines}\n</tools>\nTo call one, write: {calls.example}"
    )


def describe_results(results: Iterable[str]) -> str:
    """Return a user message with tools' results."""
    return "\n".join(f"<tool_response>\n{result}\n</tool_response>" for result in results)
