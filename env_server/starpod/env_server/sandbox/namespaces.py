"""Linux namespaces for a process: a root with only the files that it may read, and a user that no other process has.

Landlock prevents opening other files, but not reading their names, sizes and times. In a separate root they do not
exist. The root user needs only a mount namespace. Other users first need a user namespace, which some systems forbid.
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
"""First Linux version in which each user namespace counts its threads separately."""
_WORKPLACES = ("/tmp", "/mnt", "/var", "/usr")


def own_user_namespace() -> str:
    """Move this process into a user namespace with its user id unchanged. The process must have only one thread.

    Returns:
        "" if it succeeded, otherwise the reason why not.
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
    """Return whether RLIMIT_NPROC counts only the threads of a user namespace."""
    major, minor = (int("".join(filter(str.isdigit, part)) or 0) for part in platform.release().split(".")[:2])
    return (major, minor) >= _PER_USER_NAMESPACE


def own_root(paths: Iterable[str]) -> str:
    """Give this process a root that holds only these files and folders, at their paths, read-only.

    The process needs CAP_SYS_ADMIN in its user namespace.

    Returns:
        "" if it succeeded, otherwise the reason why not.
    """
    if platform.machine() not in _PIVOT_ROOT:
        return f"not on {platform.machine()}"
    libc = ctypes.CDLL(None, use_errno=True)
    try:
        _check(libc.unshare(_NEW_MOUNTS), "unshare")
        _check(libc.mount(None, b"/", None, _RECURSIVE | _PRIVATE, None), "mount")
        with contextlib.ExitStack() as stack:
            # Open the trees before anything is mounted over them.
            trees = [(path, stack.enter_context(_tree(libc, path))) for path in _outermost(paths)]
            new_root = next(path for path in _WORKPLACES if os.path.isdir(path))
            _check(libc.mount(b"tmpfs", new_root.encode(), b"tmpfs", 0, b"mode=755,size=1m"), "mount")
            for path, tree in trees:
                _make(new_root + path, os.fstat(tree).st_mode)
                target = os.fsencode(new_root + path)
                _check(libc.syscall(_MOVE_MOUNT, tree, b"", -100, target, _FROM_EMPTY_PATH), f"mount {path}")
        os.chdir(new_root)
        attributes = struct.pack("<QQQQ", _READ_ONLY | _NO_SET_USER, 0, 0, 0)
        _check(libc.syscall(_MOUNT_SETATTR, -100, b".", _TREE_RECURSIVE, attributes, 32), "mount_setattr")
        _check(libc.syscall(_PIVOT_ROOT[platform.machine()], b".", b"."), "pivot_root")
        _check(libc.umount2(b".", _DETACH), "umount")
        os.chdir("/")
    except OSError as error:
        return f"{error.filename or 'mount'}: {error.strerror}"
    return ""


def _outermost(paths: Iterable[str]) -> list[str]:
    """Return the existing paths without duplicates and without paths inside others."""
    outermost: list[str] = []
    for path in sorted({os.path.normpath(path) for path in paths if os.path.exists(path)}):
        if not any(path.startswith(f"{folder}/") for folder in outermost):
            outermost.append(path)
    return outermost


@contextlib.contextmanager
def _tree(libc: ctypes.CDLL, path: str) -> Iterator[int]:
    """Yield a descriptor of the mounts at a path and below it."""
    flags = _CLONE_TREE | _TREE_RECURSIVE | os.O_CLOEXEC
    tree = libc.syscall(_OPEN_TREE, -100, os.fsencode(path), flags)
    _check(tree, f"open_tree {path}")
    try:
        yield tree
    finally:
        os.close(tree)


def _make(path: str, mode: int) -> None:
    """Create an empty folder or file as a mount point, and its parent folders."""
    if stat.S_ISDIR(mode):
        os.makedirs(path, exist_ok=True)
    else:
        os.makedirs(os.path.dirname(path), exist_ok=True)
        os.close(os.open(path, os.O_CREAT | os.O_WRONLY, 0o644))


def _check(result: int, what: str) -> None:
    if result < 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code), what)
