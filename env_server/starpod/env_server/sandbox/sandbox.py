"""Rights that a process of class `process` gives up before it plays: files, network, processes, memory, privileges.

The environment is loaded and prepared first, with the server's rights. Everything it runs later, above all a model's
code, is confined. The report names every measure that the system lacks. In mode `best-effort`, the process starts
without these measures; in mode `require`, it does not start.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import resource
import signal
import struct
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from starpod.env_server.sandbox import landlock, namespaces, seccomp

MEBIBYTE = 2**20
MODES = ("require", "best-effort", "off")

_SET_NO_NEW_PRIVILEGES, _SET_PARENT_DEATH_SIGNAL = 38, 1
_MAX_THREADS = 64
_FIRST_USER, _FIRST_USER_OF_CONTAINER = 1_000_000_000, 10_000
"""A process gets the user id `_FIRST_USER` plus its process id, which no account and no other live process has.
Rootless containers often have no user ids above 65,536. There the ids begin at the second number and can repeat."""
_CAP_KILL = 5
_KEPT_VARIABLES = frozenset({"PATH", "LANG", "LC_ALL", "TZ", "HOME", "TMPDIR", "OMP_NUM_THREADS"})
_ITSELF = "/proc/self"
_SYSTEM_FILES = (
    *("/usr/lib", "/usr/lib64", "/usr/share/zoneinfo", "/lib", "/lib64", "/etc/ld.so.cache", "/etc/localtime"),
    *("/dev/urandom", "/dev/random", "/dev/zero", _ITSELF, "/proc/cpuinfo", "/sys/devices/system/cpu"),
)


@dataclass(frozen=True, slots=True)
class Sandbox:
    """Confinement of a process of class `process`."""

    mode: Literal["require", "best-effort", "off"] = "best-effort"
    """With `require`, the process does not start if a measure is missing. With `best-effort`, missing measures are only
    reported. With `off`, nothing is confined."""
    memory_bytes: int = 4096 * MEBIBYTE
    """Maximum address space, in addition to what the environment takes to start."""
    cpu_seconds: int = 3600
    """Maximum CPU seconds over the lifetime of the process."""
    open_files: int = 256
    """Maximum number of file descriptors."""
    libraries: bool = True
    """Whether the process may read the files of Python, the system and the environment, which imports need."""
    readable: tuple[str, ...] = ()
    """Additional paths that the process may read."""


UNTRUSTING = Sandbox()


OPTIONAL = frozenset({"names of files"})
"""Measures that `require` does not demand, because many containers allow no mounts. Describe reports them."""


@dataclass(slots=True)
class SandboxReport:
    """The applied and the missing measures of a confined process."""

    applied: list[str] = field(default_factory=list)
    """Names of the applied measures."""
    missing: dict[str, str] = field(default_factory=dict)
    """Why each missing measure was not applied, keyed by the measure's name."""

    @property
    def missing_measures(self) -> list[str]:
        """Missing measures that `require` demands."""
        return [text for name, text in zip(self.missing, self.reasons, strict=True) if name not in OPTIONAL]

    @property
    def reasons(self) -> list[str]:
        return [f"{name} ({problem})" for name, problem in self.missing.items()]

    def note(self, names: Sequence[str], problem: str) -> None:
        if problem:
            self.missing |= dict.fromkeys(names, problem)
        else:
            self.applied += names

    def __str__(self) -> str:
        return f"applied: {', '.join(self.applied) or 'nothing'}; missing: {', '.join(self.reasons) or 'nothing'}"


def close_inherited(keep: int) -> None:
    """Close every descriptor except `keep` and the standard ones, which are redirected to /dev/null."""
    null = os.open(os.devnull, os.O_RDWR)
    for descriptor in range(3):
        os.dup2(null, descriptor)
    os.closerange(3, keep)
    os.closerange(keep + 1, resource.getrlimit(resource.RLIMIT_NOFILE)[0])


def end_with_parent() -> None:
    """Let the kernel kill this process when its parent ends. A later change of the user id cancels this."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_SET_PARENT_DEATH_SIGNAL, signal.SIGKILL)


def confine(sandbox: Sandbox, module_file: str | None) -> SandboxReport:
    """Apply the sandbox to this process permanently. `module_file` is the environment's file."""
    report = SandboxReport()
    _scrub()
    report.note(["environment variables"], "")
    if sys.platform != "linux":
        _limit(sandbox, None)
        report.note(["memory", "CPU time", "descriptors", "file sizes"], "")
        protections = ("privileges", "files", "names of files", "signals", "network", "processes", "threads")
        report.note(protections, f"not on {sys.platform}")
        return report
    module_folders = [os.path.dirname(os.path.abspath(module_file))] if module_file else []
    libraries = [*_SYSTEM_FILES, *_python_paths(), *module_folders] if sandbox.libraries else [_ITSELF]
    readable_paths = [*libraries, *sandbox.readable]
    other_threads = len(os.listdir("/proc/self/task")) - 1
    thread_problem = f"{other_threads} threads that began before it" if other_threads else ""
    threads = _own_namespaces(report, [*readable_paths, os.devnull], thread_problem)
    own_user = _leave_root(report)
    _limit(sandbox, _MAX_THREADS if own_user or not threads else None)
    report.note(["memory", "CPU time", "descriptors", "file sizes"], "")
    report.note(["threads"], "" if own_user else threads)
    end_with_parent()
    if ctypes.CDLL(None).prctl(_SET_NO_NEW_PRIVILEGES, 1, 0, 0, 0) != 0:
        report.note(["files", "signals", "network", "processes"], "the system knows no PR_SET_NO_NEW_PRIVS")
        return report
    rights, problem = landlock.confine(readable_paths, [os.devnull])
    if not problem and thread_problem:
        rights, problem = [], thread_problem
    report.note(rights or ["files"], problem)
    filtered = ["network", "processes", "metadata of files"] + [name for name in ("signals",) if name not in rights]
    report.note(filtered, seccomp.confine())
    return report


def _own_namespaces(report: SandboxReport, paths: list[str], began: str) -> str:
    """Give the process its own root. Users other than root first need a user namespace, which also limits threads.

    Returns:
        The reason why no user namespace limits the threads, or "" if one does.
    """
    if os.geteuid() == 0:
        report.note(["names of files"], began or namespaces.own_root(paths))
        return "its user is root, who is not limited"
    problem = began or namespaces.own_user_namespace()
    report.note(["names of files"], problem or namespaces.own_root(paths))
    if not problem and not namespaces.counts_threads():
        return "this kernel counts those of all processes of a user together; Linux 5.14 does not"
    return problem and f"{problem}; a server of root with CAP_SETUID, CAP_SETGID and CAP_KILL needs none"


def _scrub() -> None:
    """Remove the server's environment variables, and overwrite the memory that /proc/PID/environ shows."""
    for name in set(os.environ) - _KEPT_VARIABLES:
        del os.environ[name]
    with contextlib.suppress(OSError, ValueError, IndexError):
        with open("/proc/self/stat") as file:
            fields = file.read().rpartition(")")[2].split()
        start, end = int(fields[47]), int(fields[48])
        os.environ.update(dict(os.environ))  # copy the strings before their original memory is overwritten
        if 0 < start < end:
            ctypes.memset(start, 0, end - start)


def _leave_root(report: SandboxReport) -> bool:
    """Drop all capabilities, and leave root if others can read Python's files. Return whether the user was changed."""
    own_user = False
    if os.geteuid() == 0:
        user = _free_user()
        if not _has_capability(_CAP_KILL):
            problem = "without CAP_KILL the server could not end it"
        else:
            problem = _problem_of_reading(user)
        if not problem:
            try:
                os.setgroups([])
                os.setresgid(user, user, user)
                os.setresuid(user, user, user)
                own_user = True
            except OSError as error:
                problem = str(error)
        report.note(["own user"], problem)
    empty_sets = struct.pack("<6I", 0, 0, 0, 0, 0, 0)
    header = struct.pack("<Ii", 0x20080522, 0)
    libc = ctypes.CDLL(None, use_errno=True)
    problem = "" if libc.capset(header, empty_sets) == 0 else os.strerror(ctypes.get_errno())
    report.note(["no capabilities"], problem)
    return own_user


def _free_user() -> int:
    user = _FIRST_USER + os.getpid()
    with open("/proc/self/uid_map") as file:
        *_, (first_user, _, count) = (map(int, line.split()) for line in file)
    if user < first_user + count:
        return user
    return _FIRST_USER_OF_CONTAINER + os.getpid() % max(1, first_user + count - _FIRST_USER_OF_CONTAINER)


def _has_capability(number: int) -> bool:
    with open("/proc/self/status") as file:
        effective = next(line.split()[1] for line in file if line.startswith("CapEff:"))
    return bool(int(effective, 16) >> number & 1)


def _problem_of_reading(user: int) -> str:
    """Return why `user` could not import further modules, or "" if it could."""
    folders = _python_paths()
    try:
        os.seteuid(user)
    except OSError as error:
        return f"user {user}: {error.strerror}"
    try:
        unreadable = [folder for folder in folders if not os.access(folder, os.R_OK | os.X_OK, effective_ids=True)]
    finally:
        os.seteuid(0)
    return f"other users cannot read {unreadable[0]}" if unreadable else ""


def _limit(sandbox: Sandbox, threads: int | None) -> None:
    if sys.platform == "linux":
        with open("/proc/self/statm") as file:
            used_bytes = int(file.read().split()[0]) * resource.getpagesize()
        _lower(resource.RLIMIT_AS, used_bytes + sandbox.memory_bytes)
    if threads is not None:
        _lower(resource.RLIMIT_NPROC, threads)  # counted per user, so only if no other process has the same user
    _lower(resource.RLIMIT_CPU, sandbox.cpu_seconds)
    _lower(resource.RLIMIT_NOFILE, sandbox.open_files)
    _lower(resource.RLIMIT_FSIZE, 0)
    _lower(resource.RLIMIT_CORE, 0)


def _lower(resource_limit: int, value: int) -> None:
    hard = resource.getrlimit(resource_limit)[1]
    value = value if hard == resource.RLIM_INFINITY else min(value, hard)
    resource.setrlimit(resource_limit, (value, value))


def _python_paths() -> list[str]:
    """Return the folders of modules, without the working folder, which may hold anything."""
    folders = {sys.prefix, sys.base_prefix, *(path for path in sys.path if os.path.isabs(path))}
    return sorted(folder for folder in folders if os.path.exists(folder) and folder not in ("/", os.getcwd()))
