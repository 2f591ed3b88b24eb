"""Child processes that run Starpod commands, such as an environment server. They end when their parent ends."""

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
"""First and longest pause before a program is restarted. After a minute of running, the first pause applies again."""

logger = logging.getLogger(__name__)


class ServiceFailed(Exception):
    """A program did not start. The message contains the command line and `said`, the program's standard error."""

    def __init__(self, message: str, stderr: str) -> None:
        super().__init__(message)
        self.stderr = stderr.removeprefix("starpod: ")


class ServiceRefused(ServiceFailed):
    """A program rejected its command line (exit status 2)."""


@contextlib.contextmanager
def run_program(
    what: str, *words: str, again: bool = False, variables: Mapping[str, str] | None = None
) -> Iterator[str]:
    """Run `starpod WORDS --end-with-stdin` while the context lasts, and yield the address that the program prints.

    Args:
        what: the program's description for messages, such as "the environment server".
        words: the command and its options. The command must accept --end-with-stdin and print one line that ends with
            its address.
        again: restart the program at the same address if it ends early. The command must accept --port.
        variables: environment variables to add to this process's variables.

    Raises:
        ServiceRefused: the program rejected its command line.
        ServiceFailed: the program ended before it printed an address. The message contains its standard error.
    """
    program = _Program(what, words, {**os.environ, **(variables or {})})
    try:
        address = program.start()
        if again:
            threading.Thread(target=program.keep, args=(address,), daemon=True).start()
        yield address
    finally:
        program.stop()


def start_server(
    *words: str, port: int = 0, again: bool = False, variables: Mapping[str, str] | None = None
) -> contextlib.AbstractContextManager[str]:
    """Run `starpod serve WORDS` while the context lasts, and yield the server's address. See `run_program`.

    Args:
        port: port to listen on; 0 means a free one.
        again: restart the server at the same address if it ends early.
        variables: environment variables to add to this process's variables.
    """
    call = ("serve", *words, "--port", str(port))
    return run_program("the environment service", *call, again=again, variables=variables)


class _Program:
    def __init__(self, name: str, words: Sequence[str], environment: Mapping[str, str]) -> None:
        self.name = name
        self.environment = environment
        self.words = words
        self.process: subprocess.Popen[str] | None = None
        self._stopping = threading.Event()
        self._starting = threading.Lock()

    def start(self, *options: str) -> str:
        """Start the program and return its address, or "" if `stop` was called before. Raises ServiceFailed."""
        # The program ends when our end of its stdin closes, even if we are killed. A preexec_fn could arrange the same,
        # but Python code between fork and exec is unsafe beside gRPC's threads. With -P, a file such as queue.py in the
        # working directory does not hide a module of the standard library.
        command = [sys.executable, "-P", "-m", "starpod.cli.main", *self.words, *options, "--end-with-stdin"]
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
                    # Ctrl-C must reach only the caller: a trainer still needs its services while it saves.
                    start_new_session=True,
                )
            assert process.stdout is not None
            if line := process.stdout.readline().strip():
                return line.split()[-1]
            _await_end(process)
            log.seek(0)
            output = log.read().strip() or f"it ended with status {process.returncode} and said nothing"
        message = f"{self.name} did not start (`{' '.join(command)}`): {output}"
        raise (ServiceRefused if process.returncode == 2 else ServiceFailed)(message, output)

    def keep(self, address: str) -> None:
        """Restart the program at its address whenever it ends, until `stop` is called."""
        port, backoff = address.rpartition(":")[2], Backoff(*_PAUSE_SECONDS)
        while True:
            assert self.process is not None
            start_time = time.monotonic()
            with self.process as process:  # closes our ends of its pipes
                process.wait()
            if time.monotonic() - start_time > 60:
                backoff.reset()
            if self._stopping.wait(backoff.wait()):
                return
            logger.warning("%s ended (status %s): restarting it", self.name, process.returncode)
            with contextlib.suppress(ServiceFailed):  # e.g. old workers still hold the ports: the loop tries again
                self.start("--port", port)

    def stop(self) -> None:
        with self._starting:
            self._stopping.set()
        if self.process is not None:
            with self.process as process:
                process.terminate()
                _await_end(process)


def _await_end(process: subprocess.Popen[str]) -> None:
    try:
        process.wait(STOP_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
