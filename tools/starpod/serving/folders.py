"""Temporary folders that are locked by the process that uses them. The next process removes those of killed ones."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
import time
from pathlib import Path

LOCKED_WITHIN_SECONDS = 60.0
"""A younger folder without a lock may belong to a process that is about to lock it."""


def make_locked_folder(prefix: str, parent: Path, *, survives_exec: bool = False) -> Path:
    """Create a folder that is locked until this process ends, and remove those of killed processes.

    Forked children share the lock.

    Args:
        prefix: beginning of the folder's name; folders with the same prefix are removed if nobody locks them.
        parent: existing folder in which the new one is created.
        survives_exec: keep the lock if this process runs another program.
    """
    remove_left_over(prefix, parent)
    folder = Path(tempfile.mkdtemp(prefix=prefix, dir=parent))
    os.set_inheritable(_lock(folder), survives_exec)
    return folder


def remove_left_over(prefix: str, parent: Path) -> None:
    """Remove this user's folders in `parent` whose names have the prefix and whose processes have ended."""
    for folder in parent.glob(f"{prefix}*"):
        with contextlib.suppress(OSError):
            status = folder.lstat()
            if status.st_uid == os.getuid() and time.time() - status.st_mtime > LOCKED_WITHIN_SECONDS:
                os.close(_lock(folder))
                shutil.rmtree(folder)


def _lock(folder: Path) -> int:
    """Lock the folder and return the descriptor that holds the lock. Raises OSError if another process holds it."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_NOFOLLOW | os.O_DIRECTORY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(descriptor)
        raise
    return descriptor
