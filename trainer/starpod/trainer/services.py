"""Environment services on this machine, each a process of its own."""

from __future__ import annotations

import contextlib
import ctypes
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence

STOP_SECONDS = 10.0


class ServiceFailed(Exception):
    """`starpod serve` did not come up. The message holds what it wrote on standard error."""


@contextlib.contextmanager
def local_services(environments: Sequence[str], *, workers: int = 1, arguments: Sequence[str] = ()) -> Iterator[str]:
    """Runs `starpod serve` while the context lasts and yields its address.

    environments: what it hosts. workers: server processes. arguments: handed on as they are.
    Raises ServiceFailed with the server's own words if it does not become ready.
    """
    command = [sys.executable, "-m", "starpod.client.main", "serve", *environments]
    command += ["--port", "0", "--workers", str(workers), *arguments]
    with tempfile.TemporaryFile(mode="w+") as log:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
            # Ctrl-C is the trainer's: it saves, with the services still there, and stops them itself.
            start_new_session=True,
            preexec_fn=_die_with_parent,
        )
        try:
            assert process.stdout is not None
            line = process.stdout.readline().strip()
            if not line:
                process.wait(STOP_SECONDS)
                log.seek(0)
                raise ServiceFailed(
                    f"the environment service did not start (`{' '.join(command)}`): {log.read().strip()}"
                )
            yield line.split()[-1]
        finally:
            process.terminate()
            try:
                process.wait(STOP_SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            if process.stdout is not None:
                process.stdout.close()


_PR_SET_PDEATHSIG = 1
_libc = ctypes.CDLL(None, use_errno=True) if sys.platform == "linux" else None


def _die_with_parent() -> None:
    """A trainer that is killed outright takes its services along (Linux)."""
    if _libc is not None:
        _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
