"""Run a program's function on arguments in a confined process, and compare the results."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from starpod.env_server import Unavailable, read_untrusted_json, run_confined

_RUNNER = str(Path(__file__).with_name("runner.py"))
_LIMITS = {
    "instructions": "it ran too many instructions",
    "uncounted": "it disturbed the count of its instructions, by sys.settrace or a recursion that is too deep",
    "memory": "it took too much memory",
    "time": "it took too long",
    "died": "it ended the process that it ran in",
}


class RunLimits(NamedTuple):
    """Limits of a program."""

    instructions: int = 1_000_000
    """Maximum number of Python instructions, for all calls together."""
    seconds: int = 4
    """Maximum CPU seconds."""
    megabytes: int = 256
    """Maximum memory in MiB."""


def prepare_runs() -> None:
    """Raise Unavailable if programs cannot be confined here."""
    try:
        run_confined(_RUNNER, json.dumps({"code": "", "function": "", "arguments": [], "instructions": 9}).encode())
    except (RuntimeError, OSError) as error:
        raise Unavailable(f"{error}; it needs Linux with Landlock or mounts, and seccomp") from error


def call_program(
    program: str, function: str, arguments: Sequence[Any], limits: RunLimits
) -> tuple[str, list[tuple[Any, Any]]]:
    """Run a program, and call its function with each list of arguments.

    The output of the process is not trusted. It contains only the results of the calls, and the process does not know
    the expected results.

    Returns:
        The error of the program as a whole ("" if none), and an error or value per call.
    """
    work = {"code": program, "function": function, "arguments": arguments, "instructions": limits.instructions}
    failures: list[tuple[Any, Any]] = [("failed", None)] * len(arguments)
    reply, cause = run_confined(
        _RUNNER, json.dumps(work).encode(), cpu_seconds=limits.seconds, memory_bytes=limits.megabytes * 2**20
    )
    if cause == "time":
        return _LIMITS["time"], failures
    try:
        output = read_untrusted_json(reply)
        if "limit" in output:
            return _LIMITS[output["limit"]], failures
        if "error" in output:
            return str(output["error"])[:200], failures
        results = [(result.get("error"), result.get("value")) for result in output["results"]]
    except (ValueError, TypeError, KeyError, AttributeError):
        return _LIMITS["died"], failures
    return ("", results) if len(results) == len(failures) else (_LIMITS["died"], failures)


def same_value(value: Any, truth: Any) -> bool:
    """Return whether two values are equal: 1 equals 1.0, but not True."""
    if isinstance(truth, list):
        return (
            isinstance(value, list)
            and len(value) == len(truth)
            and all(same_value(item, expected) for item, expected in zip(value, truth, strict=True))
        )
    return isinstance(value, bool) == isinstance(truth, bool) and bool(value == truth)
