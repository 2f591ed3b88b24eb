"""A container as the machine of one session: its boot, commands, files, snapshot and end."""

from __future__ import annotations

import io
import logging
import re
import secrets
import shlex
import socket
import tarfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path, PurePosixPath

from starpod.env_server.authoring.environment import Busy, MachineLost
from starpod.env_server.machines import relay
from starpod.env_server.machines.engine import (
    MEBIBYTE,
    ROOT,
    SYSTEM_PATH,
    MachineEngine,
    MachinePlan,
    Stream,
    live_sessions,
)
from starpod.env_server.machines.metrics import BOOT_SECONDS, FAILED_BOOTS
from starpod.env_server.machines.shell import CommandResult, Shell

logger = logging.getLogger(__name__)

_SERVER_SECONDS = 60.0
"""Time limit of what the server itself does in a machine, which may take long beside a fork bomb."""
_RETRY_SECONDS = 5.0
_ARCHIVE = "/.starpod-artifacts.tar"
_CHANGED = 1
"""Exit status of tar if a file grew while it was read, such as the log of a service."""
_EMPTY = bytes(2 * tarfile.BLOCKSIZE)
"""A tar archive without files."""
_OWN_VARIABLES = {"PATH": SYSTEM_PATH}
"""Variables of the server's own commands."""
UNLIMITED = float("inf")
_RELAY = shlex.quote(Path(relay.__file__).read_text(encoding="utf-8"))
MAX_OUTPUT = 64 * MEBIBYTE
"""Bytes of output after which a command is ended."""


@dataclass(eq=False)
class Machine:
    """A running container. All methods raise MachineLost if it is gone."""

    engine: MachineEngine
    plan: MachinePlan
    name: str
    id: str
    folder: str
    guard: Stream
    booted: float = field(default_factory=time.monotonic)
    closed: bool = False
    _shells: dict[str, Shell] = field(default_factory=dict)
    _channel: Stream | None = None
    """Connection to the relay's process in the machine."""
    _relay: threading.Thread | None = None

    @classmethod
    def boot(cls, engine: MachineEngine, plan: MachinePlan, image: str = "", folder: str = "") -> Machine:
        """Boot a machine, perhaps with another image and working folder than the plan's. Raises Busy."""
        start = time.monotonic()
        session = secrets.token_hex(8)
        name = f"starpod-{re.sub('[^a-z0-9]+', '-', plan.environment)[:38].strip('-')}-{session}"
        deadline = start + plan.boot_seconds
        container = ""
        failures: tuple[type[Exception], ...] = (MachineLost, *engine.errors)
        live_sessions.add(session)
        try:
            container = engine.create(plan, name, session, image or plan.image)
            guard = engine.start(container, deadline)
            machine = cls(engine, plan, name, container, folder or plan.folder, guard)
            machine._end_processes(deadline)  # waits until the setup is done
            if machine.run(":", deadline - time.monotonic()).status != 0:
                raise TimeoutError("its shell did not answer")
        except BaseException as error:
            live_sessions.discard(session)
            if not isinstance(error, failures):
                raise
            FAILED_BOOTS.labels(plan.environment).inc()
            cause = str(error) or type(error).__name__
            if not isinstance(error, TimeoutError):
                cause = f"it {error if isinstance(error, MachineLost) else engine.explain(container, error)}"
            problem = f"no machine booted within {plan.boot_seconds:g} s: {cause}"
            if container:
                with suppress(*engine.errors):
                    engine.remove(container)
            logger.warning("%s: %s", plan.environment, problem)
            raise Busy(problem, _RETRY_SECONDS) from error
        machine.booted = time.monotonic()
        BOOT_SECONDS.labels(plan.environment).observe(machine.booted - start)
        return machine

    def run(
        self, command: str, seconds: float, *, user: str = "", limit: int = 16_384, max_bytes: float = MAX_OUTPUT
    ) -> CommandResult:
        """Run a command in the session's shell. The other arguments are those of `Shell.run`.

        If it does not end in time, all processes of the machine are ended.

        Args:
            user: ROOT for a command of the server, in a shell of its own even if the session's user is root.
        """
        if user not in self._shells:
            self._shells[user] = self._shell(user)
        result = self._run(self._shells[user], command, seconds, limit, max_bytes)
        if not user:
            self.folder = result.folder
        return result

    def run_apart(self, command: str, seconds: float, user: str, variables: Mapping[str, str]) -> CommandResult:
        """Run a command in a new shell in the plan's folder, with more variables. Its output may have any length."""
        values = {**dict(self.plan.variables), **variables}
        shell = Shell(partial(self.engine.open_shell, self.id, user, values), self.plan.folder)
        try:
            return self._run(shell, command, seconds, 16_384, UNLIMITED)
        finally:
            shell.drop()

    def _shell(self, user: str) -> Shell:
        home = {"HOME": self.plan.home} if self.plan.home else {}
        values = _OWN_VARIABLES if user else {**home, **dict(self.plan.variables)}
        return Shell(partial(self.engine.open_shell, self.id, user or self.plan.user, values), self.folder)

    def _run(self, shell: Shell, command: str, seconds: float, limit: int, max_bytes: float) -> CommandResult:
        with self._errors():
            result = shell.run(command, seconds, limit, max_bytes)
            if result.problem and shell.running:
                self._end_processes()
                shell.drop()
            elif result.problem:
                self._revive(shell)
        return result

    def _revive(self, shell: Shell) -> None:
        """Start a shell that has ended, or raise MachineLost if that is because the machine has ended.

        Beside a fork bomb no shell can be started, so all processes are ended.
        """
        result = _run_until_success(self, lambda: shell.run(":", _SERVER_SECONDS, 1_000, MAX_OUTPUT))
        if result.status != 0:
            problem = f"no shell can be started: {result.text.strip() or result.problem}"
            raise MachineLost(self.engine.explain(self.id, EOFError(problem)))

    def clear(self, *paths: str) -> None:
        """Remove files and folders as root. All processes are ended first if they leave little room for others."""
        # The shell counts processes without starting one, so that it works beside a fork bomb.
        has_room = f"set -- /proc/[0-9]*; [ $# -lt {self.plan.processes // 2} ]"
        command = f"{has_room} && rm -rf -- {shlex.join(paths)}"
        if _run_until_success(self, lambda: self.run(command, _SERVER_SECONDS, user=ROOT)).status != 0:
            raise MachineLost(f"cannot remove {' '.join(paths)}")

    def put(self, folder: Path, target: str) -> None:
        """Copy a folder into the machine. Root owns the copies, and scripts can be executed."""
        data = io.BytesIO()
        with tarfile.open(fileobj=data, mode="w") as archive:
            archive.add(folder, arcname=target.strip("/"), filter=_as_root_file)
        self.unpack(data.getvalue())

    def pack(self, paths: Sequence[str], size: int) -> bytes:
        """Return a tar archive of the files and folders that exist, without links and special files.

        Raises:
            RuntimeError: the archive cannot be made, or is larger than `size` bytes.
        """
        existing = f'set --; for path in {shlex.join(paths)}; do [ ! -e "$path" ] || set -- "$@" "${{path#/}}"; done'
        command = f'({existing}; [ $# = 0 ] || tar -C / -cf {_ARCHIVE} -- "$@")'
        self.clear(_ARCHIVE)
        result = self.run(command, _SERVER_SECONDS, user=ROOT)
        data = self.read(_ARCHIVE, size + 1) or b""
        is_packed = result.status in (0, _CHANGED)
        if not is_packed or len(data) > size:
            problem = f"they have more than {size:,} bytes" if is_packed else result.text[-500:]
            raise RuntimeError(f"the artifacts cannot be copied: {problem}")
        try:
            return _without_links(data, [PurePosixPath(path.strip("/")) for path in paths])
        except (tarfile.TarError, EOFError) as error:
            raise RuntimeError(f"the artifacts cannot be copied: {error}") from error

    def unpack(self, archive: bytes) -> None:
        """Unpack a tar archive in the root folder."""
        with self._errors():
            self.engine.put(self.id, archive)

    def read(self, path: str, size: int) -> bytes | None:
        """Return at most the first `size` bytes of a file, or None if there is no regular file."""
        with self._errors():
            return self.engine.read(self.id, path, size)

    def connect(self, address: tuple[str, int] | None) -> None:
        """Let programs in the machine reach an address outside, at 127.0.0.1 and the same port; for None, end that.

        It is called before each command, because the end of all processes ends this too. Raises RuntimeError if it is
        not possible in a new machine. Later it is the agent that takes the port or all processes.
        """
        if address is None:
            if self._channel:
                self._channel.close()
            self._channel = None
            return
        if self._channel and self._relay and self._relay.is_alive():
            return
        deadline = time.monotonic() + self.plan.boot_seconds
        with self._errors():
            channel = self._channel = self.engine.open_shell(self.id, ROOT, _OWN_VARIABLES, "/", deadline)
            with suppress(TimeoutError, ConnectionError):
                channel.send(f"exec python3 -I -S -c {_RELAY} {address[1]} 2>/dev/null\n".encode(), deadline)
                if channel.read(deadline) == relay.READY:
                    end = time.monotonic() + min(self.plan.lifetime_seconds, 1e6)
                    end_here = relay.Relay(lambda: channel.read(end), lambda data: channel.send(data, end))
                    dial = (lambda: socket.create_connection(address),)
                    self._relay = threading.Thread(target=end_here.run, args=dial, daemon=True)
                    self._relay.start()
                    return
        self.connect(None)
        if not self._relay:
            raise RuntimeError(
                f"programs in the container cannot reach {address[0]}:{address[1]}: the image {self.plan.image} needs "
                f"python3 of at least 3.8, and no other program may listen on port {address[1]}"
            )

    def commit(self, seconds: float) -> str:
        """Save the file system as an image that is kept for some seconds, and return its name.

        Raises Busy if that fails and the machine still runs: no session is lost by its snapshot.
        """
        try:
            with self._errors():
                return self.engine.commit(self.id, self.plan.environment, seconds)
        except MachineLost as error:
            if self.closed or not self.answers():
                raise
            raise Busy(f"its container cannot be saved: it {error}", _RETRY_SECONDS) from error

    @property
    def is_old(self) -> bool:
        """Whether less than half of the machine's lifetime is left."""
        return time.monotonic() - self.booted > self.plan.lifetime_seconds / 2

    def answers(self) -> bool:
        """Return whether the machine runs commands."""
        try:
            return self.run(":", 10.0).status == 0
        except MachineLost:
            return False

    def close(self) -> None:
        """Remove the machine now, or leave that to a sweep if the engine cannot do it.

        It may be called repeatedly and during a command, which then raises MachineLost.
        """
        if self.closed:
            return
        self.closed = True
        for shell in self._shells.values():
            shell.drop()
        self.connect(None)
        self.guard.close()
        live_sessions.discard(self.name.rpartition("-")[2])
        try:
            self.engine.remove(self.id)
        except self.engine.errors as error:
            logger.warning("%s is left to the next sweep: it %s", self.name, self.engine.explain(self.id, error))

    def _end_processes(self, deadline: float = 0.0) -> None:
        """End all processes but the first one. Raises MachineLost if they do not end."""
        deadline = deadline or time.monotonic() + _SERVER_SECONDS
        output = b""
        try:
            self.guard.send(b"\n", deadline)
            while b"ended" not in output:
                data = self.guard.read(deadline)
                if not data:
                    raise EOFError(f"its first process ended: {output.decode(errors='replace').strip()}")
                output = (output + data)[-4096:]
        except (OSError, EOFError) as error:
            is_late = isinstance(error, TimeoutError)
            problem = "does not answer" if is_late else self.engine.explain(self.id, error)
            self.close()
            raise MachineLost(problem) from error
        self.connect(None)
        for shell in self._shells.values():
            shell.drop()

    @contextmanager
    def _errors(self) -> Iterator[None]:
        """Raise MachineLost for errors of the engine and for use after the end."""
        if time.monotonic() - self.booted > self.plan.lifetime_seconds:
            self.close()
        if self.closed:
            raise MachineLost(f"was removed; it may exist for {self.plan.lifetime_seconds:g} s")
        try:
            yield
        except self.engine.errors as error:
            raise MachineLost(self.engine.explain(self.id, error)) from error
        if self.closed:
            raise MachineLost("was removed")


def _without_links(archive: bytes, roots: Sequence[PurePosixPath]) -> bytes:
    """Return an archive with only the files and folders below `roots`, which everyone may read.

    The archive was made in a machine whose programs its agent may have replaced.
    """
    safe = io.BytesIO()
    with tarfile.open(fileobj=io.BytesIO(archive or _EMPTY)) as source, tarfile.open(fileobj=safe, mode="w") as target:
        for entry in source:
            if entry.issparse() or not 0 <= entry.size <= len(archive):
                raise tarfile.ReadError(f"{entry.name} has an impossible size")
            path = PurePosixPath(entry.name)
            if ".." in path.parts or not any(path.is_relative_to(root) for root in roots):
                continue
            if entry.isdir():
                entry.mode = entry.mode & 0o777 | 0o555
                target.addfile(_as_root_file(entry))
            elif entry.isfile():
                entry.mode = entry.mode & 0o777 | 0o444
                target.addfile(_as_root_file(entry), source.extractfile(entry))
    return safe.getvalue()


def _run_until_success(machine: Machine, run: Callable[[], CommandResult]) -> CommandResult:
    """Run one of the server's own commands. While it fails, end all processes of the machine and run it again.

    Ended processes count towards the limit until the first process has reaped them, which takes a moment for a fork
    bomb.
    """
    result = run()
    deadline = time.monotonic() + _SERVER_SECONDS
    while result.status != 0 and time.monotonic() < deadline:
        machine._end_processes()
        time.sleep(0.1)
        result = run()
    return result


def _as_root_file(entry: tarfile.TarInfo) -> tarfile.TarInfo:
    entry.uid = entry.gid = 0
    entry.uname = entry.gname = "root"
    if entry.name.endswith(".sh"):
        entry.mode |= 0o755
    return entry
