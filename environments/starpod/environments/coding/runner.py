"""Run a program on arguments, in a confined process that does not know the right results.

This file is loaded by its path before the process loses access to all files, so it imports everything that programs may
import.

A trace function counts the program's instructions. An audit hook refuses what would remove the trace function, access a
frame, or run code that is not traced (profilers, audit hooks, threads). This makes it hard to evade the count,
but it is not a sandbox. Only the CPU time limit cannot be evaded.
"""

import _thread
import bisect
import collections
import copy
import datetime
import decimal
import functools
import heapq
import itertools
import json
import math
import operator
import os
import random
import re
import statistics
import string
import sys
import threading
import time
import typing
from collections.abc import Callable
from types import FrameType
from typing import Any, NoReturn

LENT = (
    *(bisect, collections, copy, decimal, functools, heapq, itertools, json, math, operator, re, statistics, string),
    typing,
)
"""Modules that programs can import."""

_LONGEST_ERROR = 200
_DEEPEST = 60
_MAX_BITS = 14_284
"""Maximum size of an integer in a result. It has 4,300 digits, the most that Python reads."""
_REFUSED = frozenset(
    {
        *("sys.settrace", "sys.setprofile", "sys.addaudithook", "sys.monitoring.register_callback"),
        *("sys._getframe", "sys._current_frames", "sys._current_exceptions"),
        *("gc.get_objects", "gc.get_referrers", "gc.get_referents"),
        *("_thread.start_new_thread", "_thread.start_joinable_thread", "cpython.PyInterpreterState_New"),
    }
)
"""Audit events of calls that could access the trace function, or run code that is not traced."""
_FRAMES = ("tb_frame", "gi_frame", "cr_frame", "ag_frame")
"""Names of attributes that return stack frames. A frame's `f_trace` determines whether its instructions are counted."""


_PID = 2
_EPOCH = 1_000_000_000
"""Initial time of a program's clock, in seconds since 1970."""
_TICK = 1_000_000
"""Nanoseconds by which each reading advances a program's clock."""
_HIDDEN = ("_datetime", "_random", "_uuid", "multiprocessing", "resource", "secrets", "uuid")
"""Modules that a program cannot import, because their results differ between processes."""


def main(work: bytes, reply: Callable[[bytes], NoReturn]) -> None:
    """Execute a program and call its function with each list of arguments.

    Args:
        work: JSON with `code`, `function`, `arguments` and `instructions`, the maximum number of Python instructions.
        reply: receives JSON with `results` (each a `value` or an `error`), or `error` if the program could not be
            executed, or `limit` if it exceeded a limit.
    """
    task = json.loads(work)
    arm, check, finish = _guard(task["instructions"], reply)
    memory = json.dumps({"limit": "memory"}).encode()
    _repeat_each_time()
    namespace: dict[str, Any] = {"__name__": "solution"}
    arm()
    try:
        exec(compile(task["code"], "solution", "exec"), namespace)
        function = namespace[task["function"]]
    except MemoryError:
        finish(memory)
    except BaseException as error:
        check()
        finish(json.dumps({"error": _describe_error(error)}).encode())
    results: list[dict[str, Any]] = []
    for arguments in task["arguments"]:
        try:
            results.append({"value": _expect_json(function(*arguments))})
        except MemoryError:
            finish(memory)
        except BaseException as error:
            results.append({"error": _describe_error(error)})
    data = json.dumps({"results": results}).encode()
    check()
    finish(data)


def _guard(
    instructions: int, reply: Callable[[bytes], NoReturn]
) -> tuple[Callable[[], None], Callable[[], None], Callable[[bytes], NoReturn]]:
    """Prepare the count of a program's instructions.

    Returns:
        A function that begins to count, and from then on refuses what would disturb the count; one that ends the
        program if some of its instructions may not have been counted; and one that ends it with a reply.
    """
    limits = {name: json.dumps({"limit": name}).encode() for name in ("instructions", "uncounted")}
    settrace, gettrace, write, leave = sys.settrace, sys.gettrace, os.write, os._exit
    armed = tampered = False

    def finish(data: bytes) -> NoReturn:
        nonlocal armed
        armed = False
        settrace(None)
        os.write, os._exit = write, leave  # the program may have replaced them
        reply(data)

    def exhausted() -> NoReturn:
        finish(limits["instructions"])

    count, enter = _tracers(instructions, exhausted)

    def audit(event: str, arguments: Any) -> None:
        if not armed:
            return
        reaches = event in refused or event.startswith("ctypes.")
        if event.startswith("object.__"):  # a protected attribute of arguments[0] is read or written
            ours = arguments[0] is count or arguments[0] is enter
            reaches = ours or (event == "object.__getattr__" and arguments[1] in frames)
        if reaches:
            refuse(event)

    def refuse(event: str) -> NoReturn:
        # Python removes a trace function that fails, but calls audit() before that. If it failed because the recursion
        # is too deep, this function fails for the same reason. The program then gets that error and is still counted.
        nonlocal tampered
        error = ValueError(f"{event} is out of a program's reach")  # libraries that ask for frames also work without
        tampered = tampered or event == "sys.settrace"
        raise error

    def check() -> None:
        if tampered or gettrace() is not enter:
            finish(limits["uncounted"])

    def arm() -> None:
        nonlocal armed
        sys.setrecursionlimit = _raise_recursion_limit
        # Python 3.11 has no audit event for starting threads.
        _thread.start_new_thread = _thread.start_new = threading._start_new_thread = _refuse_thread  # type: ignore[attr-defined]
        sys.addaudithook(audit)
        sys._getframe().f_trace_opcodes = True  # Python 3.12 only traces instructions if a frame has set this before
        settrace(enter)  # until the end, because the program's code also runs when its values are converted or freed
        armed = True

    refused, frames = _REFUSED, _FRAMES
    return arm, check, finish


def _tracers(instructions: int, exhausted: Callable[[], NoReturn]) -> tuple[Any, Any]:
    """Return the trace function of a frame, which counts its instructions, and the one that gives it to new frames."""
    left = itertools.repeat(None, instructions)

    # A program can get these two functions from sys.gettrace, and could modify their cells and globals. They therefore
    # keep what they use in the defaults of their arguments, which audit() protects.
    def count(
        frame: FrameType, event: str, argument: object, *, take: Any = left.__next__, end: Any = exhausted
    ) -> None:
        try:
            take()
        except StopIteration:
            end()

    def enter(frame: FrameType, event: str, argument: object, *, count: Any = count) -> Any:
        frame.f_trace = count  # first, because Python 3.13 reads it when the next attributes are set
        frame.f_trace_lines, frame.f_trace_opcodes = False, True
        count(frame, event, argument)
        return count

    return count, enter


def _repeat_each_time() -> None:
    """Give a program the same clock, process id and random numbers in every process.

    Memory addresses (`id`, the default `repr`), facts about the machine, and statistics of the interpreter (`gc`,
    `sys`) are not changed.
    """
    elapsed = itertools.count(0, _TICK)
    slept = 0

    def since() -> int:
        return next(elapsed) + slept

    def sleep(seconds: Any) -> None:
        nonlocal slept
        slept += int(float(seconds) * 1e9)

    def seconds_of(start: int) -> Callable[..., float]:
        return lambda *_: start + since() / 1e9

    def nanoseconds_of(start: int) -> Callable[..., int]:
        return lambda *_: start * 10**9 + since()

    for name in ("time", "clock_gettime", "monotonic", "perf_counter", "process_time", "thread_time"):
        start = _EPOCH if name in ("time", "clock_gettime") else 0
        setattr(time, name, seconds_of(start))
        setattr(time, f"{name}_ns", nanoseconds_of(start))
    time.sleep = sleep
    localtime, gmtime, ctime, asctime, strftime = time.localtime, time.gmtime, time.ctime, time.asctime, time.strftime
    time.localtime = lambda seconds=None: localtime(time.time() if seconds is None else seconds)
    time.gmtime = lambda seconds=None: gmtime(time.time() if seconds is None else seconds)
    time.ctime = lambda seconds=None: ctime(time.time() if seconds is None else seconds)
    time.asctime = lambda moment=None: asctime(time.localtime() if moment is None else moment)
    time.strftime = lambda format, moment=None: strftime(format, time.localtime() if moment is None else moment)
    datetime.datetime = _Datetime  # type: ignore[misc]

    numbers = random.Random(0)
    seed = random.Random.seed
    random.Random.seed = lambda self, a=None, version=2: seed(self, 0 if a is None else a, version)  # type: ignore
    random.seed = random._inst.seed
    random.seed()
    random._urandom = numbers.randbytes  # type: ignore[attr-defined]
    for module in (os, sys.modules["posix"]):
        constants: dict[str, Any] = {
            "getpid": lambda: _PID,
            "getppid": lambda: 1,
            "urandom": numbers.randbytes,
            "getrandom": lambda size, flags=0: numbers.randbytes(size),
            "times": lambda: os.times_result((0.0,) * 5),
            "getloadavg": lambda: (0.0, 0.0, 0.0),
        }
        vars(module).update(constants)
    threading.get_native_id = _thread.get_native_id = lambda: _PID
    threading.main_thread()._native_id = _PID  # type: ignore[attr-defined]
    for name in list(sys.modules):
        if name.partition(".")[0] in _HIDDEN:
            sys.modules[name] = None  # type: ignore[assignment]


class _Datetime(datetime.datetime):
    """A datetime whose `now` uses the clock of `time`."""

    @classmethod
    def now(cls, tz: datetime.tzinfo | None = None) -> "_Datetime":
        return cls.fromtimestamp(time.time(), tz)

    @classmethod
    def utcnow(cls) -> "_Datetime":
        return cls.fromtimestamp(time.time(), datetime.UTC).replace(tzinfo=None)


_Datetime.__name__ = _Datetime.__qualname__ = "datetime"
_Datetime.__module__ = "datetime"


def _raise_recursion_limit(
    limit: int, *, to: Any = sys.setrecursionlimit, least: int = sys.getrecursionlimit()
) -> None:
    """Set the recursion limit, but at least to the default. Below that, the trace function would fail in every frame.

    Programs get this function as sys.setrecursionlimit.
    """
    to(max(limit, least))


def _refuse_thread(*_: Any, **__: Any) -> NoReturn:
    raise ValueError("threads are out of a program's reach")


def _expect_json(value: Any, depth: int = 0) -> Any:
    """Return a JSON value unchanged. Raises TypeError for types that JSON changes or lacks, such as tuples and sets.

    Raises ValueError for integers that have too many digits to be read.
    """
    if depth > _DEEPEST:
        raise TypeError("the result is nested too deep")
    if type(value) is int and value.bit_length() > _MAX_BITS:
        raise ValueError("the result holds an integer of more than 4,300 digits")
    if type(value) in (str, int, bool) or value is None or (type(value) is float and math.isfinite(value)):
        return value
    if type(value) is list:
        return [_expect_json(item, depth + 1) for item in value]
    raise TypeError(f"the result holds a value of type {type(value).__name__}")


def _describe_error(error: BaseException) -> str:
    try:
        return f"{type(error).__name__}: {error}"[:_LONGEST_ERROR]
    except BaseException:
        return "an error that cannot be shown"
