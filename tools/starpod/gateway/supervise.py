"""Runs one program, and ends everything that it started: `python -I -S supervise.py COMMAND...`.

It is a separate process so that the program's descendants end with it, however the trainer ends. On Linux it is
their subreaper: a process whose parent has ended becomes its child, whatever session or group that process is in.
Elsewhere only the program's process group is ended.

Standard input: if it is closed, the program is ended. It is closed even if the trainer is killed.
Standard output: one line of JSON at the end, `{"status": 1, "last": "..."}` or `{"refused": "..."}`. The program does
not inherit it, so that no process that it leaves behind keeps the reader waiting.
"""

import ctypes
import json
import os
import selectors
import signal
import subprocess
import sys
import time
from contextlib import suppress

SHOWN = 500
"""Number of bytes at the end of the program's standard error that are reported."""
_PR_SET_CHILD_SUBREAPER = 36
_END_SECONDS = 3.0
"""Seconds for killed processes to end. The supervisor does not wait longer for one that hangs in the kernel."""
_POLL_SECONDS = 0.01


def main(command: list[str]) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    wake, wake_writer = os.pipe()
    for end in (wake, wake_writer):
        os.set_blocking(end, False)
    signal.set_wakeup_fd(wake_writer, warn_on_full_buffer=False)
    for number in (signal.SIGCHLD, signal.SIGTERM):
        signal.signal(number, lambda *_: None)
    try:
        program = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            start_new_session=True,
        )
    except OSError as error:
        report(refused=str(error))
        return
    assert program.stderr is not None
    errors = program.stderr.fileno()
    os.set_blocking(errors, False)
    tail = wait(program, wake, errors)
    end_all(program)
    tail = (tail + read(errors))[-SHOWN:]
    report(status=program.poll(), last=" ".join(tail.decode(errors="replace").split()))


def wait(program: "subprocess.Popen[bytes]", wake: int, errors: int) -> bytes:
    """Wait until the program ends, standard input closes or SIGTERM arrives. Return the end of its standard error."""
    tail = b""
    with selectors.DefaultSelector() as selector:
        for descriptor in (0, wake, errors):
            selector.register(descriptor, selectors.EVENT_READ)
        while program.poll() is None:
            for key, _ in selector.select():
                if key.fd == 0 and not os.read(0, 1 << 10):
                    return tail
                if key.fd == wake and signal.SIGTERM in os.read(wake, 1 << 10):
                    return tail
                if key.fd == errors:
                    data = read(errors, 1 << 16)
                    tail = (tail + data)[-SHOWN:]
                    if not data:
                        selector.unregister(errors)
    return tail


def read(descriptor: int, max_bytes: int = 1 << 20) -> bytes:
    """Return the bytes that can be read without waiting, because a descendant may keep the other end open forever."""
    try:
        return os.read(descriptor, max_bytes)
    except BlockingIOError:
        return b""


def end_all(program: "subprocess.Popen[bytes]") -> None:
    """Kill the program and all its descendants. Descendants of a killed process become children of this one."""
    deadline = time.monotonic() + _END_SECONDS
    while time.monotonic() < deadline:
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(program.pid, signal.SIGKILL)
        pids = children()
        for child in pids:
            with suppress(ProcessLookupError, PermissionError):
                os.kill(child, signal.SIGKILL)
        program.poll()
        for child in pids:
            if child != program.pid:
                with suppress(ChildProcessError):
                    os.waitpid(child, os.WNOHANG)
        if not pids:
            return
        time.sleep(_POLL_SECONDS)


def children() -> list[int]:
    """Return the processes whose parent is this one, or none if the system has no /proc."""
    pids: list[int] = []
    with suppress(OSError):
        for name in filter(str.isdigit, os.listdir("/proc")):
            with suppress(OSError), open(f"/proc/{name}/stat", "rb") as file:
                # The line is PID (NAME) STATE PARENT, and the name may contain anything, such as parentheses.
                if int(file.read().rpartition(b")")[2].split()[1]) == os.getpid():
                    pids.append(int(name))
    return pids


def report(**values: object) -> None:
    with suppress(BrokenPipeError):
        os.write(1, json.dumps(values).encode() + b"\n")


if __name__ == "__main__":
    main(sys.argv[1:])
