"""A seccomp filter in the kernel's own language: no sockets, no processes, no reach into others. Linux alone.

The filter is a short BPF program over the number and the arguments of each system call (seccomp(2)). What is refused
fails with EPERM, so that a program that tries can go on. On an architecture without a table there is no filter.
"""

from __future__ import annotations

import ctypes
import os
import platform
import struct

_SET_MODE_FILTER, _ALL_THREADS = 1, 1
_LOAD, _EQUAL, _AT_LEAST, _ANY_BIT, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
_ALLOW, _REFUSE, _ABSENT, _KILL = 0x7FFF0000, 0x00050000 | 1, 0x00050000 | 38, 0x80000000
_NUMBER, _ARCHITECTURE, _FIRST_ARGUMENT = 0, 4, 16
_NEW_THREAD = 0x00010000

_ARCHITECTURES = {"x86_64": (0xC000003E, 0), "aarch64": (0xC00000B7, 1)}
# Name: number on x86_64, on aarch64 (-1: it has none).
_REFUSED = {
    # Sockets, and io_uring, which can make them without a call.
    "socket": (41, 198),
    "connect": (42, 203),
    "bind": (49, 200),
    "listen": (50, 201),
    "accept": (43, 202),
    "accept4": (288, 242),
    "io_uring_setup": (425, 425),
    # Processes and programs; threads are `clone` with a flag.
    "fork": (57, -1),
    "vfork": (58, -1),
    "execve": (59, 221),
    "execveat": (322, 281),
    # Other processes: their memory, their files, their signals, their priority.
    "ptrace": (101, 117),
    "process_vm_readv": (310, 270),
    "process_vm_writev": (311, 271),
    "kcmp": (312, 272),
    "process_madvise": (440, 440),
    "pidfd_open": (434, 434),
    "pidfd_send_signal": (424, 424),
    "pidfd_getfd": (438, 438),
    "rt_sigqueueinfo": (129, 138),
    "rt_tgsigqueueinfo": (297, 240),
    "setpriority": (141, 140),
    "sched_setscheduler": (144, 119),
    "sched_setattr": (314, 274),
    "sched_setparam": (142, 118),
    "ioprio_set": (251, 30),
    "tkill": (200, 130),
    # What outlives the process: System V memory, queues and semaphores; keys.
    "shmget": (29, 194),
    "msgget": (68, 186),
    "semget": (64, 190),
    "mq_open": (240, 180),
    "keyctl": (250, 219),
    "add_key": (248, 217),
    "request_key": (249, 218),
    # The machine: mounts, name spaces, modules, clocks, tracing.
    "mount": (165, 40),
    "umount2": (166, 39),
    "move_mount": (429, 429),
    "open_tree": (428, 428),
    "fsopen": (430, 430),
    "fsmount": (432, 432),
    "fspick": (433, 433),
    "mount_setattr": (442, 442),
    "unshare": (272, 97),
    "setns": (308, 268),
    "pivot_root": (155, 41),
    "chroot": (161, 51),
    "init_module": (175, 105),
    "finit_module": (313, 273),
    "delete_module": (176, 106),
    "kexec_load": (246, 104),
    "kexec_file_load": (320, 294),
    "reboot": (169, 142),
    "swapon": (167, 224),
    "swapoff": (168, 225),
    "acct": (163, 89),
    "quotactl": (179, 60),
    "open_by_handle_at": (304, 265),
    "syslog": (103, 116),
    "settimeofday": (164, 170),
    "clock_settime": (227, 112),
    "clock_adjtime": (305, 266),
    "adjtimex": (159, 171),
    "sethostname": (170, 161),
    "setdomainname": (171, 162),
    "personality": (135, 92),
    "bpf": (321, 280),
    "perf_event_open": (298, 241),
    "userfaultfd": (323, 282),
    "fanotify_init": (300, 262),
}
_CLONE, _CLONE3 = (56, 220), (435, 435)
_ON_ITSELF = {"kill": (62, 129), "tgkill": (234, 131), "prlimit64": (302, 261)}
_SECCOMP = (317, 277)


def confine() -> str:
    """Puts the filter on all threads of this process, for good; needs PR_SET_NO_NEW_PRIVS. Why it could not, or ""."""
    machine = platform.machine()
    if machine not in _ARCHITECTURES:
        return f"there is no filter for {machine}"
    architecture, column = _ARCHITECTURES[machine]
    program = _program(architecture, column, os.getpid())
    instructions = ctypes.create_string_buffer(program, len(program))
    header = ctypes.create_string_buffer(struct.pack("@HP", len(program) // 8, ctypes.addressof(instructions)))
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.syscall(_SECCOMP[column], _SET_MODE_FILTER, _ALL_THREADS, header) != 0:
        return f"seccomp: {os.strerror(ctypes.get_errno())}"
    return ""


def _program(architecture: int, column: int, pid: int) -> bytes:
    code = [
        (_LOAD, 0, 0, _ARCHITECTURE),
        (_EQUAL, 1, 0, architecture),
        (_RETURN, 0, 0, _KILL),
        (_LOAD, 0, 0, _NUMBER),
    ]
    if column == 0:
        code += [(_AT_LEAST, 0, 1, 0x40000000), (_RETURN, 0, 0, _REFUSE)]  # the x32 numbers of the same calls
    for numbers in _REFUSED.values():
        if numbers[column] >= 0:
            code += [(_EQUAL, 0, 1, numbers[column]), (_RETURN, 0, 0, _REFUSE)]
    # Its flags are behind a pointer: libraries that are told that it is absent use clone, whose flags can be seen.
    code += [(_EQUAL, 0, 1, _CLONE3[column]), (_RETURN, 0, 0, _ABSENT)]
    code += [
        (_EQUAL, 0, 4, _CLONE[column]),
        (_LOAD, 0, 0, _FIRST_ARGUMENT),
        (_ANY_BIT, 0, 1, _NEW_THREAD),
        (_RETURN, 0, 0, _ALLOW),
        (_RETURN, 0, 0, _REFUSE),
    ]
    for numbers in _ON_ITSELF.values():
        code += [
            (_EQUAL, 0, 5, numbers[column]),
            (_LOAD, 0, 0, _FIRST_ARGUMENT),
            (_EQUAL, 1, 0, pid),
            (_EQUAL, 0, 1, 0 if numbers is _ON_ITSELF["prlimit64"] else pid),
            (_RETURN, 0, 0, _ALLOW),
            (_RETURN, 0, 0, _REFUSE),
        ]
    code.append((_RETURN, 0, 0, _ALLOW))
    return b"".join(struct.pack("<HBBI", *instruction) for instruction in code)
