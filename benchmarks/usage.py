"""What a stretch of a benchmark took: CPU time of this process and its descendants, bytes on the loopback. Linux."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from pathlib import Path

_TICKS = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True, slots=True)
class Usage:
    """own, descendants: seconds of CPU time. wire: bytes over the loopback in both directions, headers included, of
    everything on this machine."""

    own: float
    descendants: float
    wire: int

    @classmethod
    def now(cls) -> Usage:
        return cls(time.process_time(), sum(map(cpu_seconds, descendants(os.getpid()))), _loopback_bytes())

    def __sub__(self, before: Usage) -> Usage:
        return Usage(self.own - before.own, self.descendants - before.descendants, self.wire - before.wire)


def cpu_seconds(pid: int) -> float:
    """User and system time of a process and of its children that have ended, so far; 0 where it is gone."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0.0
    return sum(map(int, fields[11:15])) / _TICKS


def resident_bytes(pid: int) -> int:
    """The resident set of a process."""
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def descendants(pid: int) -> list[int]:
    """Children, their children and so on."""
    children: dict[int, list[int]] = {}
    for folder in Path("/proc").iterdir():
        if not folder.name.isdigit():
            continue
        try:
            fields = (folder / "stat").read_text().rpartition(")")[2].split()
        except OSError:
            continue
        children.setdefault(int(fields[1]), []).append(int(folder.name))
    found: list[int] = []
    waiting = [pid]
    while waiting:
        below = children.get(waiting.pop(), [])
        found += below
        waiting += below
    return found


def _loopback_bytes() -> int:
    for line in Path("/proc/net/dev").read_text().splitlines():
        name, _, counts = line.partition(":")
        if name.strip() == "lo":
            return int(counts.split()[0])
    return 0
