"""The temporary folder of this process. If the process is killed, the next server removes it."""

from __future__ import annotations

import atexit
import contextlib
import fcntl
import functools
import os
import shutil
import tempfile
import time
from pathlib import Path

PREFIX = "starpod-server-"
MAX_PARENT_BYTES = 64
"""Longest name of the parent folder. The path of a Unix socket in the folder may have 107 bytes."""
LOCKED_WITHIN_SECONDS = 60.0
"""A younger folder without a lock may belong to a process that is about to lock it."""


@functools.cache
def own_folder() -> Path:
    """Return this process's folder, which is removed at exit. Folders of killed processes are removed first.

    A lock on the folder shows that its process is alive. Forked children share the folder and the lock.
    """
    parent = Path(tempfile.gettempdir())
    if len(os.fsencode(parent)) > MAX_PARENT_BYTES:
        parent = Path("/tmp")
    remove_left_over(parent)
    folder = Path(tempfile.mkdtemp(prefix=PREFIX, dir=parent))
    _lock(folder)  # held until this process ends
    atexit.register(_remove, folder, os.getpid())
    return folder


def remove_left_over(parent: Path) -> None:
    """Remove this user's folders in `parent` whose processes have ended."""
    for folder in parent.glob(f"{PREFIX}*"):
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


def _remove(folder: Path, process: int) -> None:
    if os.getpid() == process:  # not at the end of a forked child
        shutil.rmtree(folder, ignore_errors=True)
