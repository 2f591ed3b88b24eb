"""Runs code that nobody trusts, such as a model's, in a process of its own that gave up all rights before.

The process is forked from the server's fork server, loads a runner (a Python file that is trusted), confines itself as
sandbox.py says, without any file or network, and hands the runner what it is to work on. What it sends back is bytes
that may be anything: whoever reads them must not believe them. So the answers that a test expects stay outside.
"""

from __future__ import annotations

import importlib.util
import math
import multiprocessing.connection
import os
import select
import signal
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import NamedTuple, NoReturn

from starpod.env_server.processes.forking import fork_context, leave_fork_server
from starpod.env_server.sandbox.sandbox import Sandbox, close_inherited, confine, end_with_parent

_NEEDED = frozenset({"memory", "CPU time", "files", "network", "processes"})
"""What must hold, or nothing is run."""
_WAITING = 10.0
"""Seconds on the clock for each second of computing: a machine may be busy, and a program may sleep."""
_ENDING = 1.0
"""Seconds in which a process that closed its end of the pipe has to end."""
_UNCONFINED, _FINISHED = 97, 0


class Confined(NamedTuple):
    """What came of a run.

    reply: what the process sent, whoever wrote it. ended: `finished`, `time`, or `died` for every other end.
    """

    reply: bytes
    ended: str


class Unconfined(RuntimeError):
    """This system cannot confine a process: nothing was run."""


def run_confined(
    runner: str, work: bytes, *, cpu_seconds: float = 2.0, memory_bytes: int = 256 * 2**20, most_reply: int = 2**20
) -> Confined:
    """Runs `main(work, reply)` of a Python file, where `reply(data)` sends the bytes back and ends the process.

    Blocks: call it on a thread. The runner imports all that it needs when it is loaded: no file can be read later.
    cpu_seconds: of computing; ten times as long on the clock. memory_bytes: address space beyond what starting takes.
    most_reply: bytes of the reply that are read. Raises Unconfined where the system cannot confine it.
    """
    context = fork_context()
    reader, writer = context.Pipe(duplex=False)
    sandbox = Sandbox(memory_bytes=memory_bytes, cpu_seconds=math.ceil(cpu_seconds), open_files=16, libraries=False)
    process = context.Process(target=_child_main, args=(writer, os.path.abspath(runner), work, sandbox), daemon=True)
    reply: bytes | None = None
    began = time.monotonic()
    try:
        process.start()
        writer.close()
        reply = _read(reader, began + _WAITING * cpu_seconds, most_reply)
        ended = reply is not None and bool(multiprocessing.connection.wait([process.sentinel], timeout=_ENDING))
    finally:
        writer.close()
        reader.close()
        if process.pid is not None:
            process.kill()
            process.join(10)
    if process.exitcode == _UNCONFINED:
        raise Unconfined(f"code that nobody trusts cannot be confined here: {(reply or b'').decode(errors='replace')}")
    # The kernel kills what has used up its time, and nobody else does so then.
    if reply is None or not ended or (process.exitcode == -signal.SIGKILL and time.monotonic() - began >= cpu_seconds):
        return Confined(b"", "time")
    return Confined(reply, "finished" if process.exitcode == _FINISHED else "died")


def _read(reader: Connection, deadline: float, most: int) -> bytes | None:
    """What comes until the other end is closed, or until it is too much; None if the deadline passes before."""
    data = b""
    while len(data) < most:
        ready, _, _ = select.select([reader], [], [], max(0.0, deadline - time.monotonic()))
        if not ready:
            return None
        chunk = os.read(reader.fileno(), most - len(data))
        if not chunk:
            break
        data += chunk
    return data


# --- the child ---------------------------------------------------------------------------------------------------


def _child_main(writer: Connection, runner: str, work: bytes, sandbox: Sandbox) -> None:
    """Loads the runner, gives up all rights, and lets it work."""
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
    if missing := _NEEDED - set(report.applied):
        reply(f"no limits on {', '.join(sorted(missing))}; {report}".encode(), _UNCONFINED)
    main: Callable[[bytes, Callable[[bytes], NoReturn]], None] = module.main
    main(work, reply)
    os._exit(_FINISHED)
