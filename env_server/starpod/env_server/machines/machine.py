"""A container as the machine of one session: its boot, commands, files, snapshot and end."""

from __future__ import annotations

import io
import logging
import secrets
import shlex
import tarfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

from docker.errors import APIError, ImageNotFound, NotFound
from docker.types import LogConfig, Ulimit

from starpod.env_server.authoring.environment import Busy, MachineLost
from starpod.env_server.machines.engine import ENGINE_ERRORS, LEASE, SERVER, SESSION, ContainerEngine
from starpod.env_server.machines.metrics import BOOT_SECONDS, FAILED_BOOTS
from starpod.env_server.machines.shell import CommandResult, Frames, Shell

logger = logging.getLogger(__name__)

ROOT = "0"
"""User of the commands that the server itself runs."""
CAPABILITIES = ("CHOWN", "DAC_OVERRIDE", "FOWNER", "FSETID", "KILL", "NET_BIND_SERVICE", "SETGID", "SETUID")
"""Capabilities of root in a machine. No process gains others, so sudo does not work."""
_GUARD = "echo ready; while read -r _; do kill -9 -1; echo ended; done"
"""The machine's first process ends when its input closes, which it does when the server ends, even by SIGKILL. For each
line it ends all other processes, without starting one, so that it works beside a fork bomb."""
_KILL_SECONDS = 20.0
_SERVER_SECONDS = 10.0
"""Time limit of a command that the server itself runs."""
_RETRY_SECONDS = 5.0
_MEBIBYTE = 2**20
UNLIMITED = float("inf")
MAX_OUTPUT = 64 * _MEBIBYTE
"""Bytes of output after which a command is ended."""


@dataclass(frozen=True, slots=True)
class MachinePlan:
    """Everything that determines a new machine."""

    environment: str
    """Id of the environment, for metrics and names."""
    image: str
    user: str
    """Name or number of the user of the session's commands."""
    folder: str
    """First working folder."""
    setup: str = ""
    """Commands that root runs at the start of the boot."""
    variables: tuple[tuple[str, str], ...] = ()
    """Environment variables of all commands."""
    network: bool = False
    """Whether the machine has the engine's default network. It has none otherwise."""
    cpus: float = 1.0
    memory_mb: int = 2048
    storage_mb: int = 10240
    """Maximum size of what is written. Storage drivers that cannot limit it get a limit on single files."""
    processes: int = 512
    """Maximum number of processes and threads."""
    boot_seconds: float = 60.0
    lifetime_seconds: float = 21_600.0
    """Seconds after which any server may remove the machine, and commands of its session fail."""
    warm: int = 1
    """Number of machines that are booted ahead, once the first one was used."""


@dataclass(eq=False)
class Machine:
    """A running container. All methods raise MachineLost if it is gone."""

    engine: ContainerEngine
    plan: MachinePlan
    name: str
    id: str
    folder: str
    guard: Frames
    booted: float = field(default_factory=time.monotonic)
    closed: bool = False
    _shells: dict[str, Shell] = field(default_factory=dict)

    @classmethod
    def boot(cls, engine: ContainerEngine, plan: MachinePlan, image: str = "", folder: str = "") -> Machine:
        """Boot a machine, perhaps with another image and working folder than the plan's. Raises Busy."""
        start = time.monotonic()
        session = secrets.token_hex(8)
        name = f"starpod-{plan.environment}-{session}"
        container = ""
        try:
            container = _create(engine, plan, name, session, image or plan.image)
            guard = Frames(engine.api.attach_socket(container, {"stdin": 1, "stdout": 1, "stream": 1}))
            engine.api.start(container)
            machine = cls(engine, plan, name, container, folder or plan.folder, guard)
            _expect(guard, b"ready", start + plan.boot_seconds)
            status = machine.run(":", start + plan.boot_seconds - time.monotonic()).status
            if status != 0:
                raise TimeoutError("its shell did not answer")
        except ImageNotFound as error:
            raise RuntimeError(f"the image {image or plan.image} is gone: start the server again") from error
        except (*ENGINE_ERRORS, MachineLost, EOFError) as error:
            FAILED_BOOTS.labels(plan.environment).inc()
            if container:
                with suppress(*ENGINE_ERRORS):
                    engine.remove(container)
            problem = f"no machine booted within {plan.boot_seconds:g} s: {error or type(error).__name__}"
            logger.warning("%s: %s", plan.environment, problem)
            raise Busy(problem, _RETRY_SECONDS) from error
        machine.booted = time.monotonic()
        BOOT_SECONDS.labels(plan.environment).observe(machine.booted - start)
        return machine

    def run(
        self, command: str, seconds: float, *, user: str = "", limit: int = 16_384, max_bytes: float = MAX_OUTPUT
    ) -> CommandResult:
        """Run a command in the shell of a user, by default the session's. The other arguments are those of `Shell.run`.

        If it does not end in time, all processes of the machine are ended.
        """
        user = user or self.plan.user
        if user not in self._shells:
            self._shells[user] = self._shell(user, self.folder, {})
        result = self._run(self._shells[user], command, seconds, limit, max_bytes)
        if user == self.plan.user:
            self.folder = result.folder
        return result

    def run_apart(self, command: str, seconds: float, user: str, variables: Mapping[str, str]) -> CommandResult:
        """Run a command in a new shell in the plan's folder, with more variables. Its output may have any length."""
        shell = self._shell(user, self.plan.folder, variables)
        try:
            return self._run(shell, command, seconds, 16_384, UNLIMITED)
        finally:
            shell.drop()

    def _shell(self, user: str, folder: str, variables: Mapping[str, str]) -> Shell:
        return Shell(self.engine.api, self.id, user, folder, {**dict(self.plan.variables), **variables})

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
        if shell.run(":", _SERVER_SECONDS, 0, MAX_OUTPUT).status != 0:
            self._end_processes()
            if shell.run(":", _SERVER_SECONDS, 0, MAX_OUTPUT).status != 0:
                raise MachineLost("has stopped")

    def clear(self, *paths: str) -> None:
        """Remove files and folders as root. All processes are ended first if they leave little room for others."""
        # The shell counts processes without starting one, so that it works beside a fork bomb.
        has_room = f"set -- /proc/[0-9]*; [ $# -lt {self.plan.processes // 2} ]"
        command = f"{has_room} && rm -rf -- {shlex.join(paths)}"
        if self.run(command, _SERVER_SECONDS, user=ROOT).status != 0:
            self._end_processes()
            if self.run(command, _SERVER_SECONDS, user=ROOT).status != 0:
                raise MachineLost(f"cannot remove {' '.join(paths)}")

    def put(self, folder: Path, target: str) -> None:
        """Copy a folder into the machine. Root owns the copies, and scripts can be executed."""
        data = io.BytesIO()
        with tarfile.open(fileobj=data, mode="w") as archive:
            archive.add(folder, arcname=target.strip("/"), filter=_as_root_file)
        with self._errors():
            self.engine.api.put_archive(self.id, "/", data.getvalue())

    def read(self, path: str, size: int) -> bytes | None:
        """Return at most the first `size` bytes of a file, or None if there is no regular file."""
        data = b""
        with self._errors():
            try:
                chunks, _ = self.engine.api.get_archive(self.id, path)
            except NotFound:
                if not self.answers():
                    raise MachineLost("has stopped") from None
                return None
            for chunk in chunks:
                data += chunk
                if len(data) > size + tarfile.RECORDSIZE:
                    break
        with tarfile.open(fileobj=io.BytesIO(data), mode="r|") as archive:
            entry = archive.next()
            content = archive.extractfile(entry) if entry and entry.isfile() else None
            return content.read(size) if content else None

    def commit(self, seconds: float) -> str:
        """Save the file system as an image that is kept for some seconds, and return its name."""
        with self._errors():
            return self.engine.commit(self.id, self.plan.environment, seconds)

    def answers(self) -> bool:
        """Return whether the machine runs commands."""
        try:
            return self.run(":", 10.0).status == 0
        except MachineLost:
            return False

    def close(self) -> None:
        """Remove the machine. It may be called repeatedly and during a command, which then raises MachineLost."""
        if self.closed:
            return
        self.closed = True
        for shell in self._shells.values():
            shell.drop()
        self.guard.close()
        self.engine.remove(self.id)

    def _end_processes(self) -> None:
        """End all processes but the first one. Raises MachineLost if they do not end."""
        deadline = time.monotonic() + _KILL_SECONDS
        try:
            self.guard.send(b"\n", deadline)
            _expect(self.guard, b"ended", deadline)
        except (OSError, EOFError) as error:
            self.close()
            raise MachineLost(f"is gone, or its processes cannot be ended: {error}") from error
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
        except APIError as error:
            is_gone = error.status_code in (404, 409)
            raise MachineLost("is gone: it was ended or removed" if is_gone else f"failed: {error}") from error
        except ENGINE_ERRORS as error:
            raise MachineLost(f"cannot be reached: {error}") from error
        if self.closed:
            raise MachineLost("was removed")


def _create(engine: ContainerEngine, plan: MachinePlan, name: str, session: str, image: str) -> str:
    """Create a container and return its id. Its disk is limited if the storage driver can do that."""
    api = engine.api
    limits = {
        "network_mode": None if plan.network else "none",
        "mem_limit": plan.memory_mb * _MEBIBYTE,
        "memswap_limit": plan.memory_mb * _MEBIBYTE,
        "nano_cpus": round(plan.cpus * 1e9),
        "pids_limit": plan.processes,
        "cap_drop": ["ALL"],
        "cap_add": list(CAPABILITIES),
        "security_opt": ["no-new-privileges"],
        "ulimits": [
            Ulimit(name="core", soft=0, hard=0),
            Ulimit(name="fsize", soft=plan.storage_mb * _MEBIBYTE, hard=plan.storage_mb * _MEBIBYTE),
        ],
        "log_config": LogConfig(type="none"),
        "auto_remove": True,
        "init": True,
    }

    disk = {"storage_opt": {"size": f"{plan.storage_mb}m"}}
    for more in [disk, {}] if engine.limits_disk else [{}]:
        try:
            container: dict[str, str] = api.create_container(
                image,
                ["-c", f"set -e\n{plan.setup}\nset +e\n{_GUARD}"],
                entrypoint="/bin/sh",
                name=name,
                user=ROOT,
                working_dir="/",
                stdin_open=True,
                healthcheck={"test": ["NONE"]},
                labels={SERVER: engine.server, SESSION: session, LEASE: f"{time.time() + plan.lifetime_seconds:.0f}"},
                host_config=api.create_host_config(**limits, **more),
            )
            break
        except APIError as error:
            if not more or "storage" not in str(error):
                raise
            engine.limits_disk = False
            logger.warning("the engine's storage driver cannot limit a container's disk, only the size of its files")
    return container["Id"]


def _expect(guard: Frames, word: bytes, deadline: float) -> None:
    """Wait for a word of the guard. Raises TimeoutError at the deadline and EOFError at the end."""
    seen = b""
    while word not in seen:
        data = guard.read(deadline)
        if not data:
            raise EOFError(f"its first process ended: {seen.decode(errors='replace').strip()}")
        seen = (seen + data)[-4096:]


def _as_root_file(entry: tarfile.TarInfo) -> tarfile.TarInfo:
    entry.uid = entry.gid = 0
    entry.uname = entry.gname = "root"
    if entry.name.endswith(".sh"):
        entry.mode |= 0o755
    return entry
