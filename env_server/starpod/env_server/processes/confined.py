"""Run untrusted code, such as a model's, in a process that has first given up all its rights.

The process is forked from the server's fork server, loads a runner (a trusted Python file), and confines itself with
sandbox.py, without any file or network. Then it passes the work to the runner. The reply may be any bytes, and must
not be trusted. Expected answers of tests therefore have to stay outside the process.
"""

from __future__ import annotations

import importlib.util
import math
import multiprocessing.connection
import os
import select
import signal
import struct
import time
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from typing import NamedTuple, NoReturn

from starpod.env_server.processes.forking import fork_context, leave_fork_server, preload
from starpod.env_server.sandbox.sandbox import Sandbox, close_inherited, confine, end_with_parent

_NEEDED = frozenset({"memory", "CPU time", "files", "network", "processes"})
"""Limits that the system must support. Otherwise nothing is run."""
_WAITING = 10.0
"""Ratio of the wall-clock limit to the CPU-time limit. The machine may be busy, and a program may sleep."""
_ENDING = 1.0
"""Seconds that a process has to exit after it closed its end of the pipe."""
_UNCONFINED, _FINISHED = 97, 0
_READY = struct.Struct("dd")
"""Time and used CPU seconds at which a confined process begins its work. A slow start does not count as work."""


class Confined(NamedTuple):
    """The result of a run."""

    reply: bytes
    """Bytes that the process sent. Untrusted code may have written them."""
    ended: str
    """`finished`, `time` if it ran out of time, or `died` for any other end."""


class Unconfined(RuntimeError):
    """This system cannot confine a process, so nothing was run."""


def run_confined(
    runner: str,
    work: bytes,
    *,
    cpu_seconds: float = 2.0,
    memory_bytes: int = 256 * 2**20,
    most_reply: int = 2**20,
    imports: Sequence[str] = (),
) -> Confined:
    """Run `main(work, reply)` of a Python file, in which `reply(data)` sends the bytes back and ends the process.

    It blocks, so call it on a thread. Without `imports`, the runner must import everything when it is loaded, because
    it can read no file later.

    Args:
        runner: path of the Python file.
        work: bytes for `main`.
        cpu_seconds: limit of CPU time; the wall-clock limit is ten times as long.
        memory_bytes: maximum address space, in addition to what the process takes to start.
        most_reply: maximum number of bytes of the reply that are read.
        imports: packages that the runner imports, even later. Processes start faster if the first call names them.

    Raises:
        Unconfined: the system cannot confine the process.
    """
    preload(*imports)
    context = fork_context()
    reader, writer = context.Pipe(duplex=False)
    sandbox = Sandbox(
        memory_bytes=memory_bytes, cpu_seconds=math.ceil(cpu_seconds), open_files=16, libraries=bool(imports)
    )
    process = context.Process(target=_child_main, args=(writer, os.path.abspath(runner), work, sandbox), daemon=True)
    reply: bytes | None = None
    deadline = time.monotonic() + _WAITING * cpu_seconds
    try:
        process.start()
        writer.close()
        ready = _read(reader, deadline, _READY.size)  # or the beginning of why the process cannot be confined
        reply = None if ready is None else _read(reader, deadline, most_reply)
        ended = reply is not None and bool(multiprocessing.connection.wait([process.sentinel], timeout=_ENDING))
    finally:
        writer.close()
        reader.close()
        if process.pid is not None:
            process.kill()
            process.join(10)
    if process.exitcode == _UNCONFINED:
        problem = (ready or b"") + (reply or b"")
        raise Unconfined(f"untrusted code cannot be confined here: {problem.decode(errors='replace')}")
    if reply is None or not ended or (process.exitcode == -signal.SIGKILL and _is_used_up(ready, cpu_seconds)):
        return Confined(b"", "time")
    return Confined(reply, "finished" if process.exitcode == _FINISHED else "died")


def _is_used_up(ready: bytes | None, cpu_seconds: float) -> bool:
    """Return whether a process that the kernel killed now may have used up its CPU time, since it was ready."""
    if ready is None or len(ready) < _READY.size:
        return False
    start, used_seconds = _READY.unpack(ready)
    return bool(time.monotonic() - start >= cpu_seconds - used_seconds)


def _read(reader: Connection, deadline: float, max_bytes: int) -> bytes | None:
    """Read until the other end is closed or `max_bytes` have come. Returns None if the deadline passes first."""
    data = b""
    while len(data) < max_bytes:
        readers, _, _ = select.select([reader], [], [], max(0.0, deadline - time.monotonic()))
        if not readers:
            return None
        chunk = os.read(reader.fileno(), max_bytes - len(data))
        if not chunk:
            break
        data += chunk
    return data


# --- the child ---------------------------------------------------------------------------------------------------


def _child_main(writer: Connection, runner: str, work: bytes, sandbox: Sandbox) -> None:
    """Load the runner, give up all rights, and call the runner's `main`."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    leave_fork_server()
    end_with_parent()
    close_inherited(writer.fileno())

    def reply(data: bytes, status: int = _FINISHED) -> NoReturn:
        try:
            while data:
                data = data[os.write(writer.fileno(), data) :]
        finally:
            os._exit(status)

    spec = importlib.util.spec_from_file_location("runner", runner)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    report = confine(sandbox, None)
    if missing_limits := _NEEDED - set(report.applied):
        reply(f"no limits on {', '.join(sorted(missing_limits))}; {report}".encode(), _UNCONFINED)
    os.write(writer.fileno(), _READY.pack(time.monotonic(), time.process_time()))
    main: Callable[[bytes, Callable[[bytes], NoReturn]], None] = module.main
    main(work, reply)
    os._exit(_FINISHED)
