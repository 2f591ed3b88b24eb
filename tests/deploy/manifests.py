"""Kubernetes manifests as data: pods, containers and command lines in them."""

from collections.abc import Iterator
from typing import Any

import yaml

from tests.deploy.files import DEPLOY

Manifest = dict[str, Any]

KUBERNETES = DEPLOY / "kubernetes"
RENDERED = sorted(path.stem for path in (KUBERNETES / "values").glob("*.yaml"))
"""One file of values each, and one of manifests."""


def read(name: str) -> list[Manifest]:
    """The manifests of one of rendered/*.yaml."""
    return parse((KUBERNETES / "rendered" / f"{name}.yaml").read_text())


def parse(text: str) -> list[Manifest]:
    return [manifest for manifest in yaml.safe_load_all(text) if manifest]


def of_kind(manifests: list[Manifest], *kinds: str) -> list[Manifest]:
    return [manifest for manifest in manifests if manifest["kind"] in kinds]


def pods(manifests: list[Manifest]) -> Iterator[tuple[str, Manifest]]:
    """Each pod template, and whose it is."""
    for owner in of_kind([*manifests, *jobs_of_sets(manifests)], "Deployment", "Job"):
        yield owner["metadata"]["name"], owner["spec"]["template"]


def jobs_of_sets(manifests: list[Manifest]) -> list[Manifest]:
    """The Jobs that JobSets make."""
    return [
        {"apiVersion": "batch/v1", "kind": "Job", "metadata": made["metadata"], "spec": job["template"]["spec"]}
        for made in of_kind(manifests, "JobSet")
        for job in made["spec"]["replicatedJobs"]
    ]


def containers(manifests: list[Manifest]) -> Iterator[tuple[str, Manifest, Manifest]]:
    """Each container, where it stands, and its pod's spec."""
    for owner, pod in pods(manifests):
        for container in [*pod["spec"].get("initContainers", []), *pod["spec"]["containers"]]:
            yield f"{owner}/{container['name']}", container, pod["spec"]


def selects(selector: Manifest, pod: Manifest) -> bool:
    return selector.items() <= pod["metadata"]["labels"].items()


def words(container: Manifest) -> list[str]:
    """The command line, by the images' entry point."""
    return [*container.get("command", ["/opt/starpod/bin/starpod"]), *container.get("args", [])]


def flag(container: Manifest, name: str) -> str | None:
    """The value of `--name=value`; the last one counts."""
    values = [word.partition("=")[2] for word in words(container) if word.startswith(f"--{name}=")]
    return values[-1] if values else None


def find(manifests: list[Manifest], kind: str) -> Manifest:
    """The first one."""
    return of_kind(manifests, kind)[0]
