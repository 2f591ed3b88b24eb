"""Container engines as machines use them: what a machine needs, and which machines an ended server left behind."""

from __future__ import annotations

import os
import secrets
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Protocol

SERVER, SESSION, LEASE = "starpod.server", "starpod.session", "starpod.lease"
"""Labels of machines and images: identity of the server's process, id of the session's machine, and the Unix time
after which anyone may remove it."""
ROOT = "0"
"""User of the commands that the server itself runs."""
SYSTEM_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
"""PATH of these commands. That of an image may begin with a folder in which an agent can replace programs."""
CAPABILITIES = ("CHOWN", "DAC_OVERRIDE", "FOWNER", "FSETID", "KILL", "NET_BIND_SERVICE", "SETGID", "SETUID")
"""Capabilities of root in a machine. No process gains others, so sudo does not work."""
_GUARD = "while read -r _; do kill -9 -1; echo ended; done"
MEBIBYTE = 2**20
live_sessions: set[str] = set()
"""Ids of the sessions of this process whose machine boots or exists."""
Variables = Mapping[str, str]


@dataclass(frozen=True, slots=True)
class MachinePlan:
    """Everything that determines a new machine."""

    environment: str
    """Id of the environment, for metrics and names."""
    image: str
    user: str
    """Name or number of the user of the session's commands."""
    folder: str
    """First working folder; empty for that of the image."""
    setup: str = ""
    """Commands that root runs at the start of the boot."""
    home: str = ""
    """HOME of the session's user; empty for the image's. Programs of others would read files there as their own."""
    variables: tuple[tuple[str, str], ...] = ()
    """Environment variables of all commands but the server's."""
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

    @property
    def command(self) -> list[str]:
        """The machine's first process.

        It ends when its input closes, which it does when the server ends, even by SIGKILL. For each line of input it
        ends all other processes, without starting one, so that it works beside a fork bomb.
        """
        return ["/bin/sh", "-c", f"set -e\n{self.setup}\nset +e\n{_GUARD}"]

    @property
    def lease(self) -> str:
        """The Unix time at which a machine that boots now has to end."""
        return f"{time.time() + self.lifetime_seconds:.0f}"


class Stream(Protocol):
    """Input and output of a process in a machine. Calls raise TimeoutError at the deadline."""

    def send(self, data: bytes, deadline: float) -> None: ...
    def read(self, deadline: float) -> bytes:
        """Return the next bytes of output, or nothing at its end."""

    def close(self) -> None: ...


class MachineEngine(Protocol):
    """Connection to what runs machines: a Docker engine, or a Kubernetes cluster. Its calls raise one of `errors`."""

    errors: ClassVar[tuple[type[Exception], ...]]
    server: str
    """Identity of this process, which labels its machines."""

    def prepare(self, plan: MachinePlan, folder: Path | None, seconds: float, network: str) -> tuple[str, str]:
        """Pull an image, or build it from a folder. Return its user and working folder; empty if they are unknown."""

    def create(self, plan: MachinePlan, name: str, session: str, image: str) -> str:
        """Create a machine and return its id. Raises RuntimeError if the image is gone."""

    def start(self, machine: str, deadline: float) -> Stream:
        """Start a machine and return the connection to its first process. A TimeoutError says the cause."""

    def open_shell(self, machine: str, user: str, variables: Variables, folder: str, deadline: float) -> Stream:
        """Start a shell of a user that reads commands from its input."""

    def put(self, machine: str, archive: bytes) -> None:
        """Unpack a tar archive in the root folder, as root."""

    def read(self, machine: str, path: str, size: int) -> bytes | None:
        """Return at most the first `size` bytes of a file, or None if there is no regular file."""

    def explain(self, machine: str, error: Exception) -> str:
        """Return why a call failed, as the rest of a sentence about the machine."""

    def remove(self, machine: str) -> None:
        """Remove a machine and end all its processes. One that is gone, or is being removed, is no error."""

    def sweep(self) -> int:
        """Remove machines whose server has ended or whose lease is over. Return their number."""

    def commit(self, machine: str, environment: str, seconds: float) -> str:
        """Save a machine's file system as an image that is kept for some seconds, and return the image's name."""

    def find_snapshot(self, name: str, environment: str) -> bool:
        """Return whether a name, which may be forged, is that of a snapshot of this environment."""


def identity(process_id: int) -> str:
    """Return text that identifies a process of this boot and PID namespace, or of nowhere else."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        namespace = os.stat("/proc/self/ns/pid").st_ino
        start = Path(f"/proc/{process_id}/stat").read_text().rpartition(")")[2].split()[19]
    except OSError:
        return secrets.token_hex(16)
    return f"{boot}/{namespace}/{process_id}/{start}"


def is_left_behind(labels: Mapping[str, str]) -> bool:
    """Return whether the labels are those of a machine whose server has ended or no longer uses it, or lease is over.

    A server no longer uses a machine if it could not remove it, or did not learn that it was created.
    """
    server, lease = labels.get(SERVER, ""), labels.get(LEASE, "")
    if not server:  # none that a server made
        return False
    is_unused = server == identity(os.getpid()) and labels.get(SESSION) not in live_sessions
    return is_unused or _is_dead(server) or not lease.isdecimal() or int(lease) < time.time()


def _is_dead(server: str) -> bool:
    """Return whether the process of an identity is known to have ended. That of another machine is not known."""
    own_place = identity(os.getpid()).split("/")[:2]
    place = server.split("/")
    if len(place) != 4 or place[:2] != own_place or not place[2].isdecimal():
        return False
    return identity(int(place[2])) != server
