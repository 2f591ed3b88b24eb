"""Runs a program on arguments, in a confined process. It knows no answers: those stay with the environment.

Loaded by its path, alone, before the process gives up all files: everything that a program may import is imported here.

A trace function counts the program's instructions. What would take it away, run code beside it (profilers, audit hooks,
threads) or reach a frame is refused by an audit hook. This makes it hard to run uncounted, and is no sandbox: the bound
that holds is the CPU time of the process.
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
"""What programs import."""

_LONGEST_ERROR = 200
_DEEPEST = 60
_REFUSED = frozenset(
    {
        *("sys.settrace", "sys.setprofile", "sys.addaudithook", "sys.monitoring.register_callback"),
        *("sys._getframe", "sys._current_frames", "sys._current_exceptions"),
        *("gc.get_objects", "gc.get_referrers", "gc.get_referents"),
        *("_thread.start_new_thread", "_thread.start_joinable_thread", "cpython.PyInterpreterState_New"),
    }
)
"""Audit events of what would reach the trace function, or run code that it does not see."""
_FRAMES = ("tb_frame", "gi_frame", "cr_frame", "ag_frame")
"""Attributes that are frames, of whose instructions `f_trace` decides."""


_PID = 2
_EPOCH = 1_000_000_000
"""Seconds since 1970 at which a program's clock begins."""
_TICK = 1_000_000
"""Nanoseconds that pass whenever a program looks at the clock."""
_HIDDEN = ("_datetime", "_random", "_uuid", "multiprocessing", "resource", "secrets", "uuid")
"""Modules that a program cannot import, since what they give differs from process to process."""


def main(work: bytes, reply: Callable[[bytes], NoReturn]) -> None:
    """Defines the program and calls its function on each list of arguments.

    work: JSON with `code`, `function`, `arguments` and `instructions`: how many of Python all may run together. Replies
    JSON: `results`, each with a `value` or an `error`; or `error` where the program could not be defined, or `limit`.
    """
    task = json.loads(work)
    limits = {name: json.dumps({"limit": name}).encode() for name in ("instructions", "uncounted", "memory")}
    settrace, gettrace, write, leave = sys.settrace, sys.gettrace, os.write, os._exit
    left = itertools.repeat(None, task["instructions"])
    armed = tampered = False

    def finish(data: bytes) -> NoReturn:
        nonlocal armed
        armed = False
        settrace(None)
        os.write, os._exit = write, leave  # the program may have put its own in their place
        reply(data)

    def exhausted() -> NoReturn:
        finish(limits["instructions"])

    # sys.gettrace hands these two out. What they use stands in their defaults, which audit() guards: cells and globals
    # can be written by anybody who holds a function.
    def count(
        frame: FrameType, event: str, argument: object, *, take: Any = left.__next__, end: Any = exhausted
    ) -> None:
        try:
            take()
        except StopIteration:
            end()

    def enter(frame: FrameType, event: str, argument: object, *, count: Any = count) -> Any:
        frame.f_trace = count  # before the others: Python 3.13 asks whose instructions to trace when they are set
        frame.f_trace_lines, frame.f_trace_opcodes = False, True
        count(frame, event, argument)
        return count

    def audit(event: str, arguments: Any) -> None:
        if not armed:
            return
        reaches = event in refused or event.startswith("ctypes.")
        if event.startswith("object.__"):  # a guarded attribute of arguments[0] is read or written
            ours = arguments[0] is count or arguments[0] is enter
            reaches = ours or (event == "object.__getattr__" and arguments[1] in frames)
        if reaches:
            refuse(event)

    def refuse(event: str) -> NoReturn:
        # Python drops a trace function that fails, and asks audit() first. Where it failed because the recursion is too
        # deep, this one, as many calls deep, fails in the same way: the program gets that error, and is counted on.
        nonlocal tampered
        error = ValueError(f"{event} is out of a program's reach")  # libraries that look for frames can do without
        tampered = tampered or event == "sys.settrace"
        raise error

    def check() -> None:
        """Ends a program that may have run uncounted."""
        if tampered or gettrace() is not enter:
            finish(limits["uncounted"])

    _repeat_each_time()
    namespace: dict[str, Any] = {"__name__": "solution"}
    refused, frames = _REFUSED, _FRAMES
    sys.setrecursionlimit = _raise_recursion_limit
    # Python 3.11 has no event for them.
    _thread.start_new_thread = _thread.start_new = threading._start_new_thread = _no_thread  # type: ignore[attr-defined]
    sys.addaudithook(audit)
    sys._getframe().f_trace_opcodes = True  # Python 3.12 traces instructions if any frame wanted that by now
    settrace(enter)  # until the end: a program has code that runs when its values are read, written and freed
    armed = True
    try:
        exec(compile(task["code"], "solution", "exec"), namespace)
        function = namespace[task["function"]]
    except MemoryError:
        finish(limits["memory"])
    except BaseException as error:
        check()
        finish(json.dumps({"error": _tell(error)}).encode())
    results: list[dict[str, Any]] = []
    for arguments in task["arguments"]:
        try:
            results.append({"value": _plain(function(*arguments))})
        except MemoryError:
            finish(limits["memory"])
        except BaseException as error:
            results.append({"error": _tell(error)})
    data = json.dumps({"results": results}).encode()
    check()
    finish(data)


def _repeat_each_time() -> None:
    """Gives a program the same clock, process id and random numbers in every process.

    Addresses in memory (`id`, and how plain objects show themselves), facts about the machine and what has been
    computed so far (`gc`, `sys`) stay as they are.
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
        fixed: dict[str, Any] = {
            "getpid": lambda: _PID,
            "getppid": lambda: 1,
            "urandom": numbers.randbytes,
            "getrandom": lambda size, flags=0: numbers.randbytes(size),
            "times": lambda: os.times_result((0.0,) * 5),
            "getloadavg": lambda: (0.0, 0.0, 0.0),
        }
        vars(module).update(fixed)
    threading.get_native_id = _thread.get_native_id = lambda: _PID
    threading.main_thread()._native_id = _PID  # type: ignore[attr-defined]
    for name in list(sys.modules):
        if name.partition(".")[0] in _HIDDEN:
            sys.modules[name] = None  # type: ignore[assignment]


class _Datetime(datetime.datetime):
    """A datetime that takes its `now` from the clock of `time`."""

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
    """In place of sys.setrecursionlimit: with less than the usual limit the trace function would fail in any frame."""
    to(max(limit, least))


def _no_thread(*_: Any, **__: Any) -> NoReturn:
    raise ValueError("threads are out of a program's reach")


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
