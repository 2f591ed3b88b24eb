"""Programs of Starpod that a run starts beside itself, and that end with it."""

from __future__ import annotations

import contextlib
import subprocess
import sys
import tempfile
from collections.abc import Iterator

from starpod.trainer.section import ConfigError

STOP_SECONDS = 10.0


class ServiceFailed(Exception):
    """A program did not come up. The message holds what it wrote on standard error."""


@contextlib.contextmanager
def started(what: str, *words: str) -> Iterator[str]:
    """Runs `starpod WORDS --end-with-stdin` while the context lasts and yields the address that it prints.

    what: the program, in words. Raises ServiceFailed with its own words if it does not become ready, ConfigError where
    it was called wrong.
    """
    # It ends when the trainer's end of the pipe closes, even if the trainer is killed. A preexec_fn could ask for that,
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
            # Ctrl-C is the trainer's: it saves, with the services still there, and stops them itself.
            start_new_session=True,
        ) as process,
    ):
        try:
            assert process.stdout is not None
            line = process.stdout.readline().strip()
            if not line:
                process.wait(STOP_SECONDS)
                log.seek(0)
                # Exit status 2: the call was wrong, as with every command.
                raise (ConfigError if process.returncode == 2 else ServiceFailed)(
                    f"{what} did not start (`{' '.join(command)}`): "
                    + (log.read().strip() or f"it ended with status {process.returncode} and said nothing")
                )
            yield line.split()[-1]
        finally:
            process.terminate()
            try:
                process.wait(STOP_SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()
