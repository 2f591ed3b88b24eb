"""Starts programs of Starpod beside the caller: environment servers of its own, a live site. They end with it."""

from __future__ import annotations

import contextlib
import logging
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence

from starpod.client.transport import Backoff

STOP_SECONDS = 10.0
_PAUSE_SECONDS = (0.1, 5.0)
"""First and longest pause before a program that ended is started again; one that lived for a minute starts anew."""

logger = logging.getLogger(__name__)


class ServiceFailed(Exception):
    """A program did not come up. The message holds the call, and what it wrote on standard error: `said`."""

    def __init__(self, message: str, said: str) -> None:
        super().__init__(message)
        self.said = said.removeprefix("starpod: ")


class ServiceRefused(ServiceFailed):
    """A program was called wrong."""


@contextlib.contextmanager
def started(what: str, *words: str, again: bool = False, variables: Mapping[str, str] | None = None) -> Iterator[str]:
    """Runs `starpod WORDS --end-with-stdin` while the context lasts and yields the address that it prints.

    what: the program, in words. It must take --end-with-stdin, and print one line that ends in its address.
    again: one that ends before its time is started again at its address; it must take --port. variables: of its
    environment, beside ours. Raises ServiceFailed with its own words if it does not become ready, ServiceRefused where
    it was called wrong.
    """
    program = _Program(what, words, {**os.environ, **(variables or {})})
    try:
        address = program.start()
        if again:
            threading.Thread(target=program.keep, args=(address,), daemon=True).start()
        yield address
    finally:
        program.stop()


class _Program:
    def __init__(self, what: str, words: Sequence[str], environment: Mapping[str, str]) -> None:
        self.what = what
        self.environment = environment
        self.words = words
        self.process: subprocess.Popen[str] | None = None
        self._stopping = threading.Event()
        self._starting = threading.Lock()

    def start(self, *more: str) -> str:
        """Starts it, with these words too, and waits for its address; empty if it was stopped before. Raises
        ServiceFailed."""
        # It ends when our end of the pipe closes, even if we are killed. A preexec_fn could ask for that,
        # but Python code between fork and exec is unsafe beside gRPC's threads. -P: a queue.py in the working folder is
        # not the standard library's.
        command = [sys.executable, "-P", "-m", "starpod.cli.main", *self.words, *more, "--end-with-stdin"]
        with tempfile.TemporaryFile(mode="w+") as log:
            with self._starting:
                if self._stopping.is_set():
                    return ""
                process = self.process = subprocess.Popen(
                    command,
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=log,
                    text=True,
                    env=self.environment,
                    # Ctrl-C is the caller's: a trainer saves, with its services still there, and stops them itself.
                    start_new_session=True,
                )
            assert process.stdout is not None
            if line := process.stdout.readline().strip():
                return line.split()[-1]
            _await_end(process)
            log.seek(0)
            said = log.read().strip() or f"it ended with status {process.returncode} and said nothing"
        message = f"{self.what} did not start (`{' '.join(command)}`): {said}"
        # Exit status 2: the call was wrong, as with every command.
        raise (ServiceRefused if process.returncode == 2 else ServiceFailed)(message, said)

    def keep(self, address: str) -> None:
        """Starts it again at its address whenever it ends, until it is stopped."""
        port, backoff = address.rpartition(":")[2], Backoff(*_PAUSE_SECONDS)
        while True:
            assert self.process is not None
            began = time.monotonic()
            with self.process as ended:  # which closes our ends of its pipes, too
                ended.wait()
            if time.monotonic() - began > 60:
                backoff.reset()
            if self._stopping.wait(backoff.wait()):
                return
            logger.warning("%s was gone (status %s): starting it again", self.what, ended.returncode)
            with contextlib.suppress(ServiceFailed):  # such as one whose workers still hold the ports: once more then
                self.start("--port", port)

    def stop(self) -> None:
        with self._starting:
            self._stopping.set()
        if self.process is not None:
            with self.process as process:
                process.terminate()
                _await_end(process)


def _await_end(process: subprocess.Popen[str]) -> None:
    """Kills it if it takes too long."""
    try:
        process.wait(STOP_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
