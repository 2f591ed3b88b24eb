"""Checks of Kubernetes manifests. Each one yields a sentence per problem."""

import functools
import re
from collections.abc import Iterator
from typing import Any

import click
import kubernetes_validate
import yaml
from kubernetes_validate import utils

from starpod.cli.main import starpod
from starpod.trainer.configuration.loading import parse_config
from starpod.trainer.configuration.section import ConfigError
from tests.deploy.files import project, services
from tests.deploy.manifests import KUBERNETES, Manifest, containers, flag, jobs_of_sets, of_kind, pods, selects, words
from tests.deploy.test_files import exported

VERSIONS = ("1.29", "1.37")
"""The oldest Kubernetes that the chart admits, and the newest whose schemas are at hand."""
utils.schema_contents = functools.cache(utils.schema_contents)  # a MB each time else
JOB_SET = {
    *("", ".network", ".network.enableDNSHostnames", ".network.publishNotReadyAddresses"),
    *(".failurePolicy", ".failurePolicy.maxRestarts", ".failurePolicy.rules", ".failurePolicy.rules[0]"),
    *(
        f".failurePolicy.rules[0].{name}"
        for name in ("name", "action", "onJobFailureReasons", "onJobFailureReasons[0]")
    ),
    *(".replicatedJobs", *(f".replicatedJobs[0]{name}" for name in ("", ".name", ".replicas"))),
}
"""Fields of jobset.x-k8s.io/v1alpha2 that the chart uses; the Job in it is checked as a Job."""
CONFINED = {"allowPrivilegeEscalation": False, "readOnlyRootFilesystem": True, "capabilities": {"drop": ["ALL"]}}


def schemas(manifests: list[Manifest]) -> Iterator[str]:
    """Unknown fields, missing ones and wrong types."""
    for manifest in [*manifests, *jobs_of_sets(manifests)]:
        where = f"{manifest['kind']} {manifest['metadata']['name']}"
        if manifest["kind"] == "JobSet":
            yield from (
                f"{where}: unknown field {path}"
                for path in sorted(paths(manifest["spec"]) - JOB_SET)
                if "template" not in path
            )
            continue
        if re.search("cert-manager|coreos", manifest["apiVersion"]):
            yield from (f"{where}: {problem}" for problem in custom(manifest))
            continue
        for version in VERSIONS:
            try:
                kubernetes_validate.validate(manifest, version, strict=True)
            except (kubernetes_validate.ValidationError, kubernetes_validate.SchemaNotFoundError) as error:
                yield f"{where}: Kubernetes {version} refuses it: {error.message}"


def custom(manifest: Manifest) -> Iterator[str]:
    """Check resources of cert-manager and of the Prometheus operator against their schemas."""
    from cloudcoil.models.cert_manager import v1 as cert_manager
    from cloudcoil.models.prometheus_operator import v1 as operator

    models = {
        "cert-manager.io/v1": cert_manager,
        "monitoring.coreos.com/v1": operator,
    }
    try:
        model = getattr(models[manifest["apiVersion"]], manifest["kind"]).model_validate(manifest)
    except (KeyError, AttributeError, ValueError) as error:
        yield f"no such resource: {error}"
        return
    # The models leave out what they do not know.
    known = model.model_dump(by_alias=True, exclude_unset=True, mode="json")
    yield from (f"unknown field {path}" for path in paths(manifest) - paths(known))


def paths(value: Any, path: str = "") -> set[str]:
    if isinstance(value, dict):
        return {path}.union(*(paths(item, f"{path}.{key}") for key, item in value.items()))
    if isinstance(value, list):
        return {path}.union(*(paths(item, f"{path}[{place}]") for place, item in enumerate(value)))
    return {path}


def selectors(manifests: list[Manifest]) -> Iterator[str]:
    """Selectors that find nothing, or what is another's."""
    templates = dict(pods(manifests))
    for deployment in of_kind(manifests, "Deployment"):
        name, selector = deployment["metadata"]["name"], deployment["spec"]["selector"]["matchLabels"]
        found = {owner for owner, pod in templates.items() if selects(selector, pod)}
        if found != {name}:
            yield f"Deployment {name} selects the pods of {sorted(found)}"
        for spread in deployment["spec"]["template"]["spec"]["topologySpreadConstraints"]:
            if spread["labelSelector"]["matchLabels"] != selector:
                yield f"Deployment {name} spreads other pods than its own"
    for manifest in of_kind(manifests, "Service", "PodDisruptionBudget", "NetworkPolicy", "PodMonitor"):
        spec = manifest["spec"]
        selector = spec.get("podSelector") or spec["selector"]
        selector = selector.get("matchLabels", selector)
        if not any(selects(selector, pod) for pod in templates.values()):
            yield f"{manifest['kind']} {manifest['metadata']['name']} selects no pod"
    budgets = [budget["spec"]["selector"]["matchLabels"] for budget in of_kind(manifests, "PodDisruptionBudget")]
    for deployment in of_kind(manifests, "Deployment"):
        if budgets.count(deployment["spec"]["selector"]["matchLabels"]) != 1:
            yield f"Deployment {deployment['metadata']['name']} has not one budget"


def ports(manifests: list[Manifest]) -> Iterator[str]:
    """Ports that nobody listens on."""
    named: dict[str, int] = {}
    for where, container, _ in containers(manifests):
        own = {port["name"]: port["containerPort"] for port in container.get("ports", [])}
        named |= own
        listened = {"grpc": flag(container, "port"), "metrics": flag(container, "metrics-port")}
        if health := flag(container, "health-port"):
            listened["health"] = health
        if own and own != {name: int(port or 0) for name, port in listened.items()}:
            yield f"{where} declares the ports {own} and listens on {listened}"
        for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
            asked = container.get(probe, {}).get("grpc")
            plain = "health" if flag(container, "tls-certificate") else "grpc"
            if asked and asked["port"] != own.get(plain):
                yield f"{where}: {probe} asks port {asked['port']}, which does not answer without TLS"
    for service in of_kind(manifests, "Service"):
        if service["spec"]["clusterIP"] != "None":
            yield f"Service {service['metadata']['name']} is not headless"
        for port in service["spec"]["ports"]:
            if named.get(port["targetPort"]) != port["port"]:
                yield f"Service {service['metadata']['name']}: port {port['port']} leads nowhere"
    asked = [e["port"] for monitor in of_kind(manifests, "PodMonitor") for e in monitor["spec"]["podMetricsEndpoints"]]
    for policy in of_kind(manifests, "NetworkPolicy"):
        asked += [port["port"] for rule in policy["spec"]["ingress"] for port in rule.get("ports", [])]
    yield from (f"no container has the port {port}" for port in asked if port not in named)


def commands(manifests: list[Manifest]) -> Iterator[str]:
    """Options that the programs do not have, and values that they refuse."""
    for where, container, _ in containers(manifests):
        program, *arguments = words(container)
        try:
            if program == "sh":
                program, *arguments = arguments[arguments.index("wait") + 1 :]
            if arguments[:2] == ["-m", "starpod.trainer.parallel.launch"]:
                arguments = arguments[2:]
                split = arguments.index("-m") + 2
                torchrun(arguments[:split])
                program, arguments = "/opt/starpod/bin/starpod", arguments[split:]
            if program == "/opt/starpod/bin/starpod":
                call(*arguments)
            else:
                yield f"{where}: {program} is in no image"
        except (click.ClickException, ValueError) as error:
            yield f"{where}: {error.format_message() if isinstance(error, click.ClickException) else error}"


def call(name: str, *arguments: str) -> None:
    """Parses a call of `starpod`. Raises click.ClickException. Files of the container are not here: only of `serve`,
    which opens them later, are the values checked too."""
    context = click.Context(starpod)
    command = starpod.get_command(context, name)
    if command is None:
        raise click.UsageError(f"no command {name!r}")
    if name == "serve":
        command.make_context(name, list(arguments))
    else:
        command.make_parser(click.Context(command, **command.context_settings)).parse_args(list(arguments))


def torchrun(arguments: list[str]) -> None:
    """Parses torchrun's own options. Raises ValueError."""
    from torch.distributed.run import get_args_parser

    parser = get_args_parser()
    parser.error = _refuse  # type: ignore[method-assign]
    parser.parse_args(arguments)


def _refuse(message: str) -> None:
    raise ValueError(f"torchrun: {message}")


def configurations(manifests: list[Manifest]) -> Iterator[str]:
    """Configurations that `starpod train` would refuse, and files in them that no volume brings."""
    for manifest in of_kind(manifests, "ConfigMap"):
        values = yaml.safe_load(manifest["data"]["config.yaml"])
        try:
            parse_config(values)
        except ConfigError as error:
            yield f"ConfigMap {manifest['metadata']['name']}: {error}"
    for where, container, spec in containers(manifests):
        mounted = {mount["name"]: mount["mountPath"] for mount in container.get("volumeMounts", [])}
        volumes = {volume["name"] for volume in spec["volumes"]}
        if missing := set(mounted) - volumes:
            yield f"{where} mounts {sorted(missing)}, which is no volume"
        text = " ".join(words(container))
        if container["name"] == "trainer":
            text += str([manifest["data"] for manifest in of_kind(manifests, "ConfigMap")])
        for path in re.findall(r"(?<![\w/])/(?:etc/starpod|runs|handover|stores)[\w./-]*", text):
            if not any(path.startswith(mount) for mount in mounted.values()):
                yield f"{where} reads {path}, which nothing mounts"


def drains(manifests: list[Manifest]) -> Iterator[str]:
    """Pods that are killed before they have drained."""
    for where, container, spec in containers(manifests):
        if container["name"] == "vllm" or container["name"].startswith("wait"):
            continue
        asked = flag(container, "drain") or flag(container, "shutdown-timeout") or 0
        if spec["terminationGracePeriodSeconds"] < int(asked) + 10:
            yield f"{where} drains for {asked} s and is killed after {spec['terminationGracePeriodSeconds']} s"


def autoscaling(manifests: list[Manifest]) -> Iterator[str]:
    """Autoscalers of nothing, or by what nobody measures."""
    deployments = {manifest["metadata"]["name"]: manifest["spec"] for manifest in of_kind(manifests, "Deployment")}
    adapter = yaml.safe_load((KUBERNETES / "prometheus-adapter.yaml").read_text())["rules"]["custom"]
    offered = {rule["name"]["as"] for rule in adapter}
    scaled = set()
    for scaler in of_kind(manifests, "HorizontalPodAutoscaler"):
        spec = scaler["spec"]
        target = spec["scaleTargetRef"]["name"]
        scaled.add(target)
        if target not in deployments or "replicas" in deployments[target]:
            yield f"the autoscaler of {target} has no Deployment of its own to scale"
        if spec["minReplicas"] > spec["maxReplicas"]:
            yield f"the autoscaler of {target} has a minimum above its maximum"
        for metric in spec["metrics"]:
            name = metric["pods"]["metric"]["name"]
            if name not in exported() or name not in offered:
                yield f"the autoscaler of {target} goes by {name}, which no server exports or no adapter offers"
    for name, spec in deployments.items():
        if name not in scaled and "replicas" not in spec:
            yield f"Deployment {name} has neither replicas nor an autoscaler"


def images(manifests: list[Manifest]) -> Iterator[str]:
    """Images that compose does not build."""
    composed = {**services(), **{f"{name}-gpu": s for name, s in services("docker-compose.gpu.yml").items()}}
    built = {service["image"] for service in composed.values() if "build" in service}
    for where, container, _ in containers(manifests):
        name, _, tag = container["image"].rpartition(":")
        if name not in built:
            yield f"{where}: no image {name} is built"
        if not re.fullmatch(r"\d+\.\d+\.\d+", tag):
            yield f"{where}: the tag {tag!r} is no release"


def releases(manifests: list[Manifest]) -> Iterator[str]:
    """Images of other releases than the project's."""
    for where, container, _ in containers(manifests):
        tag = container["image"].rpartition(":")[2]
        if tag != project()["version"]:
            yield f"{where}: {tag} is not the project's version"


def secrets(manifests: list[Manifest]) -> Iterator[str]:
    """Secrets in the manifests themselves, and files that all may read."""
    yield from (f"Secret {secret['metadata']['name']} is inline" for secret in of_kind(manifests, "Secret"))
    if re.search(r"-----BEGIN|[Bb]earer ", str(manifests)):
        yield "a key or a token is inline"
    for where, container, spec in containers(manifests):
        for variable in container.get("env", []):
            if re.search("TOKEN|PASSWORD|SECRET|_KEY", variable["name"]) and "valueFrom" not in variable:
                yield f"{where}: {variable['name']} is inline"
        for volume in spec["volumes"]:
            if volume.get("secret", {"defaultMode": 0}).get("defaultMode", 0o644) & 0o007:
                yield f"{where}: the files of {volume['name']} can be read by all"


def hardening(manifests: list[Manifest]) -> Iterator[str]:
    """Pods outside of the "restricted" security standard, or without limits."""
    for owner, pod in pods(manifests):
        spec = pod["spec"]
        context = spec["securityContext"]
        if context.get("runAsNonRoot") is not True or context.get("runAsUser", 0) == 0:
            yield f"{owner} may run as root"
        if context.get("seccompProfile") != {"type": "RuntimeDefault"}:
            yield f"{owner} has no seccomp profile"
        if spec.get("automountServiceAccountToken") is not False:
            yield f"{owner} has an API token"
        covered = [
            policy
            for policy in of_kind(manifests, "NetworkPolicy")
            if selects(policy["spec"]["podSelector"]["matchLabels"], pod)
        ]
        if not any(set(policy["spec"]["policyTypes"]) == {"Ingress", "Egress"} for policy in covered):
            yield f"{owner} has no network policy for both directions"
    for where, container, _ in containers(manifests):
        context = container["securityContext"]
        if context != CONFINED:
            yield f"{where} is not confined"
        for kind in ("requests", "limits"):
            if not {"cpu", "memory"} <= set(container.get("resources", {}).get(kind, {})):
                yield f"{where} has no {kind} of cores and memory"


def certificates(manifests: list[Manifest]) -> Iterator[str]:
    """Services that no certificate names, secrets that nobody makes."""
    issued = of_kind(manifests, "Certificate")
    if not issued:
        return
    names = {name for certificate in issued for name in certificate["spec"].get("dnsNames", [])}
    for service in of_kind(manifests, "Service"):
        if service["metadata"]["name"] not in names:
            yield f"no certificate names the service {service['metadata']['name']}"
    made = {certificate["spec"]["secretName"] for certificate in issued}
    for where, _, spec in containers(manifests):
        for volume in spec["volumes"]:
            if volume["name"] == "tls" and volume["secret"]["secretName"] not in made:
                yield f"{where}: nobody makes the secret {volume['secret']['secretName']}"


CHECKS = (
    schemas,
    selectors,
    ports,
    commands,
    configurations,
    drains,
    autoscaling,
    images,
    secrets,
    hardening,
    certificates,
)


def problems(manifests: list[Manifest]) -> list[str]:
    """Return the problems that all checks find."""
    return [problem for check in CHECKS for problem in check(manifests)]
