"""The checks of manifests find what they are for: each is shown a mistake that it must see."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.deploy import manifest_checks as checks
from tests.deploy.manifests import Manifest, find, of_kind, pods, read


def spec(manifests: list[Manifest], kind: str = "Deployment") -> Any:
    return find(manifests, kind)["spec"]


def pod(manifests: list[Manifest]) -> Any:
    return next(pods(manifests))[1]["spec"]


def server(manifests: list[Manifest]) -> Any:
    return pod(manifests)["containers"][0]


def configure(manifests: list[Manifest], config: str) -> None:
    find(manifests, "ConfigMap")["data"]["config.yaml"] = config


def metric(manifests: list[Manifest]) -> Any:
    return spec(manifests, "HorizontalPodAutoscaler")["metrics"][0]["pods"]["metric"]


TOKEN = {"name": "HF_TOKEN", "value": "hf_1"}
SERVED = "environments"
Mistake = tuple[Callable[[list[Manifest]], Iterator[str]], str, Callable[[list[Manifest]], Any], str]
MISTAKES: list[Mistake] = [
    (checks.schemas, SERVED, lambda m: spec(m).update(replica=3), "refuses it"),
    (checks.schemas, "secure", lambda m: spec(m, "Certificate").update(dnsName="a"), "unknown field .spec.dnsName"),
    (checks.schemas, "secure", lambda m: spec(m, "PodMonitor").update(podMetricsEndpoints="m"), "no such resource"),
    (
        checks.schemas,
        "trainer-nodes",
        lambda m: spec(m, "JobSet").update(network={"dns": True}),
        "unknown field .network.dns",
    ),
    (checks.selectors, SERVED, lambda m: spec(m, "Service")["selector"].update(a="b"), "selects no pod"),
    (checks.selectors, "versions", lambda m: spec(m)["selector"]["matchLabels"].popitem(), "selects the pods of"),
    (checks.ports, SERVED, lambda m: spec(m, "Service").update(clusterIP="10.0.0.1"), "is not headless"),
    (checks.ports, "secure", lambda m: server(m)["readinessProbe"]["grpc"].update(port=50051), "without TLS"),
    (checks.ports, SERVED, lambda m: server(m)["args"].append("--port=50052"), "declares the ports"),
    (checks.commands, SERVED, lambda m: server(m)["args"].append("--grace=30"), "No such option"),
    (checks.commands, SERVED, lambda m: server(m)["args"].append("--max-sessions=no"), "not a valid integer"),
    (checks.commands, "trainer", lambda m: server(m)["args"].insert(0, "--processes=4"), "torchrun: unrecognized"),
    (checks.configurations, "trainer", lambda m: configure(m, "environment: {v: 1}"), "environment.v"),
    (checks.configurations, "secure", lambda m: server(m)["volumeMounts"].pop(), "which nothing mounts"),
    (checks.drains, SERVED, lambda m: pod(m).update(terminationGracePeriodSeconds=30), "300 s and is killed after 30"),
    (checks.autoscaling, SERVED, lambda m: metric(m).update(name="sessions"), "goes by sessions"),
    (checks.autoscaling, SERVED, lambda m: spec(m).update(replicas=2), "to scale"),
    (checks.images, SERVED, lambda m: server(m).update(image="server:0.1.0"), "no image server"),
    (checks.images, SERVED, lambda m: server(m).update(image="starpod-environment:latest"), "is no release"),
    (checks.secrets, "trainer-vllm", lambda m: server(m).update(env=[TOKEN]), "HF_TOKEN is inline"),
    (checks.secrets, "secure", lambda m: pod(m)["volumes"][1]["secret"].pop("defaultMode"), "can be read by all"),
    (checks.hardening, SERVED, lambda m: server(m)["securityContext"].popitem(), "is not confined"),
    (checks.hardening, SERVED, lambda m: pod(m)["securityContext"].pop("runAsNonRoot"), "may run as root"),
    (checks.hardening, SERVED, lambda m: server(m)["resources"].pop("limits"), "has no limits"),
    (checks.hardening, SERVED, lambda m: spec(m, "NetworkPolicy").update(policyTypes=["Ingress"]), "no network policy"),
    (
        checks.certificates,
        "secure",
        lambda m: [c["spec"].pop("dnsNames", 0) for c in of_kind(m, "Certificate")],
        "no certificate names",
    ),
]


@pytest.mark.parametrize(("check", "name", "make", "complaint"), MISTAKES, ids=[mistake[3] for mistake in MISTAKES])
def test_a_mistake_is_found(check: Any, name: str, make: Any, complaint: str) -> None:
    assert check in checks.CHECKS
    mistaken = read(name)
    make(mistaken)
    assert complaint in "\n".join(check(mistaken))
