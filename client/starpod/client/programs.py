"""Starts programs of Starpod beside the caller: environment servers of its own, a live site. They end with it."""

from __future__ import annotations

import contextlib
import subprocess
import sys
import tempfile
from collections.abc import Iterator

STOP_SECONDS = 10.0


class ServiceFailed(Exception):
    """A program did not come up. The message holds the call, and what it wrote on standard error: `said`."""

    def __init__(self, message: str, said: str) -> None:
        super().__init__(message)
        self.said = said.removeprefix("starpod: ")


class ServiceRefused(ServiceFailed):
    """A program was called wrong."""


@contextlib.contextmanager
def started(what: str, *words: str) -> Iterator[str]:
    """Runs `starpod WORDS --end-with-stdin` while the context lasts and yields the address that it prints.

    what: the program, in words. It must take --end-with-stdin, and print one line that ends in its address. Raises
    ServiceFailed with its own words if it does not become ready, ServiceRefused where it was called wrong.
    """
    # It ends when our end of the pipe closes, even if we are killed. A preexec_fn could ask for that,
    # but Python code between fork and exec is unsafe beside gRPC's threads.
    command = [sys.executable, "-m", "starpod.cli.main", *words, "--end-with-stdin"]
    with (
        tempfile.TemporaryFile(mode="w+") as log,
        subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
            # Ctrl-C is the caller's: a trainer saves, with its services still there, and stops them itself.
            start_new_session=True,
        ) as process,
    ):
        try:
            assert process.stdout is not None
            line = process.stdout.readline().strip()
            if not line:
                process.wait(STOP_SECONDS)
                log.seek(0)
                said = log.read().strip() or f"it ended with status {process.returncode} and said nothing"
                message = f"{what} did not start (`{' '.join(command)}`): {said}"
                # Exit status 2: the call was wrong, as with every command.
                raise (ServiceRefused if process.returncode == 2 else ServiceFailed)(message, said)
            yield line.split()[-1]
        finally:
            process.terminate()
            try:
                process.wait(STOP_SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()
