"""The container engine of this machine: its connection, images, and the removal of what ended servers left behind."""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import secrets
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import docker
from docker.errors import APIError, DockerException, ImageNotFound
from requests.exceptions import RequestException

from starpod.env_server.authoring.environment import Unavailable

logger = logging.getLogger(__name__)

SERVER, SESSION, LEASE = "starpod.server", "starpod.session", "starpod.lease"
"""Labels of containers and images: identity of the server's process, id of the session's machine, and the Unix time
after which anyone may remove it."""
ENVIRONMENT = "starpod.environment"
"""Label of a snapshot's image: id of the environment."""

ENGINE_ERRORS = (DockerException, RequestException, OSError)
"""Errors of calls to the engine."""
_CALL_SECONDS = 60.0
"""Time limit of one call to the engine."""
_SNAPSHOTS = "starpod-snapshot"
_CONFLICT = 409


class ContainerEngine:
    """A connection to a container engine.

    Attributes:
        api: the client of the engine's API.
        server: identity of this process, which labels its containers.
        limits_disk: whether the storage driver can limit a container's disk; true until a container was refused.
    """

    def __init__(self, api: Any) -> None:
        self.api = api
        self.server = _identity(os.getpid())
        self.limits_disk = True

    def remove(self, container: str) -> None:
        """Remove a container and end all its processes. One that is gone, or is being removed, is no error."""
        try:
            self.api.remove_container(container, force=True, v=True)
        except APIError as error:
            if error.status_code not in (404, _CONFLICT):
                raise

    def sweep(self) -> int:
        """Remove containers whose server has ended or whose lease is over, and old snapshots. Return their number."""
        count, now = 0, time.time()
        for container in self.api.containers(all=True, filters={"label": SERVER}):
            labels = container["Labels"]
            if _is_dead(labels[SERVER]) or float(labels.get(LEASE, 0)) < now:
                self.remove(container["Id"])
                count += 1
        for image in self.api.images(filters={"label": ENVIRONMENT}):
            if float(image["Labels"].get(LEASE, 0)) < now:
                with contextlib.suppress(APIError):  # a container still uses it
                    self.api.remove_image(image["Id"])
        if count:
            logger.warning("removed containers that ended servers left behind", extra={"containers": count})
        return count

    # --- images ------------------------------------------------------------------------------------------------------

    def find_image(self, name: str) -> dict[str, Any] | None:
        """Return the description of an image, or None if the engine does not have it."""
        with contextlib.suppress(ImageNotFound):
            image: dict[str, Any] = self.api.inspect_image(name)
            return image
        return None

    def build_image(self, folder: Path, name: str, seconds: float, network: str) -> None:
        """Build an image from a folder with a Dockerfile. Raises Unavailable with the end of the build's output."""
        output = self.api.build(path=str(folder), tag=name, rm=True, forcerm=True, decode=True, network_mode=network)
        self._follow(output, f"the image of {folder}", "build", seconds)

    def pull_image(self, name: str, seconds: float) -> None:
        """Pull an image. Raises Unavailable."""
        self._follow(self.api.pull(name, stream=True, decode=True), f"the image {name}", "pull", seconds)

    def _follow(self, output: Iterator[dict[str, Any]], what: str, verb: str, seconds: float) -> None:
        deadline, lines = time.monotonic() + seconds, [""]
        try:
            for message in output:
                lines = [*lines, str(message.get("stream", "")).strip()][-5:]
                if error := message.get("error"):
                    raise Unavailable(
                        f"{what} cannot be had: {verb}: {' | '.join(filter(None, lines))} {error}".strip()
                    )
                if time.monotonic() > deadline:
                    raise Unavailable(f"{what} cannot be had: the {verb} took longer than {seconds:g} s")
        except ENGINE_ERRORS as error:
            raise Unavailable(f"{what} cannot be had: {verb}: {error}") from error

    def commit(self, container: str, environment: str, seconds: float) -> str:
        """Save a container's file system as an image that is kept for some seconds, and return the image's name."""
        tag = secrets.token_hex(16)
        labels = {ENVIRONMENT: environment, LEASE: f"{time.time() + seconds:.0f}"}
        changes = [f'LABEL {name}="{value}"' for name, value in labels.items()]
        self.api.commit(container, repository=_SNAPSHOTS, tag=tag, changes=changes)
        return f"{_SNAPSHOTS}:{tag}"

    def find_snapshot(self, name: str, environment: str) -> bool:
        """Return whether a name, which may be forged, is that of a snapshot of this environment."""
        if not name.startswith(f"{_SNAPSHOTS}:") or (image := self.find_image(name)) is None:
            return False
        return (image["Config"].get("Labels") or {}).get(ENVIRONMENT) == environment


@functools.cache
def connect() -> ContainerEngine:
    """Return the connection to the engine that DOCKER_HOST names, after a sweep. Raises Unavailable."""
    try:
        client = docker.from_env(timeout=_CALL_SECONDS, max_pool_size=64)
        client.ping()
        engine = ContainerEngine(client.api)
        engine.sweep()
    except ENGINE_ERRORS as error:
        where = os.environ.get("DOCKER_HOST", "the default socket")
        problem = str(error).removeprefix("Error while fetching server API version: ") or type(error).__name__
        raise Unavailable(
            f"no container engine answers at {where} ({problem}); start Docker or Podman, or set DOCKER_HOST"
        ) from error
    return engine


def _identity(process_id: int) -> str:
    """Return text that identifies a process of this boot and PID namespace, or of nowhere else."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        namespace = os.stat("/proc/self/ns/pid").st_ino
        start = Path(f"/proc/{process_id}/stat").read_text().rpartition(")")[2].split()[19]
    except OSError:
        return secrets.token_hex(16)
    return f"{boot}/{namespace}/{process_id}/{start}"


def _is_dead(server: str) -> bool:
    """Return whether the process of an identity is known to have ended. That of another machine is not known."""
    own_place = _identity(os.getpid()).split("/")[:2]
    place = server.split("/")
    if len(place) != 4 or place[:2] != own_place or not place[2].isdecimal():
        return False
    return _identity(int(place[2])) != server
