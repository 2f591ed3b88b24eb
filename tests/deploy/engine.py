"""docker-compose.yml as tests use it: a project of their own, removed in the end."""

import functools
import json
import os
import shutil
import subprocess
import time
from collections.abc import Callable
from typing import Any
from urllib.request import ProxyHandler, build_opener

from tests.support import ROOT

# Ports of this machine are reached directly, whatever proxy leads outside.
_fetch = build_opener(ProxyHandler({})).open


@functools.cache
def missing() -> str:
    """Return why no containers can run here, or an empty text if they can."""
    if not shutil.which("docker"):
        return "there is no docker here"
    if _compose_command() is None:
        return "there is no docker compose here"
    found = subprocess.run(["docker", "version"], capture_output=True, text=True, timeout=30)
    return "" if found.returncode == 0 else f"no Docker engine answers: {found.stderr.strip()}"


@functools.cache
def _compose_command() -> tuple[str, ...] | None:
    """`docker compose` where that is installed, `docker-compose` else."""
    if shutil.which("docker"):
        plugin = subprocess.run(["docker", "compose", "version"], capture_output=True, timeout=30)
        if plugin.returncode == 0:
            return ("docker", "compose")
    return ("docker-compose",) if shutil.which("docker-compose") else None


def docker(*words: str) -> str:
    """Runs docker and returns its output."""
    return subprocess.run(["docker", *words], check=True, capture_output=True, text=True, timeout=120).stdout.strip()


class Compose:
    """One project. `variables` are what a user would export."""

    def __init__(self, project: str, **variables: str) -> None:
        self.project = project
        self.variables = variables

    def __call__(self, *words: str, timeout: float = 300, **variables: str) -> str:
        """Runs docker compose and returns its output. Raises AssertionError with all that it wrote."""
        environment = {**os.environ, **self.variables, **variables, "COMPOSE_PROJECT_NAME": self.project}
        command = [*(_compose_command() or ()), *words]
        done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=timeout)
        assert done.returncode == 0, f"{' '.join(command)}\n{done.stdout}\n{done.stderr}"
        return done.stdout.strip()

    def containers(self, service: str = "") -> list[str]:
        """The ids of a service's containers, or of all, running or not."""
        filters = [f"--filter=label=com.docker.compose.project={self.project}"]
        if service:
            filters.append(f"--filter=label=com.docker.compose.service={service}")
        return docker("ps", "--all", "--quiet", *filters).split()

    def wait(self, service: str, seconds: float = 300, watch: Callable[[], None] = lambda: None) -> None:
        """Wait until the service's container has exited with status 0. `watch` is called repeatedly while waiting."""
        (container,) = self.containers(service)
        limit = time.monotonic() + seconds
        while (state := inspect(container)["State"])["Running"]:
            assert time.monotonic() < limit, docker("logs", container)
            watch()
            time.sleep(0.1)
        logs = subprocess.run(["docker", "logs", container], capture_output=True, text=True, timeout=30)
        assert state["ExitCode"] == 0, logs.stdout + logs.stderr

    def wait_until_healthy(self, service: str, seconds: float = 300) -> None:
        """Wait until the service's container reports that it is healthy."""
        (container,) = self.containers(service)
        limit = time.monotonic() + seconds
        while (state := inspect(container)["State"])["Health"]["Status"] != "healthy":
            assert time.monotonic() < limit, state
            time.sleep(0.5)


def inspect(thing: str) -> dict[str, Any]:
    """Return the container engine's description of a container or an image."""
    (found,) = json.loads(docker("inspect", thing))
    return dict(found)


def measured(container: str, series: str) -> float:
    """A series of a server's Prometheus metrics, summed over its labels."""
    (port,) = inspect(container)["NetworkSettings"]["Ports"]["9100/tcp"]
    with _fetch(f"http://127.0.0.1:{port['HostPort']}/metrics", timeout=10) as page:
        lines = page.read().decode().splitlines()
    return sum(float(line.split()[-1]) for line in lines if line.startswith((f"{series} ", f"{series}{{")))
