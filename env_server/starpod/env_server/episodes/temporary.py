"""The temporary folder of this process. If the process is killed, the next server removes it."""

from __future__ import annotations

import atexit
import functools
import os
import shutil
import tempfile
from pathlib import Path

from starpod.serving.folders import make_locked_folder

PREFIX = "starpod-server-"
MAX_PARENT_BYTES = 64
"""Maximum bytes of the parent folder's path, because the path of a Unix socket in the folder may have only 107."""


@functools.cache
def own_folder() -> Path:
    """Return this process's folder, which is removed at exit. Forked children share it."""
    parent = Path(tempfile.gettempdir())
    if len(os.fsencode(parent)) > MAX_PARENT_BYTES:
        parent = Path("/tmp")
    folder = make_locked_folder(PREFIX, parent)
    atexit.register(_remove, folder, os.getpid())
    return folder


def _remove(folder: Path, process: int) -> None:
    if os.getpid() == process:  # not at the end of a forked child
        shutil.rmtree(folder, ignore_errors=True)
