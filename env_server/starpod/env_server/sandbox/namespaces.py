"""Namespaces of a process's own: a root that holds nothing but what it may read, and a user that nobody shares.

Landlock refuses to open other files, but not to look at their names, sizes and times. In a root of its own they are not
there. Root needs no more than that; another user first takes a user namespace, which some systems do not allow.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import platform
import stat
import struct
from collections.abc import Iterable, Iterator

_NEW_MOUNTS, _NEW_USER = 0x00020000, 0x10000000
_PRIVATE, _RECURSIVE, _DETACH = 1 << 18, 1 << 14, 2
_OPEN_TREE, _MOVE_MOUNT, _MOUNT_SETATTR = 428, 429, 442  # the same on every architecture
_PIVOT_ROOT = {"x86_64": 155, "aarch64": 41}
_CLONE_TREE, _TREE_RECURSIVE, _EMPTY_PATH, _FROM_EMPTY_PATH = 1, 0x8000, 0x1000, 0x4
_READ_ONLY, _NO_SET_USER = 0x1, 0x2
_PER_USER_NAMESPACE = (5, 14)
"""Linux since when a namespace counts the threads of its users by itself."""
_WORKPLACES = ("/tmp", "/mnt", "/var", "/usr")


def own_user_namespace() -> str:
    """Moves this process into a user namespace in which it stays who it is; needs to be its only thread.

    Returns why it could not, or "".
    """
    libc = ctypes.CDLL(None, use_errno=True)
    user, group = os.geteuid(), os.getegid()
    try:
        _check(libc.unshare(_NEW_USER), "unshare")
        for name, line in (("setgroups", "deny"), ("uid_map", f"{user} {user} 1"), ("gid_map", f"{group} {group} 1")):
            with open(f"/proc/self/{name}", "w") as file:
                file.write(line)
    except OSError as error:
        return f"user namespace: {error.strerror}"
    return ""


def counts_threads() -> bool:
    """Whether RLIMIT_NPROC counts the threads of a user namespace alone."""
    major, minor = (int("".join(filter(str.isdigit, part)) or 0) for part in platform.release().split(".")[:2])
    return (major, minor) >= _PER_USER_NAMESPACE


def own_root(paths: Iterable[str]) -> str:
    """Gives this process a root with these files and folders alone, at their places, all read-only.

    Needs CAP_SYS_ADMIN in its user namespace. Returns why it could not, or "".
    """
    if platform.machine() not in _PIVOT_ROOT:
        return f"not on {platform.machine()}"
    libc = ctypes.CDLL(None, use_errno=True)
    try:
        _check(libc.unshare(_NEW_MOUNTS), "unshare")
        _check(libc.mount(None, b"/", None, _RECURSIVE | _PRIVATE, None), "mount")
        with contextlib.ExitStack() as stack:
            # Before anything is mounted over them.
            trees = [(path, stack.enter_context(_tree(libc, path))) for path in _outermost(paths)]
            place = next(place for place in _WORKPLACES if os.path.isdir(place))
            _check(libc.mount(b"tmpfs", place.encode(), b"tmpfs", 0, b"mode=755,size=1m"), "mount")
            for path, tree in trees:
                _make(place + path, os.fstat(tree).st_mode)
                target = os.fsencode(place + path)
                _check(libc.syscall(_MOVE_MOUNT, tree, b"", -100, target, _FROM_EMPTY_PATH), f"mount {path}")
        os.chdir(place)
        attributes = struct.pack("<QQQQ", _READ_ONLY | _NO_SET_USER, 0, 0, 0)
        _check(libc.syscall(_MOUNT_SETATTR, -100, b".", _TREE_RECURSIVE, attributes, 32), "mount_setattr")
        _check(libc.syscall(_PIVOT_ROOT[platform.machine()], b".", b"."), "pivot_root")
        _check(libc.umount2(b".", _DETACH), "umount")
        os.chdir("/")
    except OSError as error:
        return f"{error.filename or 'mount'}: {error.strerror}"
    return ""


def _outermost(paths: Iterable[str]) -> list[str]:
    """Those that exist and are in no other, each once."""
    kept: list[str] = []
    for path in sorted({os.path.normpath(path) for path in paths if os.path.exists(path)}):
        if not any(path.startswith(f"{other}/") for other in kept):
            kept.append(path)
    return kept


@contextlib.contextmanager
def _tree(libc: ctypes.CDLL, path: str) -> Iterator[int]:
    """A descriptor of what is mounted at a path and below it."""
    flags = _CLONE_TREE | _TREE_RECURSIVE | os.O_CLOEXEC
    tree = libc.syscall(_OPEN_TREE, -100, os.fsencode(path), flags)
    _check(tree, f"open_tree {path}")
    try:
        yield tree
    finally:
        os.close(tree)


def _make(path: str, mode: int) -> None:
    """What is mounted on: a folder or a file, empty, and the folders above it."""
    if stat.S_ISDIR(mode):
        os.makedirs(path, exist_ok=True)
    else:
        os.makedirs(os.path.dirname(path), exist_ok=True)
        os.close(os.open(path, os.O_CREAT | os.O_WRONLY, 0o644))


def _check(result: int, what: str) -> None:
    if result < 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code), what)
