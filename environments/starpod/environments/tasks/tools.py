"""Tools for questions: a calculator, and Python in the sandbox of the environment coding-v1."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Literal

from starpod.environments.coding.environment import read_program
from starpod.environments.coding.execution import RunLimits, call_program
from starpod.environments.countdown.expression import MalformedExpression, describe, parse

ToolName = Literal["calculator", "python"]

_CALL = re.compile(r"^[ \t]*(calculator|python)[ \t]*\[", re.MULTILINE)
_SHELL = """
def run(source):
    texts = []
    def print(*values, sep=" ", end="\\n", file=None, flush=False):
        texts.append(sep.join(map(str, values)) + end)
    exec(compile(source, "program", "exec"), {"__name__": "__main__", "print": print})
    return "".join(texts)[:2000]
"""
"""Program that runs another one and returns what that one prints."""


def _calculate(expression: str) -> str:
    try:
        return describe(parse(expression.strip()).value)
    except MalformedExpression as problem:
        return f"Error: {problem}"


def _run_python(source: str) -> str:
    limits = RunLimits(instructions=5_000_000, seconds=10)
    problem, [(error, value)] = call_program(_SHELL, "run", [[read_program(source)]], limits)
    return f"Error: {problem or error}" if problem or error else str(value).strip() or "It printed nothing."


_TOOLS: Mapping[ToolName, tuple[str, Callable[[str], str]]] = {
    "calculator": ("calculator[expression] tells you the value of an expression of integers", _calculate),
    "python": ("python[program] runs a Python program and tells you what it prints", _run_python),
}


def explain_tools(names: Sequence[ToolName]) -> str:
    """Return the sentence of the instructions."""
    uses = "; ".join(_TOOLS[name][0] for name in names)
    return f"A reply that ends with a call of a tool on a line of its own is no answer yet: {uses}."


def use_tool(reply: str, names: Sequence[ToolName]) -> str | None:
    """Return the result if a reply ends with a call of one of the named tools, else None. It takes linear time."""
    text = reply.rstrip()
    call = _CALL.search(text) if text.endswith("]") else None
    used = [name for name in names if call and name == call[1]]
    return f"{used[0]}: {_TOOLS[used[0]][1](text[call.end() : -1])}" if call and used else None
