"""Environments of class `process` that do all they can against the server and everybody else on the machine."""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import errno
import fcntl
import mmap
import os
import random
import resource
import socket
import struct
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

from pydantic import Field

from starpod.env_server import (
    Concurrency,
    Environment,
    EnvironmentOptions,
    EnvironmentSpec,
    Outcome,
    Tool,
)


def _open_descriptors() -> Iterator[tuple[int, str]]:
    for number in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):  # that of the listing itself
            yield int(number), os.readlink(f"/proc/self/fd/{number}")


class Villain(Environment):
    """An environment whose actions are crimes. `info` has an exception's name, or what the crime returned."""

    spec = EnvironmentSpec(
        id="villain-v1",
        version="1.0.0",
        title="It means harm",
        grammar="a crime",
        concurrency=Concurrency.PROCESS,
        step_timeout=20.0,
    )

    class Options(EnvironmentOptions):
        path: str = ""
        port: int = 0
        pid: int = 0

    def reset(self, rng: random.Random) -> None:
        self.turns = 0

    def render(self, mode: str = "text") -> str:
        return f"{self.turns} crimes"

    def step(self, action: str) -> Outcome:
        self.turns += 1
        try:
            result = str(getattr(self, action)())
        except BaseException as error:
            # An OSError that has no class of its own tells which one it is.
            result = errno.errorcode[error.errno or 0] if type(error) is OSError else type(error).__name__
        return Outcome(info={"result": result})

    # --- the network, others, files ------------------------------------------------------------------------------

    def connect(self) -> str:
        socket.create_connection(("127.0.0.1", self.options.port), 2).close()
        return "connected"

    def datagram(self) -> None:
        socket.socket(socket.AF_INET, socket.SOCK_DGRAM).sendto(b"secret", ("127.0.0.1", 9))

    def local_socket(self) -> None:
        socket.socket(socket.AF_UNIX)

    def ring(self) -> str:
        """io_uring makes sockets without the call."""
        libc = ctypes.CDLL(None, use_errno=True)
        descriptor = libc.syscall(425, 8, ctypes.create_string_buffer(120))
        return "made" if descriptor >= 0 else os.strerror(ctypes.get_errno())

    def kill_parent(self) -> None:
        os.kill(os.getppid(), 9)

    def kill_server(self) -> None:
        os.kill(self.options.pid, 9)

    def kill_everybody(self) -> None:
        os.kill(-1, 9)

    def read_server(self) -> str:
        return Path(f"/proc/{self.options.pid}/environ").read_bytes()[:20].hex()

    def trace_server(self) -> str:
        libc = ctypes.CDLL(None, use_errno=True)
        attached = libc.ptrace(16, self.options.pid, 0, 0)  # PTRACE_ATTACH
        return "attached" if attached == 0 else os.strerror(ctypes.get_errno())

    def use_objects(self) -> str:
        """System V memory, queues and semaphores by their ids, as if other processes had made them."""
        names = ("shmat", "shmctl", "msgsnd", "msgrcv", "msgctl", "semop", "semtimedop", "semctl")
        results = {self._call(name, -1, 0, 0, 0, 0) for name in names}
        return ", ".join([*results, self._call("mq_unlink", b"/starpod")])

    def starve_server(self) -> None:
        resource.prlimit(self.options.pid, resource.RLIMIT_NOFILE, (8, 8))

    def read_file(self) -> str:
        return Path(self.options.path).read_text()

    def write_file(self) -> str:
        Path(self.options.path).write_text("gotcha")
        return "written"

    def write_temporary(self) -> None:
        with open(f"/tmp/starpod-villain-{os.getpid()}", "w") as file:
            file.write("x" * 1000)

    def list_root(self) -> str:
        return ",".join(os.listdir("/"))

    # --- what Landlock leaves ------------------------------------------------------------------------------------

    def look(self) -> str:
        """Read a file that the process may not read."""
        return f"{os.stat(self.options.path).st_size} bytes"

    def look_around(self) -> str:
        return str(os.path.exists("/etc/passwd") or os.path.exists(f"/proc/{self.options.pid}"))

    def change_mode(self) -> None:
        os.chmod(self.options.path or __file__, 0o777)

    def change_open_file(self) -> None:
        with open(__file__) as file:
            os.fchmod(file.fileno(), 0o4777)

    def change_owner(self) -> None:
        os.chown(__file__, os.getuid(), os.getgid())

    def change_times(self) -> None:
        os.utime(__file__, (1, 1))

    def change_attributes(self) -> None:
        os.setxattr(__file__, "user.gotcha", b"1")

    def list_attributes(self) -> str:
        return str(os.listxattr(__file__))

    def change_flags(self) -> None:
        with open(__file__) as file:
            fcntl.ioctl(file, 0x40086602, struct.pack("l", 0x80))  # FS_IOC_SETFLAGS: no access times

    def watch_files(self) -> str:
        return self._call("inotify_init1", 0)

    def watch_folder(self) -> None:
        folder = os.open(os.path.dirname(__file__), os.O_RDONLY)
        fcntl.fcntl(folder, fcntl.F_NOTIFY, fcntl.DN_ACCESS)

    def truncate(self) -> None:
        os.close(os.open(__file__, os.O_RDONLY | os.O_TRUNC))

    def change_by_new_calls(self) -> str:
        """Calls without a function in libc: fchmodat2, setxattrat, file_setattr, and one that no kernel has yet."""
        libc, path = ctypes.CDLL(None, use_errno=True), os.fsencode(__file__)
        results = []
        for number in (452, 463, 469, 2000):
            libc.syscall(number, -100, path, 0o777, 0, 0, 0)
            results.append(errno.errorcode[ctypes.get_errno()])
        return " ".join(results)

    def change_by_other_numbers(self) -> str:
        """chmod as the x32 interface of x86-64 numbers it."""
        libc = ctypes.CDLL(None, use_errno=True)
        libc.syscall(0x40000000 + 90, os.fsencode(__file__), 0o777)
        return os.strerror(ctypes.get_errno())

    def change_by_32_bits(self) -> None:
        """chmod as 32-bit programs call it on x86-64: mov eax, 15; int 0x80; ret."""
        page = mmap.mmap(-1, 4096, prot=mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC)
        page.write(bytes.fromhex("b80f000000cd80c3"))
        ctypes.CFUNCTYPE(ctypes.c_int)(ctypes.addressof(ctypes.c_char.from_buffer(page)))()

    def move_server(self) -> None:
        os.sched_setaffinity(self.options.pid, {0})

    def outlive(self) -> str:
        """Stays when its server is killed."""
        refused = self._call("prctl", 1, 0, 0, 0, 0)  # PR_SET_PDEATHSIG
        threading.Thread(target=self.spin, daemon=True).start()
        return f"{refused}, {os.getpid()}"

    def _call(self, name: str, *arguments: int | bytes) -> str:
        libc = ctypes.CDLL(None, use_errno=True)
        return "done" if getattr(libc, name)(*arguments) >= 0 else os.strerror(ctypes.get_errno())

    # --- resources -----------------------------------------------------------------------------------------------

    def fork_bomb(self) -> str:
        for _ in range(10):
            if os.fork() == 0:
                os._exit(0)
        return "forked"

    def program(self) -> str:
        return subprocess.run(["true"], check=True).args[0]

    def become_program(self) -> None:
        os.execv(sys.executable, [sys.executable, "-c", "pass"])

    def memory_bomb(self) -> str:
        hoard = [bytearray(2**30) for _ in range(100)]
        return f"{len(hoard)} pieces"

    def thread_bomb(self) -> str:
        ended = threading.Event()
        count = 0
        try:
            with contextlib.suppress(RuntimeError, MemoryError):
                for count in range(100_000):  # noqa: B007
                    threading.Thread(target=ended.wait, daemon=True).start()
        finally:
            ended.set()
        return "unbounded" if count == 99_999 else "bounded"

    def small_threads(self) -> str:
        """Start threads with small stacks until memory is used up, which takes thousands."""
        threading.stack_size(32_768)
        ended, count = threading.Event(), 0
        try:
            with contextlib.suppress(RuntimeError):
                while count < 3000:
                    threading.Thread(target=ended.wait, daemon=True).start()
                    count += 1
        finally:
            ended.set()
        return str(count)

    def raise_limits(self) -> None:
        resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))

    def print_on(self) -> str:
        for _ in range(2000):
            os.write(1, b"noise\n" * 1000)
            os.write(2, b"noise\n" * 1000)
        return "printed"

    def spin(self) -> str:
        while True:
            pass

    # --- what it sees --------------------------------------------------------------------------------------------

    def secrets(self) -> str:
        seen = str(dict(os.environ)) + Path("/proc/self/environ").read_bytes().decode(errors="replace")
        return "seen" if "STARPOD_TEST_SECRET" in seen or "hunter2" in seen else "nothing"

    def descriptors(self) -> str:
        return ",".join(kind.partition(":")[0] for _, kind in _open_descriptors())

    def status(self) -> str:
        return Path("/proc/self/status").read_text()

    # --- lies to the server --------------------------------------------------------------------------------------

    def lie(self, body: bytes, *, length: int | None = None) -> None:
        os.write(self._line(), struct.pack("<I", len(body) if length is None else length) + body)

    def _line(self) -> int:
        """The socket on which the server listens."""
        return next(number for number, kind in _open_descriptors() if kind.startswith("socket:"))

    def huge_frame(self) -> None:
        self.lie(b"", length=2**32 - 1)

    def endless_output(self) -> None:
        line = self._line()
        while True:
            os.write(line, b"\xff" * 2**16)

    def endless_replies(self) -> None:
        line, reply = self._line(), struct.pack("<I", 1) + b"n"
        while True:
            os.write(line, reply * 10_000)

    def nested_state(self) -> None:
        nested = b"\x90"
        for _ in range(5000):
            nested = b"\x91\xc9" + struct.pack(">I", len(nested)) + b"\x01" + nested
        self.lie(nested)

    def nested_error(self) -> None:
        self.lie(b"e" + b"[" * 60_000)

    def wrong_types(self) -> None:
        self.lie(b"eTrue")
        self.lie(b'e["bug", 7, {}]')

    def no_transition(self) -> None:
        self.lie(b"b" + b"\xff" * 100)

    def text_for_transition(self) -> None:
        self.lie(b"shello")

    def infinite_reward(self) -> None:
        self.lie(b"b" + b"\x11" + struct.pack("<d", float("inf")))

    def endless_wait(self) -> None:
        self.lie(b'e["busy", "wait", 1e300]')


class Boastful(Villain):
    """A villain whose error messages are long and contain control characters."""

    spec = dataclasses.replace(Villain.spec, id="boastful-v1")

    def step(self, action: str) -> Outcome:
        raise RuntimeError("\x1b[2J\x1b]0;owned\x07" + action * 100_000 + "\udcff\nTraceback (most recent call last):")


HARM = "\x1b]0;owned\x07\x1b[2J\x9b31m\u202e<script>alert(1)</script>[bold]b[/]\r\b\x7f"


class Shouting(Environment):
    """Inline; everything that it says is meant for a terminal or a browser to obey."""

    spec = EnvironmentSpec(
        id="shouting-v1",
        version="1.0.0",
        title=f"Title {HARM}",
        instructions=f"Instructions {HARM}",
        grammar=f"Grammar {HARM}",
        tools=(Tool(f"tool{HARM}", f"Description {HARM}"),),
        render_modes=("text", "html"),
    )

    class Options(EnvironmentOptions):
        choice: str = Field(default=f"default {HARM}", description=f"Meaning {HARM}")

    def reset(self, rng: random.Random) -> None:
        self.heard = "nothing"

    def step(self, action: str) -> Outcome:
        if action == "raise":
            raise RuntimeError(f"Error {HARM}")
        self.heard = action
        return Outcome(criteria={f"criterion {HARM}": True})

    def valid_actions(self) -> list[str]:
        return [f"valid {HARM}"]

    def expert_action(self) -> str:
        return f"hint {HARM}"

    def render(self, mode: str = "text") -> str:
        return f"Picture {HARM} of {self.heard}"
