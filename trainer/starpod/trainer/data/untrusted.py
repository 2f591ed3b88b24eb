"""Bounded reading of untrusted files, such as those in a run's folder.

A damaged or hostile file must not exhaust the reader's memory or crash it. Examples are a symlink, a pipe without a
writer, a compressed file that expands to gigabytes, and brackets nested a thousand deep.
"""

from __future__ import annotations

import errno
import gzip
import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any, cast

from starpod.v1.untrusted import read_untrusted_json

MAX_LINE = 32 * 2**20
"""Maximum size in bytes of a line of JSON, such as an episode with its pictures."""
MAX_TEXT = 2**30
"""Maximum size in bytes of a file of lines, after decompression."""


class BadData(ValueError):
    """The data is not what its file should contain. The message says what is wrong."""


def open_regular(path: Path | str) -> IO[bytes]:
    """Open a file to read its bytes. Raises OSError also for a link, a pipe, a device or a folder."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "not a regular file", str(path))
    return os.fdopen(descriptor, "rb")


def read_bytes(path: Path, max_bytes: int) -> bytes:
    """Return a file's bytes. Raises OSError like `open_regular`, and BadData for more than `max_bytes`."""
    with open_regular(path) as file:
        data = file.read(max_bytes + 1)
    if len(data) > max_bytes:
        raise BadData(f"it is larger than {max_bytes // 2**20} MiB")
    return data


def open_text(path: Path | str) -> IO[bytes]:
    """Open a file of lines, decompressed if its name ends in .gz. Raises OSError like `open_regular`."""
    file = open_regular(path)
    return cast(IO[bytes], gzip.GzipFile(fileobj=file)) if str(path).endswith(".gz") else file


def read_lines(file: IO[bytes]) -> Iterator[bytes]:
    """Yield the lines of an open file. Raises BadData beyond MAX_LINE for one line or MAX_TEXT for all."""
    total = 0
    while line := file.readline(MAX_LINE + 1):
        total += len(line)
        if len(line) > MAX_LINE:
            raise BadData(f"a line is longer than {MAX_LINE // 2**20} MiB")
        if total > MAX_TEXT:
            raise BadData(f"its lines are longer than {MAX_TEXT // 2**20} MiB together")
        yield line


def read_json(data: bytes | str) -> Any:
    """Return the value of a JSON text; see `read_untrusted_json`. Raises BadData if it is not JSON."""
    try:
        return read_untrusted_json(data)
    except ValueError as error:
        raise BadData(f"it is not JSON: {error}") from None
