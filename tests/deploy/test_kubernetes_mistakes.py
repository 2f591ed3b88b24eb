"""The checks of manifests find what they are for: each is shown a mistake that it must see."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.deploy import manifest_checks as checks
from tests.deploy.manifests import Manifest, find, of_kind, pods, read


def pod(manifests: list[Manifest]) -> Any:
    return next(pods(manifests))[1]["spec"]


def server(manifests: list[Manifest]) -> Any:
    return pod(manifests)["containers"][0]


MISTAKES: dict[str, tuple[Callable[[list[Manifest]], Iterator[str]], str, Callable[[list[Manifest]], object], str]] = {
    "a field that there is not": (
        checks.schemas,
        "environments",
        lambda m: find(m, "Deployment")["spec"].update(replica=3),
        "refuses it",
    ),
    "a field of cert-manager that there is not": (
        checks.schemas,
        "secure",
        lambda m: find(m, "Certificate")["spec"].update(dnsName="a"),
        "unknown field .spec.dnsName",
    ),
    "a value of the wrong type": (
        checks.schemas,
        "secure",
        lambda m: find(m, "PodMonitor")["spec"].update(podMetricsEndpoints="metrics"),
        "no such resource",
    ),
    "a service without pods": (
        checks.selectors,
        "environments",
        lambda m: find(m, "Service")["spec"]["selector"].update({"starpod/service": "symbolc"}),
        "selects no pod",
    ),
    "a fleet that owns another's pods": (
        checks.selectors,
        "versions",
        lambda m: find(m, "Deployment")["spec"]["selector"]["matchLabels"].pop("starpod/fleet"),
        "selects the pods of",
    ),
    "a service with a cluster address": (
        checks.ports,
        "environments",
        lambda m: find(m, "Service")["spec"].update(clusterIP="10.0.0.1"),
        "is not headless",
    ),
    "a probe of the port with TLS": (
        checks.ports,
        "secure",
        lambda m: server(m)["readinessProbe"]["grpc"].update(port=50051),
        "does not answer without TLS",
    ),
    "another port than the one that is listened on": (
        checks.ports,
        "environments",
        lambda m: server(m)["args"].append("--port=50052"),
        "declares the ports",
    ),
    "an option that there is not": (
        checks.commands,
        "environments",
        lambda m: server(m)["args"].append("--grace=30"),
        "No such option",
    ),
    "a value that an option refuses": (
        checks.commands,
        "environments",
        lambda m: server(m)["args"].append("--max-sessions=none"),
        "not a valid integer",
    ),
    "an option that torchrun has not": (
        checks.commands,
        "trainer",
        lambda m: pod(m)["containers"][0]["args"].insert(0, "--processes=4"),
        "torchrun: unrecognized arguments",
    ),
    "a configuration with an unknown key": (
        checks.configurations,
        "trainer",
        lambda m: find(m, "ConfigMap")["data"].update({"config.yaml": "environment: {versions: '1'}"}),
        "environment.versions",
    ),
    "a file that nothing mounts": (
        checks.configurations,
        "secure",
        lambda m: server(m)["volumeMounts"].pop(),
        "which nothing mounts",
    ),
    "a grace that is shorter than the drain": (
        checks.drains,
        "environments",
        lambda m: pod(m).update(terminationGracePeriodSeconds=30),
        "drains for 300 s and is killed after 30 s",
    ),
    "a metric that no server exports": (
        checks.autoscaling,
        "environments",
        lambda m: find(m, "HorizontalPodAutoscaler")["spec"]["metrics"][0]["pods"]["metric"].update(name="sessions"),
        "goes by sessions",
    ),
    "replicas beside an autoscaler": (
        checks.autoscaling,
        "environments",
        lambda m: find(m, "Deployment")["spec"].update(replicas=2),
        "to scale",
    ),
    "an image that is not built": (
        checks.images,
        "environments",
        lambda m: server(m).update(image="starpod-server:0.1.0"),
        "no image starpod-server",
    ),
    "a moving tag": (
        checks.images,
        "environments",
        lambda m: server(m).update(image="starpod-environment:latest"),
        "is no release",
    ),
    "a token in the open": (
        checks.secrets,
        "trainer-vllm",
        lambda m: pod(m)["containers"][0].update(env=[{"name": "HF_TOKEN", "value": "hf_1"}]),
        "HF_TOKEN is inline",
    ),
    "keys that all may read": (
        checks.secrets,
        "secure",
        lambda m: pod(m)["volumes"][1]["secret"].pop("defaultMode"),
        "can be read by all",
    ),
    "a root file system that can be written": (
        checks.hardening,
        "environments",
        lambda m: server(m)["securityContext"].pop("readOnlyRootFilesystem"),
        "is not confined",
    ),
    "root": (
        checks.hardening,
        "environments",
        lambda m: pod(m)["securityContext"].pop("runAsNonRoot"),
        "may run as root",
    ),
    "no limits": (
        checks.hardening,
        "environments",
        lambda m: server(m)["resources"].pop("limits"),
        "has no limits",
    ),
    "an open network": (
        checks.hardening,
        "environments",
        lambda m: find(m, "NetworkPolicy")["spec"].update(policyTypes=["Ingress"]),
        "no network policy",
    ),
    "a certificate for another name": (
        checks.certificates,
        "secure",
        lambda m: [c["spec"].pop("dnsNames", None) for c in of_kind(m, "Certificate")],
        "no certificate names",
    ),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_found(mistake: str) -> None:
    check, name, make, complaint = MISTAKES[mistake]
    assert check in checks.CHECKS
    mistaken = read(name)
    make(mistaken)
    assert complaint in "\n".join(check(mistaken))
