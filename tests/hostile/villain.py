"""Environments of class `process` that do all they can against the server and everybody else on the machine."""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
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
from typing import Any, ClassVar

from pydantic import Field

from starpod.env_server import (
    Concurrency,
    Environment,
    EnvironmentOptions,
    EnvironmentSpec,
    Outcome,
    Tool,
    landlock,
    sandbox,
)


def _open_descriptors() -> Iterator[tuple[int, str]]:
    for number in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):  # that of the listing itself
            yield int(number), os.readlink(f"/proc/self/fd/{number}")


class Villain(Environment):
    """Each action is a crime; `info` tells how far it came: an exception's name, or what it got."""

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
            result = type(error).__name__
        return Outcome(info={"result": result})

    # --- the network, others, files ------------------------------------------------------------------------------

    def connect(self) -> str:
        socket.create_connection(("127.0.0.1", self.options.port), 2).close()
        return "connected"

    def datagram(self) -> str:
        socket.socket(socket.AF_INET, socket.SOCK_DGRAM).sendto(b"secret", ("127.0.0.1", 9))
        return "sent"

    def local_socket(self) -> str:
        socket.socket(socket.AF_UNIX)
        return "made"

    def ring(self) -> str:
        """io_uring makes sockets without the call."""
        libc = ctypes.CDLL(None, use_errno=True)
        descriptor = libc.syscall(425, 8, ctypes.create_string_buffer(120))
        return "made" if descriptor >= 0 else os.strerror(ctypes.get_errno())

    def kill_parent(self) -> str:
        os.kill(os.getppid(), 9)
        return "killed"

    def kill_server(self) -> str:
        os.kill(self.options.pid, 9)
        return "killed"

    def kill_everybody(self) -> str:
        os.kill(-1, 9)
        return "killed"

    def read_server(self) -> str:
        return Path(f"/proc/{self.options.pid}/environ").read_bytes()[:20].hex()

    def trace_server(self) -> str:
        libc = ctypes.CDLL(None, use_errno=True)
        attached = libc.ptrace(16, self.options.pid, 0, 0)  # PTRACE_ATTACH
        return "attached" if attached == 0 else os.strerror(ctypes.get_errno())

    def starve_server(self) -> str:
        resource.prlimit(self.options.pid, resource.RLIMIT_NOFILE, (8, 8))
        return "starved"

    def read_file(self) -> str:
        return Path(self.options.path).read_text()

    def write_file(self) -> str:
        Path(self.options.path).write_text("gotcha")
        return "written"

    def write_temporary(self) -> str:
        with open(f"/tmp/starpod-villain-{os.getpid()}", "w") as file:
            file.write("x" * 1000)
        return "written"

    def list_root(self) -> str:
        return ",".join(os.listdir("/"))

    # --- resources -----------------------------------------------------------------------------------------------

    def fork_bomb(self) -> str:
        for _ in range(10):
            if os.fork() == 0:
                os._exit(0)
        return "forked"

    def program(self) -> str:
        return subprocess.run(["true"], check=True).args[0]

    def become_program(self) -> str:
        os.execv(sys.executable, [sys.executable, "-c", "pass"])
        return "gone"

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

    def raise_limits(self) -> str:
        resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
        return "raised"

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
    """Its errors are long, and full of what does harm to terminals."""

    spec = dataclasses.replace(Villain.spec, id="boastful-v1")

    def step(self, action: str) -> Outcome:
        raise RuntimeError("\x1b[2J\x1b]0;owned\x07" + action * 100_000 + "\udcff\nTraceback (most recent call last):")


class WithoutLandlock(Villain):
    """Finds itself on a system without Landlock: what an author's code does when it is loaded, no sandbox can see."""

    spec = dataclasses.replace(Villain.spec, id="without_landlock-v1")

    @classmethod
    def prepare(cls) -> None:
        landlock.confine = lambda *_: ([], "Landlock: Function not implemented")  # type: ignore[assignment]


class OwnUser(Villain):
    """Finds itself where every user can read Python."""

    spec = dataclasses.replace(Villain.spec, id="own_user-v1")
    patched: ClassVar[Any] = None

    @classmethod
    def prepare(cls) -> None:
        sandbox._readable_by = lambda user: True  # type: ignore[assignment]


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
