"""Facts about the machine of a benchmark: its description, CPU time and memory of processes, loopback bytes, cores.

Everything but `machine` requires Linux.
"""

from __future__ import annotations

import os
import platform
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

PACKAGES = ("starpod", "grpcio", "protobuf", "openenv", "uvicorn", "websockets", "dm-env-rpc", "ray", "gymnasium")
_TICKS = os.sysconf("SC_CLK_TCK")
ALL_CORES = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
CLIENT_CORE, SERVER_CORE = set(ALL_CORES[:1]), set(ALL_CORES[-1:])
"""One core for the client, and another one for the server."""


@contextmanager
def child_process(command: Sequence[str], **settings: Any) -> Iterator[subprocess.Popen[str]]:
    """Run a program while the context lasts. A program that is still running at its end is killed."""
    with subprocess.Popen(command, text=True, **settings) as process:
        try:
            yield process
        finally:
            process.kill()


def machine() -> dict[str, Any]:
    """Return the machine's description and the versions of the measured packages."""
    versions = {}
    for package in PACKAGES:
        try:
            versions[package] = version(package)
        except PackageNotFoundError:
            continue
    return {
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "processor": _processor(),
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        "versions": versions,
    }


def origin() -> dict[str, Any]:
    """Return the first keys of a result file: the command, the commit and the machine that produced it.

    The commit ends in -dirty if files have changed outside docs, where results are written. It is empty outside a
    checkout.
    """
    spec = sys.modules["__main__"].__spec__
    program = ["python", "-m", spec.name.removesuffix(".__main__")] if spec is not None else sys.argv[:1]
    return {
        "command": shlex.join([*program, *sys.argv[1:]]),
        "commit": _commit(),
        "machine": machine(),
    }


def _commit() -> str:
    git = ["git", "-C", str(Path(__file__).resolve().parents[1])]
    if shutil.which("git") is None:
        return ""
    process = subprocess.run([*git, "rev-parse", "--short", "HEAD"], capture_output=True, text=True)
    if process.returncode:
        return ""
    status = subprocess.run([*git, "diff", "--quiet", "HEAD", "--", ".", ":!docs"], capture_output=True).returncode
    return process.stdout.strip() + "-dirty" * bool(status)


@dataclass(frozen=True, slots=True)
class Usage:
    """Resources used so far: CPU seconds of this process (own) and its descendants, and loopback bytes (wire).

    The whole machine's bytes in both directions count, including headers.
    """

    own: float
    descendants: float
    wire: int

    @classmethod
    def now(cls) -> Usage:
        return cls(time.process_time(), sum(map(cpu_seconds, descendants(os.getpid()))), _loopback_bytes())

    def __sub__(self, before: Usage) -> Usage:
        return Usage(self.own - before.own, self.descendants - before.descendants, self.wire - before.wire)


def cpu_seconds(pid: int) -> float:
    """Return user and system time of a process and of its children that have ended; 0 if it is gone."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0.0
    return sum(map(int, fields[11:15])) / _TICKS


def resident_bytes(pid: int) -> int:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def descendants(pid: int) -> list[int]:
    """Return the ids of all child processes, their children and so on."""
    children: dict[int, list[int]] = {}
    for folder in Path("/proc").iterdir():
        if not folder.name.isdigit():
            continue
        try:
            fields = (folder / "stat").read_text().rpartition(")")[2].split()
        except OSError:
            continue
        children.setdefault(int(fields[1]), []).append(int(folder.name))
    pids: list[int] = []
    queue = [pid]
    while queue:
        child_pids = children.get(queue.pop(), [])
        pids += child_pids
        queue += child_pids
    return pids


def _loopback_bytes() -> int:
    for line in Path("/proc/net/dev").read_text().splitlines():
        name, _, counts = line.partition(":")
        if name.strip() == "lo":
            return int(counts.split()[0])
    return 0


@contextmanager
def only_on(cores: set[int]) -> Iterator[None]:
    """Pin this process to these cores within the context. Processes started within it stay pinned.

    Without pinning, the same run differs by a fifth from one minute to the next, because a process that the scheduler
    moves loses its caches, and wake-ups across cores are slow.
    """
    _move_to(cores)
    try:
        yield
    finally:
        _move_to(set(ALL_CORES))


def _move_to(cores: set[int]) -> None:
    for thread in Path("/proc/self/task").iterdir():
        try:
            os.sched_setaffinity(int(thread.name), cores)
        except ProcessLookupError:
            continue  # it has ended


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine())


def peak_bytes(pid: int | str = "self") -> int:
    """Return the largest resident set of a process so far; 0 if it is gone.

    The maximum of `getrusage` is not used, because a process inherits it from its parent.
    """
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM")), 0)
