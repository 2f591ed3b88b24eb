"""Atomic and append-only files of a folder of results, and its lock."""

from __future__ import annotations

import contextlib
import fcntl
import json
import math
import os
import platform
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any


class CannotWrite(OSError):
    """A file of the run could not be written. The message says which one, why, and what to do."""

    def __init__(self, path: Path, error: OSError) -> None:
        super().__init__(
            error.errno,
            f"cannot write {path}: {error.strerror or error}. Make room or fix the permissions",
        )
        self.path = path

    def __str__(self) -> str:
        return str(self.args[1])


_RELEASE_SECONDS = 2.0
"""Time that a lock is waited for. A program that a killed process was just starting holds its lock until it runs."""


class FolderLocked(Exception):
    """Another process writes in the folder. The message describes that process."""


@contextlib.contextmanager
def hold_lock(folder: Path) -> Iterator[None]:
    """Lock a folder against other writers. The lock of a killed process is released. Raises FolderLocked."""
    deadline = time.monotonic() + _RELEASE_SECONDS
    with open(folder / ".lock", "a+", encoding="utf-8") as file:
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                if time.monotonic() > deadline:
                    file.seek(0)
                    raise FolderLocked(file.read().strip() or "a process of unknown name") from None
                time.sleep(0.05)
                continue
            except OSError:
                pass  # some network file systems have no locks
            break
        file.truncate(0)
        file.write(f"process {os.getpid()} on {platform.node()}")
        file.flush()
        yield


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yield a temporary path, whose file replaces `path` at the end. Readers see the old file or the new one.

    Any OSError inside becomes CannotWrite.
    """
    temporary = path.with_name(f".{os.getpid()}.{path.name}")  # with the suffix, which determines compression
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary.unlink(missing_ok=True)  # a symlink that somebody left there is not followed
        yield temporary
        temporary.replace(path)
    except OSError as error:
        raise CannotWrite(path, error) from error
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink()


def write_atomic(path: Path, text: str) -> None:
    """Write a text that survives a crash of the machine, as `replacing` does. Raises CannotWrite."""
    with replacing(path) as temporary, temporary.open("x", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def to_json_line(value: Mapping[str, Any]) -> str:
    """Return one line of standard JSON. NaN and infinity become null, because standard JSON does not have them."""
    return json.dumps(_finite(value), allow_nan=False, separators=(", ", ": ")) + "\n"


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return value


def read_lines(path: Path) -> list[dict[str, Any]]:
    """Return the objects of a JSON-lines file; empty if it does not exist. An incomplete last line is skipped."""
    if not path.exists():
        return []
    lines = path.read_text(encoding="utf-8").split("\n")
    whole_lines = lines[:-1]  # the part after the last line break is empty or incomplete
    return [json.loads(line) for line in whole_lines if line]


def cut_after(path: Path, step: int) -> None:
    """Remove the lines of later steps and an incomplete last line, to continue the run from `step`."""
    if path.exists():
        whole_lines = [line for line in path.read_text(encoding="utf-8").split("\n")[:-1] if line]
        write_atomic(path, "".join(f"{line}\n" for line in whole_lines if json.loads(line)["step"] <= step))
