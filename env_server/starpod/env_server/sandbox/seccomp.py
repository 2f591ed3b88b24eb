"""A seccomp filter against sockets, processes, access to other processes, and changes of file metadata. Linux only.

The filter is a short BPF program on the number and arguments of each system call (seccomp(2)). Refused calls fail with
EPERM, so the program can continue. Architectures without a table get no filter.
"""

from __future__ import annotations

import ctypes
import os
import platform
import struct

_SET_MODE_FILTER, _ALL_THREADS = 1, 1
_LOAD, _EQUAL, _AT_LEAST, _ANY_BIT, _AND, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x54, 0x06
_ALLOW, _REFUSE, _ABSENT, _KILL = 0x7FFF0000, 0x00050000 | 1, 0x00050000 | 38, 0x80000000
_NUMBER, _ARCHITECTURE = 0, 4
_ARGUMENTS = (16, 24, 32)
"""Offsets of the lower 32 bits of the first three arguments. The upper bits matter for none of the values that are
checked below."""
_NEW_THREAD = 0x00010000
_X32 = 0x40000000
_NEXT_NUMBER = 470
"""First system call number that Linux 6.18 does not use. From this number on, calls fail as if they did not exist,
until the calls of later kernels have been reviewed."""

_ARCHITECTURES = {"x86_64": (0xC000003E, 0), "aarch64": (0xC00000B7, 1)}
# Number of each call on x86_64 and on aarch64 (-1: it does not exist there).
_REFUSED = {
    # Sockets, and io_uring, which can create them without a system call.
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
    # Access to other processes: memory, files, signals, priority.
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
    # Objects that outlive the process: System V memory, queues and semaphores; keys. Those of other processes can be
    # used by their ids, without the calls that open them.
    "shmget": (29, 194),
    "shmat": (30, 196),
    "shmctl": (31, 195),
    "msgget": (68, 186),
    "msgsnd": (69, 189),
    "msgrcv": (70, 188),
    "msgctl": (71, 187),
    "semget": (64, 190),
    "semop": (65, 193),
    "semtimedop": (220, 192),
    "semctl": (66, 191),
    "mq_open": (240, 180),
    "mq_unlink": (241, 181),
    "keyctl": (250, 219),
    "add_key": (248, 217),
    "request_key": (249, 218),
    # The machine: mounts, namespaces, modules, clocks, tracing.
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
    # Landlock does not cover mode, owner, times and attributes of files, not even of read-only files.
    "chmod": (90, -1),
    "fchmod": (91, 52),
    "fchmodat": (268, 53),
    "fchmodat2": (452, 452),
    "chown": (92, -1),
    "fchown": (93, 55),
    "lchown": (94, -1),
    "fchownat": (260, 54),
    "utime": (132, -1),
    "utimes": (235, -1),
    "futimesat": (261, -1),
    "utimensat": (280, 88),
    "setxattr": (188, 5),
    "lsetxattr": (189, 6),
    "fsetxattr": (190, 7),
    "getxattr": (191, 8),
    "lgetxattr": (192, 9),
    "fgetxattr": (193, 10),
    "listxattr": (194, 11),
    "llistxattr": (195, 12),
    "flistxattr": (196, 13),
    "removexattr": (197, 14),
    "lremovexattr": (198, 15),
    "fremovexattr": (199, 16),
    "setxattrat": (463, 463),
    "getxattrat": (464, 464),
    "listxattrat": (465, 465),
    "removexattrat": (466, 466),
    "file_getattr": (468, 468),
    "file_setattr": (469, 469),
    "truncate": (76, 45),
    # Watching other processes' file accesses; finding files and mounts without a name.
    "inotify_init": (253, -1),
    "inotify_init1": (294, 26),
    "inotify_add_watch": (254, 27),
    "fanotify_init": (300, 262),
    "fanotify_mark": (301, 263),
    "name_to_handle_at": (303, 264),
    "statmount": (457, 457),
    "listmount": (458, 458),
    "open_tree_attr": (467, 467),
    # Other processes again: their CPUs, the location of their memory, and its release.
    "migrate_pages": (256, 238),
    "move_pages": (279, 239),
    "process_mrelease": (448, 448),
    "quotactl_fd": (443, 443),
}
# Their flags are behind a pointer, which a filter cannot read. If they seem absent, callers use calls with readable
# flags.
_ABSENT_CALLS = {"clone3": (435, 435), "openat2": (437, 437)}
_CLONE = (56, 220)
_OPENING = {"open": (2, -1, 1), "openat": (257, 56, 2)}
"""For each call, its numbers and the index of its flags argument. The filter refuses read-only opens that truncate,
because older Landlock versions allow them."""
_ACCESS_MODE, _TRUNCATE = 0o3, 0o1000
_ON_ITSELF = {
    "kill": (62, 129, False),
    "tgkill": (234, 131, False),
    "prlimit64": (302, 261, True),
    "sched_setaffinity": (203, 122, True),
}
"""For each call, its numbers and whether a process id of 0 means the calling process."""
_PRCTL, _PARENT_DEATH_SIGNAL = (157, 167), 1
"""The only option of prctl that is allowed. Without it, a process would outlive a server that is killed."""
_FCNTL, _OTHERS_BY_FCNTL = (72, 25), (8, 10, 15, 1024, 1026)
"""Refused: F_SETOWN, F_SETSIG and F_SETOWN_EX, which signal processes; F_SETLEASE and F_NOTIFY, which watch files."""
_IOCTL, _IOCTLS = (16, 29), (0x5401, 0x5413, 0x541B, 0x5421, 0x5450, 0x5451)
"""The requests that Python uses: TCGETS, TIOCGWINSZ, FIONREAD, FIONBIO, FIONCLEX, FIOCLEX."""
_SECCOMP = (317, 277)


def confine() -> str:
    """Install the filter permanently in all threads of this process. PR_SET_NO_NEW_PRIVS must be set.

    Returns:
        "" if it succeeded, otherwise the reason why not.
    """
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
    refuse, absent, allow = (_RETURN, 0, 0, _REFUSE), (_RETURN, 0, 0, _ABSENT), (_RETURN, 0, 0, _ALLOW)
    code = [
        (_LOAD, 0, 0, _ARCHITECTURE),
        (_EQUAL, 1, 0, architecture),
        (_RETURN, 0, 0, _KILL),
        (_LOAD, 0, 0, _NUMBER),
    ]
    if column == 0:
        code += [(_AT_LEAST, 0, 1, _X32), refuse]  # the same calls have other numbers for x32
    code += [(_AT_LEAST, 0, 1, _NEXT_NUMBER), absent]

    def when(number: int, *body: tuple[int, int, int, int]) -> None:
        """Add code that runs the body for one system call. The body must end with a return."""
        if number >= 0:
            code.append((_EQUAL, 0, len(body), number))
            code.extend(body)

    for numbers in _REFUSED.values():
        when(numbers[column], refuse)
    for numbers in _ABSENT_CALLS.values():
        when(numbers[column], absent)
    first, second = ((_LOAD, 0, 0, offset) for offset in _ARGUMENTS[:2])
    when(_CLONE[column], first, (_ANY_BIT, 0, 1, _NEW_THREAD), allow, refuse)
    for open_call in _OPENING.values():
        flags = (_LOAD, 0, 0, _ARGUMENTS[open_call[2]])
        truncates = (_EQUAL, 0, 1, _TRUNCATE)
        when(open_call[column], flags, (_AND, 0, 0, _ACCESS_MODE | _TRUNCATE), truncates, refuse, allow)
    for call in _ON_ITSELF.values():
        own_process = ((_EQUAL, 1, 0, pid), (_EQUAL, 0, 1, 0 if call[2] else pid))
        when(call[column], first, *own_process, allow, refuse)
    when(_PRCTL[column], first, (_EQUAL, 0, 1, _PARENT_DEATH_SIGNAL), refuse, allow)
    refused_commands = [step for command in _OTHERS_BY_FCNTL for step in ((_EQUAL, 0, 1, command), refuse)]
    when(_FCNTL[column], second, *refused_commands, allow)
    allowed_commands = [step for command in _IOCTLS for step in ((_EQUAL, 0, 1, command), allow)]
    when(_IOCTL[column], second, *allowed_commands, refuse)
    code.append(allow)
    return b"".join(struct.pack("<HBBI", *instruction) for instruction in code)
