"""A Docker engine, or Podman with a Docker socket: its containers, their shells and files, and images."""

from __future__ import annotations

import contextlib
import functools
import io
import logging
import os
import secrets
import socket
import tarfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, ClassVar

import docker
from docker.errors import APIError, DockerException, ImageNotFound, NotFound
from docker.types import LogConfig, Ulimit
from requests.exceptions import RequestException
from urllib3.exceptions import HTTPError

from starpod.env_server.authoring.environment import Unavailable
from starpod.env_server.machines.engine import (
    CAPABILITIES,
    LEASE,
    MEBIBYTE,
    ROOT,
    SERVER,
    SESSION,
    MachinePlan,
    Variables,
    identity,
    is_left_behind,
)
from starpod.env_server.machines.shell import START

logger = logging.getLogger(__name__)

ENVIRONMENT = "starpod.environment"
"""Label of a snapshot's image: id of the environment."""

_CALL_SECONDS = 60.0
"""Time limit of one call to the engine."""
_SNAPSHOTS = "starpod-snapshot"
_CONFLICT = 409
_CHUNK = 65_536
_HEADER = 8
_REMOVAL_SECONDS = 5.0
_SYMBOLIC_LINK = 1 << 27
"""Bit of a mode of Go, in which engines describe files."""


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
        with contextlib.suppress(Exception):  # wakes a thread that reads
            self._socket.shutdown(socket.SHUT_RDWR)
        resources: list[Any] = [self._socket, self._connection, getattr(self._connection, "_response", None)]
        for resource in resources:
            with contextlib.suppress(Exception):
                resource.close()


class DockerEngine:
    """A connection to a container engine.

    Attributes:
        api: the client of the engine's API.
        server: identity of this process, which labels its containers.
        errors: exceptions of calls to the engine.
        limits_disk: whether the storage driver can limit a container's disk; true until a container was refused.
    """

    errors: ClassVar[tuple[type[Exception], ...]] = (DockerException, RequestException, HTTPError, OSError)

    def __init__(self, api: Any) -> None:
        self.api = api
        self.server = identity(os.getpid())
        self.limits_disk = True

    def create(self, plan: MachinePlan, name: str, session: str, image: str) -> str:
        limits = {
            "network_mode": None if plan.network else "none",
            "mem_limit": plan.memory_mb * MEBIBYTE,
            "memswap_limit": plan.memory_mb * MEBIBYTE,
            "nano_cpus": round(plan.cpus * 1e9),
            "pids_limit": plan.processes,
            "cap_drop": ["ALL"],
            "cap_add": list(CAPABILITIES),
            "security_opt": ["no-new-privileges"],
            "ulimits": [
                Ulimit(name="core", soft=0, hard=0),
                Ulimit(name="fsize", soft=plan.storage_mb * MEBIBYTE, hard=plan.storage_mb * MEBIBYTE),
            ],
            "log_config": LogConfig(type="none"),
            "auto_remove": True,
            "init": True,
        }
        disk = {"storage_opt": {"size": f"{plan.storage_mb}m"}}
        for more in [disk, {}] if self.limits_disk else [{}]:
            try:
                container: dict[str, str] = self.api.create_container(
                    image,
                    plan.command[1:],
                    entrypoint=plan.command[:1],
                    name=name,
                    user=ROOT,
                    working_dir="/",
                    stdin_open=True,
                    healthcheck={"test": ["NONE"]},
                    labels={SERVER: self.server, SESSION: session, LEASE: plan.lease},
                    host_config=self.api.create_host_config(**limits, **more),
                )
                break
            except ImageNotFound as error:
                raise RuntimeError(f"the image {image} is gone: start the server again") from error
            except APIError as error:
                if not more or "storage" not in str(error):
                    raise
                self.limits_disk = False
                logger.warning("the engine's storage driver cannot limit a container's disk, only single files")
        return container["Id"]

    def start(self, machine: str, deadline: float) -> Frames:
        guard = Frames(self.api.attach_socket(machine, {"stdin": 1, "stdout": 1, "stderr": 1, "stream": 1}))
        self.api.start(machine)
        return guard

    def open_shell(self, machine: str, user: str, variables: Variables, folder: str, deadline: float) -> Frames:
        command = ["/bin/sh", "-c", START, "sh", folder]
        process = self.api.exec_create(
            machine, command, stdin=True, user=user, workdir="/", environment=dict(variables)
        )
        return Frames(self.api.exec_start(process["Id"], socket=True))

    def put(self, machine: str, archive: bytes) -> None:
        self.api.put_archive(machine, "/", archive)

    def read(self, machine: str, path: str, size: int) -> bytes | None:
        data = bytearray()
        try:
            chunks, entry_facts = self.api.get_archive(machine, path)
        except NotFound:
            if self.api.inspect_container(machine)["State"]["Running"]:
                return None
            raise
        if entry_facts["mode"] & _SYMBOLIC_LINK:  # Podman would give the file that it leads to
            return None
        for chunk in chunks:
            data += chunk
            if len(data) > size + tarfile.RECORDSIZE:
                break
        with tarfile.open(fileobj=io.BytesIO(data), mode="r|") as archive:
            entry = archive.next()
            content = archive.extractfile(entry) if entry and entry.isfile() else None
            return content.read(size) if content else None

    def explain(self, machine: str, error: Exception) -> str:
        if isinstance(error, EOFError):
            return f"has stopped: {error}"
        if not isinstance(error, APIError):
            return f"cannot be reached: {error}"
        if error.status_code in (404, _CONFLICT):
            return f"is gone: it was ended or removed ({error.explanation})"
        return f"failed: {error}"

    def remove(self, machine: str) -> None:
        deadline = time.monotonic() + _REMOVAL_SECONDS
        while True:
            try:
                self.api.remove_container(machine, force=True, v=True)
                return
            except APIError as error:
                if error.status_code in (404, _CONFLICT):
                    return
                if time.monotonic() > deadline:
                    raise
            time.sleep(0.1)  # Podman fails for a container that is just ending.

    def sweep(self) -> int:
        """Remove containers whose server has ended or whose lease is over, and old snapshots. Return their number."""
        count, now = 0, time.time()
        for container in self.api.containers(all=True, filters={"label": SERVER}):
            if is_left_behind(container["Labels"]):
                with contextlib.suppress(*self.errors):  # the next sweep tries it again, and this one the others
                    self.remove(container["Id"])
                    count += 1
        for image in self.api.images(filters={"label": ENVIRONMENT}):
            if float(image["Labels"].get(LEASE) or 0) < now:
                with contextlib.suppress(APIError):  # a container still uses it
                    self.api.remove_image(image["Id"])
        if count:
            logger.warning("removed containers that ended servers left behind", extra={"containers": count})
        return count

    # --- images ------------------------------------------------------------------------------------------------------

    def prepare(self, plan: MachinePlan, folder: Path | None, seconds: float, network: str) -> tuple[str, str]:
        name = plan.image
        try:
            image = self.find_image(name)
        except DockerEngine.errors as error:
            raise Unavailable(f"the image {name} cannot be had: {error}") from error
        if image is None:
            if folder is None:
                pull = functools.partial(self.api.pull, name, stream=True, decode=True)
                self._follow(pull, f"the image {name}", "pull", seconds)
            else:
                # `timeout` ends a build that hangs without output.
                options = {"rm": True, "forcerm": True, "decode": True, "network_mode": network, "timeout": seconds}
                build = functools.partial(self.api.build, path=str(folder), tag=name, **options)
                self._follow(build, f"the image of {folder}", "build", seconds)
            image = self.find_image(name)
        if image is None:
            raise Unavailable(f"the image {name} is missing")
        return image["Config"]["User"], image["Config"]["WorkingDir"] or "/"

    def find_image(self, name: str) -> dict[str, Any] | None:
        """Return the description of an image, or None if the engine does not have it."""
        with contextlib.suppress(ImageNotFound):
            image: dict[str, Any] = self.api.inspect_image(name)
            return image
        return None

    def _follow(self, start: Callable[[], Iterator[dict[str, Any]]], what: str, verb: str, seconds: float) -> None:
        logger.info("%s: waiting for its %s, at most %g s", what, verb, seconds)
        deadline, lines = time.monotonic() + seconds, [""]
        try:
            for message in start():
                lines = [*lines, str(message.get("stream", "")).strip()][-5:]
                if error := message.get("error"):
                    raise Unavailable(
                        f"{what} cannot be had: {verb}: {' | '.join(filter(None, lines))} {error}".strip()
                    )
                if time.monotonic() > deadline:
                    raise Unavailable(f"{what} cannot be had: the {verb} took longer than {seconds:g} s")
        except DockerEngine.errors as error:
            raise Unavailable(f"{what} cannot be had: {verb}: {error}") from error

    def commit(self, machine: str, environment: str, seconds: float) -> str:
        tag = secrets.token_hex(16)
        labels = {ENVIRONMENT: environment, LEASE: f"{time.time() + seconds:.0f}"}
        changes = [f'LABEL {name}="{value}"' for name, value in labels.items()]
        self.api.commit(machine, repository=_SNAPSHOTS, tag=tag, changes=changes)
        return f"{_SNAPSHOTS}:{tag}"

    def find_snapshot(self, name: str, environment: str) -> bool:
        if not name.startswith(f"{_SNAPSHOTS}:") or (image := self.find_image(name)) is None:
            return False
        return (image["Config"].get("Labels") or {}).get(ENVIRONMENT) == environment


@functools.cache
def connect() -> DockerEngine:
    """Return the connection to the engine that DOCKER_HOST names, after a sweep. Raises Unavailable."""
    try:
        client = docker.from_env(timeout=_CALL_SECONDS, max_pool_size=64)
        client.ping()
        engine = DockerEngine(client.api)
        engine.sweep()
    except DockerEngine.errors as error:
        where = os.environ.get("DOCKER_HOST", "the default socket")
        problem = str(error).removeprefix("Error while fetching server API version: ") or type(error).__name__
        raise Unavailable(
            f"no container engine answers at {where} ({problem}); start Docker or Podman, or set DOCKER_HOST"
        ) from error
    return engine
