"""Runs a program on arguments, in a confined process. It knows no answers: those stay with the environment.

Loaded by its path, alone, before the process gives up all files: everything that a program may import is imported here.
"""

import bisect
import collections
import copy
import decimal
import functools
import heapq
import itertools
import json
import math
import operator
import re
import statistics
import string
import sys
import typing
from collections.abc import Callable
from types import FrameType
from typing import Any, NoReturn

LENT = (
    *(bisect, collections, copy, decimal, functools, heapq, itertools, json, math, operator, re, statistics, string),
    typing,
)
"""What programs import."""

_LONGEST_ERROR = 200
_DEEPEST = 60


def main(work: bytes, reply: Callable[[bytes], NoReturn]) -> None:
    """Defines the program and calls its function on each list of arguments.

    work: JSON with `code`, `function`, `arguments` and `instructions`: how many of Python all may run together. Replies
    JSON: `results`, each with a `value` or an `error`; or `error` where the program could not be defined, or `limit`.
    """
    task = json.loads(work)
    left = task["instructions"]

    def send(answer: dict[str, Any]) -> NoReturn:
        sys.settrace(None)
        reply(json.dumps(answer).encode())

    def count(frame: FrameType, event: str, argument: object) -> Any:
        nonlocal left
        if event == "call":
            frame.f_trace_lines, frame.f_trace_opcodes = False, True
        left -= 1
        if left < 0:
            send({"limit": "instructions"})
        return count

    namespace: dict[str, Any] = {"__name__": "solution"}
    try:
        compiled = compile(task["code"], "solution", "exec")
        sys.settrace(count)
        exec(compiled, namespace)
        function = namespace[task["function"]]
    except MemoryError:
        send({"limit": "memory"})
    except BaseException as error:
        send({"error": _tell(error)})
    results: list[dict[str, Any]] = []
    for arguments in task["arguments"]:
        try:
            sys.settrace(count)
            value = function(*arguments)
            sys.settrace(None)
            results.append({"value": _plain(value)})
        except MemoryError:
            send({"limit": "memory"})
        except BaseException as error:
            sys.settrace(None)
            results.append({"error": _tell(error)})
    send({"results": results})


def _plain(value: Any, depth: int = 0) -> Any:
    """A value as JSON has it. Raises TypeError for one that JSON would change: a tuple, a set, a class of their own."""
    if depth > _DEEPEST:
        raise TypeError("the result is nested too deep")
    if type(value) in (str, int, bool) or value is None or (type(value) is float and math.isfinite(value)):
        return value
    if type(value) is list:
        return [_plain(item, depth + 1) for item in value]
    raise TypeError(f"the result holds a value of type {type(value).__name__}")


def _tell(error: BaseException) -> str:
    try:
        return f"{type(error).__name__}: {error}"[:_LONGEST_ERROR]
    except BaseException:
        return "an error that cannot be shown"
