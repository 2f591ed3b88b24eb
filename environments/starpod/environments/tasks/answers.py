"""Search for the answer in a reply: the last \\boxed{}, else after `Answer:` or `####`, in <answer> if there is one.

The answer may be on the line after `Answer:`.
"""

from __future__ import annotations

import re

ASKED = "Reply with the answer alone, or end your reply with a line that holds Answer: and the answer."
"""Sentence of the instructions."""
_LINE = re.compile(r"[\s*_]*(?:(?:the )?(?:final )?answer[*_]*:|####)[*_]*\s*(.*)", re.IGNORECASE)


def find_answer(reply: str) -> str:
    """Return the answer in a reply, or in a worked solution of a file. It takes linear time."""
    _, box, rest = reply.rpartition("\\boxed{")
    depth = 1
    for index, character in enumerate(rest if box else ""):
        depth += (character == "{") - (character == "}")
        if not depth:
            return rest[:index].strip()
    _, tag, rest = reply.rpartition("</answer>")[0].rpartition("<answer>")
    text = rest if tag else reply
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    for index in reversed(range(len(lines))):
        if match := _LINE.fullmatch(lines[index]):
            return match[1].strip("*_ ") or "".join(lines[index + 1 : index + 2]).strip("*_ ")
    return text.strip()
