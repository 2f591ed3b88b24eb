"""A core each for the client and for the server, so that neither is moved to and fro between them. Linux.

A process that the scheduler moves leaves its caches behind, and what it wakes on another core wakes late: left alone,
the same run differs by a fifth from one minute to the next.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

ALL = sorted(os.sched_getaffinity(0))
CLIENT, SERVER = {ALL[0]}, {ALL[-1]}


@contextmanager
def only(cores: set[int]) -> Iterator[None]:
    """Inside, this process runs on these cores alone, and so does what it starts, for as long as that lives."""
    _move(cores)
    try:
        yield
    finally:
        _move(set(ALL))


def _move(cores: set[int]) -> None:
    for thread in Path("/proc/self/task").iterdir():
        try:
            os.sched_setaffinity(int(thread.name), cores)
        except ProcessLookupError:
            continue  # it has ended
