"""A shell in a container that lives as long as its session: commands in, bounded output and exit status out."""

from __future__ import annotations

import contextlib
import re
import secrets
import shlex
import time
from dataclasses import dataclass
from typing import Any

_CHUNK = 65_536
_HEADER = 8
_ROOM = 16_384
"""Bytes of output that are searched for the end of a command: its mark holds a path of up to 4,096 bytes."""
_START = 'cd "$1" 2>/dev/null; command -v bash >/dev/null 2>&1 && exec bash --noprofile --norc -s; exec /bin/sh -s'


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


class Frames:
    """Input and output of a process in a container. The engine sends the output in frames of a header and bytes."""

    def __init__(self, connection: Any) -> None:
        self._connection = connection
        self._socket = getattr(connection, "_sock", connection)
        self._header = bytearray()
        self._left = 0

    def send(self, data: bytes, deadline: float) -> None:
        self._socket.settimeout(max(deadline - time.monotonic(), 0.001))
        self._socket.sendall(data)

    def read(self, deadline: float) -> bytes:
        """Return the next bytes of output, or nothing at its end. Raises TimeoutError at the deadline."""
        while not self._left:
            data = self._receive(_HEADER - len(self._header), deadline)
            if not data:
                return b""
            self._header += data
            if len(self._header) == _HEADER:
                self._left = int.from_bytes(self._header[4:], "big")
                self._header.clear()
        data = self._receive(min(self._left, _CHUNK), deadline)
        self._left -= len(data)
        return data

    def _receive(self, size: int, deadline: float) -> bytes:
        seconds = deadline - time.monotonic()
        if seconds <= 0:
            raise TimeoutError
        self._socket.settimeout(seconds)
        try:
            data: bytes = self._socket.recv(size)
        except ConnectionError:
            return b""
        return data

    def close(self) -> None:
        resources: list[Any] = [self._socket, self._connection, getattr(self._connection, "_response", None)]
        for resource in resources:
            with contextlib.suppress(Exception):
                resource.close()


class Shell:
    """A shell of one user in a container. It is started by its first command, and again if a command ended it."""

    def __init__(self, api: Any, container: str, user: str, folder: str, variables: dict[str, str]) -> None:
        self._api = api
        self._container = container
        self._user = user
        self.folder = folder
        self._variables = variables
        self._frames: Frames | None = None

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
            frames = self._frames or self._start(deadline)
            frames.send(line.encode(errors="replace"), deadline)
            while data := frames.read(deadline):
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
        return self._frames is not None

    def drop(self) -> None:
        """Close the connection. The next command starts another shell in the same folder."""
        if self._frames:
            self._frames.close()
        self._frames = None

    def _start(self, deadline: float) -> Frames:
        process = self._api.exec_create(
            self._container,
            ["/bin/sh", "-c", _START, "sh", self.folder],
            stdin=True,
            user=self._user,
            workdir="/",
            environment=self._variables,
        )
        self._frames = Frames(self._api.exec_start(process["Id"], socket=True))
        self._frames.send(b"exec 2>&1 9>&1\n", deadline)
        return self._frames
