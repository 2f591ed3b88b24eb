"""A client process: it plays until its standard input ends, and writes its observations to a file.

    python -m tests.faults.program ADDRESSES FILE SETTINGS

SETTINGS: the arguments of `disturbed`, as JSON.
"""

import asyncio
import contextlib
import json
import os
import pickle
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from starpod.client import Fleet
from tests.faults.episodes import Played, disturbed
from tests.support import ROOT


class Program:
    """The running client. `recoveries` and the rest come with `finish`."""

    def __init__(self, process: subprocess.Popen[str], file: Path) -> None:
        self.process = process
        self._file = file

    def finish(self) -> Played:
        """Let the program finish its episodes, and return them. Raise AssertionError with its output if it fails."""
        _, errors = self.process.communicate("", timeout=250)
        assert self.process.returncode == 0, errors
        played: Played = pickle.loads(self._file.read_bytes())
        return played


@contextlib.contextmanager
def client_program(addresses: str, folder: Path, *, prefix: Sequence[str] = (), **settings: Any) -> Iterator[Program]:
    """Starts one, and returns when it plays. `prefix`: words before its command, such as `ip netns exec NAME`."""
    file = folder / "played"
    command = [*prefix, sys.executable, "-m", "tests.faults.program", addresses, str(file), json.dumps(settings)]
    process = subprocess.Popen(
        command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    try:
        assert process.stdout is not None and process.stderr is not None
        assert process.stdout.readline() == "playing\n", process.stderr.read()
        yield Program(process, file)
    finally:
        process.kill()
        process.communicate()


async def main() -> None:
    addresses, file, settings = sys.argv[1:]

    async def until_told(_: Fleet) -> None:
        print("playing", flush=True)
        # Not through sys.stdin: its lock must not be held by a thread at exit.
        while await asyncio.to_thread(os.read, 0, 1):
            pass

    played = await disturbed(addresses, until_told, **json.loads(settings))
    Path(file).write_bytes(pickle.dumps(played))


if __name__ == "__main__":
    asyncio.run(main())
