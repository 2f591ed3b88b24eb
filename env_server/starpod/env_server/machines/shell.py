"""A shell in a machine that lives as long as its session: commands in, bounded output and exit status out."""

from __future__ import annotations

import re
import secrets
import shlex
import time
from collections.abc import Callable
from dataclasses import dataclass

from starpod.env_server.machines.engine import Stream

_CHUNK = 65_536
_ROOM = 16_384
"""Bytes of output that are searched for the end of a command: its mark holds a path of up to 4,096 bytes."""
START = 'cd "$1" 2>/dev/null; [ ! -x /bin/bash ] || exec /bin/bash --noprofile --norc -s; exec /bin/sh -s'


@dataclass(frozen=True, slots=True)
class CommandResult:
    """Result of a command."""

    text: str
    """Output and errors in the order of their arrival; the middle is left out if it is long."""
    status: int | None
    """Exit status; None if the command was ended or ended its shell."""
    folder: str
    """Working folder after the command."""
    problem: str = ""
    """Why the command was ended, or that it ended its shell; empty otherwise."""


class BoundedOutput:
    """Output of which at most `limit` bytes are kept, half of them at each end."""

    def __init__(self, limit: int) -> None:
        self._half = limit // 2
        self._head = bytearray()
        self._tail = bytearray()
        self._size = 0
        """Number of bytes after the head."""

    def add(self, data: bytes) -> None:
        room = self._half - len(self._head)
        if room > 0:
            self._head += data[:room]
            data = data[room:]
        self._tail += data
        self._size += len(data)
        if len(self._tail) > 2 * (self._half + _ROOM):
            del self._tail[: -(self._half + _ROOM)]

    @property
    def total(self) -> int:
        return len(self._head) + self._size

    def find(self, mark: re.Pattern[bytes]) -> re.Match[bytes] | None:
        """Return the match of a mark at the end. The mark is removed from the output."""
        recent = bytes(self._head + self._tail)[-_ROOM - _CHUNK :]
        if match := mark.search(recent):
            excess = len(recent) - match.start()
            from_tail = min(excess, len(self._tail))
            del self._tail[len(self._tail) - from_tail :]
            self._size -= from_tail
            del self._head[len(self._head) - (excess - from_tail) :]
        return match

    @property
    def text(self) -> str:
        omitted = self._size - min(len(self._tail), self._half)
        tail = bytes(self._tail[-self._half :])
        if omitted <= 0:
            return (self._head + tail).decode(errors="replace")
        head = self._head.decode(errors="replace")
        return f"{head}\n[{omitted:,} bytes left out]\n{tail.decode(errors='replace')}"


class Shell:
    """A shell of one user in a machine. It is started by its first command, and again if a command ended it."""

    def __init__(self, start: Callable[[str, float], Stream], folder: str) -> None:
        """Remember how to start the shell in a folder, until a deadline."""
        self._start = start
        self.folder = folder
        self._stream: Stream | None = None

    def run(self, command: str, seconds: float, limit: int, max_bytes: float) -> CommandResult:
        """Run a command.

        Args:
            command: text in the shell's language; several lines are possible.
            seconds: time limit.
            limit: maximum number of bytes of output that are kept.
            max_bytes: number of bytes of output after which the command counts as endless.

        Returns:
            The result. If it has a problem and the shell is still `running`, the caller has to end all processes.
        """
        deadline = time.monotonic() + seconds
        output, token = BoundedOutput(limit), secrets.token_hex(16)
        mark = re.compile(rf"\n{token} (\d+) (.*) {token}\n".encode(), re.DOTALL)
        # The command reads nothing, or it would read the shell's own input.
        line = f"eval {shlex.quote(command)} </dev/null\nprintf '\\n%s %d %s %s\\n' {token} $? \"$PWD\" {token} >&9\n"
        try:
            if self._stream is None:
                self._stream = self._start(self.folder, deadline)
                self._stream.send(b"exec 2>&1 9>&1\n", deadline)
            self._stream.send(line.encode(errors="replace"), deadline)
            while data := self._stream.read(deadline):
                output.add(data)
                if match := output.find(mark):
                    self.folder = match[2].decode(errors="replace")
                    return CommandResult(output.text, int(match[1]), self.folder)
                if output.total > max_bytes:
                    return CommandResult(output.text, None, self.folder, f"wrote more than {max_bytes:,.0f} bytes")
        except TimeoutError:
            return CommandResult(output.text, None, self.folder, f"took longer than {seconds:g} s")
        except (BrokenPipeError, ConnectionError):
            pass
        self.drop()
        return CommandResult(output.text, None, self.folder, "ended the shell")

    @property
    def running(self) -> bool:
        return self._stream is not None

    def drop(self) -> None:
        """Close the connection. The next command starts another shell in the same folder."""
        if self._stream:
            self._stream.close()
        self._stream = None
