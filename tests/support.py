"""Real servers for tests and benchmarks: each a process of its own, reached over a real socket."""

import contextlib
import html
import io
import json
import os
import queue
import re
import resource
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any
from unittest.mock import patch

ROOT = Path(__file__).resolve().parent.parent
READY_SECONDS = 120.0
STOP_SECONDS = 60.0


class ServerFailed(Exception):
    """The server did not come up, or not down. The message holds what it wrote on standard error."""


class ServerProcess:
    """A server's process. `address` is host:port, the same again after `restart`; `ready` the line that named it.

    `command` must take `--port N` (0: a free one) and print one line that ends in the address when it is ready, within
    `seconds`.
    """

    process: subprocess.Popen[str]

    def __init__(
        self,
        command: Sequence[str],
        environment: Mapping[str, str] | None = None,
        port: int = 0,
        seconds: float = READY_SECONDS,
    ) -> None:
        self._command = list(command)
        self._seconds = seconds
        # What a killed process leaves among the temporary files goes with the server, whoever runs it.
        self._temporary = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
        os.chmod(self._temporary.name, 0o1777)
        variables = {"PYTHONUNBUFFERED": "1", "TMPDIR": self._temporary.name}
        self._environment = {**os.environ, **variables, **(environment or {})}
        self._log: IO[str] = tempfile.TemporaryFile(mode="w+")  # noqa: SIM115 - lives as long as the server does
        self.address = self.ready = ""
        self._start(port)

    @property
    def port(self) -> int:
        return int(self.address.rpartition(":")[2])

    @property
    def pid(self) -> int:
        return self.process.pid

    @property
    def log(self) -> str:
        """Return the server's standard error so far."""
        # Not by seek and read: the server writes where this file stands.
        return os.pread(self._log.fileno(), os.fstat(self._log.fileno()).st_size, 0).decode(errors="replace")

    def kill(self) -> None:
        """SIGKILL, to the server and its workers: no goodbye, the sessions are gone."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()

    def terminate(self) -> int:
        """SIGTERM, then waits for the exit. Returns the exit status."""
        self.process.terminate()
        try:
            return self.process.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            self.kill()
            raise ServerFailed(f"no exit {STOP_SECONDS:.0f} s after SIGTERM; its log:\n{self.log}") from None

    def restart(self, environment: Mapping[str, str] | None = None) -> None:
        """Kills it if it lives, and starts a new one on the same port, with these variables besides its own."""
        self._environment.update(environment or {})
        self.kill()
        ours = self.address.startswith("127.0.0.1:")  # and not in a network namespace of its own
        with held_port(self.port) if ours else contextlib.nullcontext(self.port) as port:
            self._start(port)

    def close(self) -> None:
        self.kill()
        for pipe in (self.process.stdin, self.process.stdout):
            pipe.close() if pipe else None
        self._log.close()
        self._temporary.cleanup()

    def _start(self, port: int) -> None:
        command = [*self._command, "--port", str(port)]
        self.process = subprocess.Popen(
            command,
            cwd=ROOT,
            env=self._environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
            start_new_session=True,  # so that kill() reaches the workers too
        )
        lines: queue.SimpleQueue[str] = queue.SimpleQueue()
        threading.Thread(target=_read_lines, args=(self.process.stdout, lines), daemon=True).start()
        try:
            line = lines.get(timeout=self._seconds)
        except queue.Empty:
            line = ""
        if not line.strip():
            self.kill()
            raise ServerFailed(f"`{' '.join(command)}` did not become ready; its log:\n{self.log}")
        self.ready = line
        self.address = line.split()[-1]


def _read_lines(stream: IO[str] | None, lines: queue.SimpleQueue[str]) -> None:
    """Passes the ready line on and then keeps the pipe from filling. An empty line stands for the end."""
    assert stream is not None
    with contextlib.suppress(ValueError):  # closed by close()
        for line in stream:
            lines.put(line)
    lines.put("")


@contextlib.contextmanager
def held_port(port: int = 0) -> Iterator[int]:
    """A port of 127.0.0.1 (0: a free one) that nobody else is given while the context lasts, and on which a server that
    lets its address be reused, as gRPC's do, can listen."""
    with socket.socket() as holder:
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        holder.bind(("127.0.0.1", port))
        yield int(holder.getsockname()[1])


@contextlib.contextmanager
def start_server(
    *arguments: str, environment: Mapping[str, str] | None = None, port: int = 0, prefix: Sequence[str] = ()
) -> Iterator[ServerProcess]:
    """Runs `starpod serve ARGUMENTS` on a port of 127.0.0.1 (0: a free one) while the context lasts.

    `environment` adds environment variables, `prefix` words before the command, such as `ip netns exec NAME`. Raises
    ServerFailed with the server's log if it does not become ready.
    """
    command = [*prefix, sys.executable, "-m", "starpod.cli.main", "serve", *arguments, "--end-with-stdin"]
    server = ServerProcess(command, environment, port)
    try:
        yield server
    finally:
        server.close()


@dataclass
class Done:
    """A finished call of the command line: its exit status and what it wrote."""

    status: int
    out: str
    err: str

    @property
    def complaint(self) -> str:
        """The one line on standard error of a failed call that wrote nothing else."""
        assert self.status and self.out == "", self
        (line,) = self.err.splitlines()
        assert line.startswith("starpod: ")
        return line


def run_starpod(*words: str, stdin: str | IO[str] = "", encoding: str = "utf-8", columns: int = 160) -> Done:
    """Runs `starpod WORDS` in this process."""
    from starpod.cli.main import main

    out, err = (io.TextIOWrapper(io.BytesIO(), encoding, write_through=True) for _ in range(2))
    handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGHUP)}
    given = io.StringIO(stdin) if isinstance(stdin, str) else stdin
    status: object = None
    try:
        with (
            contextlib.redirect_stdout(out),
            contextlib.redirect_stderr(err),
            patch.object(sys, "stdin", given),
            patch.object(sys, "argv", sys.argv[:]),
            patch.dict(os.environ, {"COLUMNS": str(columns)}),
        ):
            main(words)
    except SystemExit as end:
        status = end.code
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
    assert isinstance(status, int)
    return Done(status, *(stream.buffer.getvalue().decode(encoding) for stream in (out, err)))  # type: ignore[attr-defined]


def credentials(folder: Path) -> dict[str, Path]:
    """Files of a certificate authority ("ca"), a "certificate" of 127.0.0.1 with its "key", and a "token"."""
    import trustme

    files = {name: folder / name for name in ("ca", "certificate", "key", "token")}
    authority = trustme.CA()
    certificate = authority.issue_cert("127.0.0.1")
    authority.cert_pem.write_to_path(files["ca"])
    certificate.cert_chain_pems[0].write_to_path(files["certificate"])
    certificate.private_key_pem.write_to_path(files["key"])
    files["token"].write_text("secret-of-a-test\n")
    return files


def guarding(folder: Path) -> tuple[list[str], list[str]]:
    """Options of a server behind mTLS and a token, and those of its clients."""
    files = {name: str(file) for name, file in credentials(folder).items()}
    options = {"tls-certificate": "certificate", "tls-key": "key", "tls-client-ca": "ca", "token-file": "token"}
    server = [word for option, name in options.items() for word in (f"--{option}", files[name])]
    access = {"certificate": "certificate", "key": "key", "ca": "ca", "token-file": "token"}
    return server, [word for option, name in access.items() for word in (f"--{option}", files[name])]


@contextlib.contextmanager
def small_files(size: int) -> Iterator[None]:
    """Files of this process may not grow beyond `size` bytes: a write fails after the part that fits."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def children_of(pid: int) -> list[int]:
    """The processes that a process started."""
    found: list[int] = []
    for path in Path(f"/proc/{pid}/task").glob("*/children"):
        with contextlib.suppress(OSError):  # a thread that ends meanwhile
            found += map(int, path.read_text().split())
    return found


def gone(pid: int) -> bool:
    """Whether a process ends within half a minute, with all its threads: the last one closes its sockets."""
    for _ in range(1500):
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
            if state == "Z" and len(os.listdir(f"/proc/{pid}/task")) <= 1:
                return True
        except OSError:
            return True
        time.sleep(0.02)
    return False


def charts_of(page: str) -> list[dict[str, Any]]:
    """Return what the script of a page reads of its charts."""
    return [json.loads(html.unescape(chart)) for chart in re.findall(r'data-chart="([^"]+)"', page)]
