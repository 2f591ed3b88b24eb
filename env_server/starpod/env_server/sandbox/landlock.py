"""Landlock, with which a process of any user gives up access to all but some files. It requires Linux 5.13 or later."""

from __future__ import annotations

import contextlib
import ctypes
import os
import stat
import struct
from collections.abc import Iterable

_CREATE, _ADD_RULE, _RESTRICT_SELF = 444, 445, 446  # the same on every architecture
_GET_VERSION, _PATH_BENEATH = 1, 1
_WRITE_FILE, _READ_FILE, _READ_DIRECTORY = 1 << 1, 1 << 2, 1 << 3
# Rights on files that each version of the interface knows. All except the granted rights are given up.
_RIGHTS = {1: 13, 2: 14, 3: 15, 4: 15, 5: 16}
_NETWORK, _SCOPES = 0b11, 0b11  # TCP bind and connect; abstract sockets and signals


def confine(readable: Iterable[str], writable: Iterable[str] = ()) -> tuple[list[str], str]:
    """Restrict this thread, and everything that it starts, to these paths and everything below them.

    PR_SET_NO_NEW_PRIVS must be set.

    Args:
        readable: files and folders that may be read.
        writable: files that may be read and written.

    Returns:
        The names of the rights given up, and an error message, which is "" if this succeeded.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    version = libc.syscall(_CREATE, None, ctypes.c_size_t(0), _GET_VERSION)
    if version < 1:
        return [], f"Landlock: {os.strerror(ctypes.get_errno())}"
    rights = (1 << _RIGHTS.get(version, 16)) - 1
    attributes = struct.pack("<QQQ", rights, _NETWORK if version >= 4 else 0, _SCOPES if version >= 6 else 0)
    size = 24 if version >= 6 else 16 if version >= 4 else 8
    ruleset = libc.syscall(_CREATE, attributes, ctypes.c_size_t(size), 0)
    if ruleset < 0:
        return [], f"Landlock: {os.strerror(ctypes.get_errno())}"
    try:
        for allowed, paths in ((_READ_FILE | _READ_DIRECTORY, readable), (_WRITE_FILE | _READ_FILE, writable)):
            for path in paths:
                _allow(libc, ruleset, path, allowed)
        if libc.syscall(_RESTRICT_SELF, ruleset, 0) != 0:
            return [], f"Landlock: {os.strerror(ctypes.get_errno())}"
    finally:
        os.close(ruleset)
    return ["files", "signals"] if version >= 6 else ["files"], ""


def _allow(libc: ctypes.CDLL, ruleset: int, path: str, allowed: int) -> None:
    with contextlib.suppress(OSError):  # a path that does not exist need not be allowed
        descriptor = os.open(path, os.O_PATH | os.O_CLOEXEC)
        try:
            if not stat.S_ISDIR(os.fstat(descriptor).st_mode):
                allowed &= ~_READ_DIRECTORY
            libc.syscall(_ADD_RULE, ruleset, _PATH_BENEATH, struct.pack("<Qi", allowed, descriptor), 0)
        finally:
            os.close(descriptor)
