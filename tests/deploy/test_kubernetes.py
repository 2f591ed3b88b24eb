"""The manifests rendered from the chart. No cluster runs here."""

import re

import pytest
import yaml

from starpod.client.transport import split_address
from starpod.client.versions import satisfies
from starpod.env_server.registry import Registry
from tests.deploy.files import DEPLOY, project
from tests.deploy.manifest_checks import certificates, problems, releases
from tests.deploy.manifests import KUBERNETES, RENDERED, containers, find, flag, of_kind, pods, read, selects, words
from tests.deploy.test_files import exported

CHART = KUBERNETES / "chart"


@pytest.mark.parametrize("name", RENDERED)
def test_manifests_are_right(name: str) -> None:
    manifests = read(name)
    assert problems(manifests) == []
    if name != "versions":  # which shows a release to come
        assert list(releases(manifests)) == []


@pytest.mark.parametrize(
    ("run", "environments"),
    [("trainer", "environments"), ("trainer-vllm", "secure"), ("trainer-vllm-cpu", "environments")],
)
def test_a_trainer_finds_the_environments_that_are_installed(run: str, environments: str) -> None:
    config = yaml.safe_load(find(read(run), "ConfigMap")["data"]["config.yaml"])["environment"]
    served = [
        f"dns:///{service['metadata']['name']}:{service['spec']['ports'][0]['port']}"
        for service in of_kind(read(environments), "Service")
    ]
    assert set(config["addresses"]) <= set(served)
    assert Registry.installed([config["id"]]).find(config["id"], config.get("version", ""))


def test_the_pods_of_a_run_on_two_nodes_find_and_reach_each_other() -> None:
    made = read("trainer-nodes")
    run, policy = find(made, "JobSet"), find(made, "NetworkPolicy")
    (replicated,) = run["spec"]["replicatedJobs"]
    job, name = replicated["template"]["spec"], run["metadata"]["name"]
    (trainer,) = job["template"]["spec"]["containers"]
    # <JobSet>-<replicated job>-<job index>-<pod index>.<JobSet>
    assert flag(trainer, "rdzv-endpoint") == f"{name}-{replicated['name']}-0-0.{name}:29500"
    assert job["completionMode"] == "Indexed" and run["spec"]["network"]["enableDNSHostnames"]
    assert str(job["completions"]) == str(job["parallelism"]) == flag(trainer, "nnodes") == "2"
    (ingress,), egress = policy["spec"]["ingress"], policy["spec"]["egress"][0]
    for peers in (ingress["from"], egress["to"]):
        assert selects(peers[0]["podSelector"]["matchLabels"], job["template"])
    assert find(made, "PersistentVolumeClaim")["spec"]["accessModes"] == ["ReadWriteMany"]


def test_two_versions_live_behind_one_name_and_the_trainer_is_pinned_to_one() -> None:
    manifests = read("versions")
    (service,) = of_kind(manifests, "Service")
    found = {owner for owner, each in pods(manifests) if selects(service["spec"]["selector"], each)}
    assert found == {"environments-symbolic", "environments-symbolic-0-2"}
    assert len({container["image"] for _, container, _ in containers(manifests)}) == 2
    environment = yaml.safe_load(find(read("trainer"), "ConfigMap")["data"]["config.yaml"])["environment"]
    (address,) = environment["addresses"]
    host, port = split_address(address.removeprefix("dns:///"))
    assert (host, int(port)) == (service["metadata"]["name"], service["spec"]["ports"][0]["port"])
    assert satisfies("1.0.3", environment["version"]) and not satisfies("1.1.0", environment["version"])


def test_the_trainer_may_call_the_environments_and_nobody_else_may() -> None:
    environments, run = read("secure"), read("trainer-vllm")
    (policy,) = of_kind(environments, "NetworkPolicy")
    calls, metrics = policy["spec"]["ingress"]
    (peer,) = calls["from"]
    (trainer,) = (each for _, each in pods(run))
    assert selects(peer["podSelector"]["matchLabels"], trainer)
    assert not any(selects(peer["podSelector"]["matchLabels"], each) for _, each in pods(environments))
    assert [port["port"] for port in metrics["ports"]] == ["metrics"]
    (egress,) = (rule for rule in find(run, "NetworkPolicy")["spec"]["egress"] if "to" in rule)
    labels = egress["to"][0]["podSelector"]["matchLabels"]
    assert all(selects(labels, each) for _, each in pods(environments))
    # Certificates of both are of one authority.
    issued = [certificate["spec"] for certificate in of_kind(environments + run, "Certificate")]
    issuers = {spec["issuerRef"]["name"] for spec in issued if "isCA" not in spec}
    assert issuers == {"starpod-authority"}
    assert list(certificates(environments + run)) == []


@pytest.mark.parametrize("run", ["trainer-vllm", "trainer-vllm-cpu"])
def test_vllm_hears_the_trainer_alone(run: str) -> None:
    manifests = read(run)
    (vllm,) = (container for where, container, _ in containers(manifests) if where.endswith("/vllm"))
    assert vllm["restartPolicy"] == "Always", "a sidecar, or the Job would never end"
    assert flag(vllm, "host") == "127.0.0.1"
    assert find(manifests, "NetworkPolicy")["spec"]["ingress"] == []
    config = yaml.safe_load(find(manifests, "ConfigMap")["data"]["config.yaml"])
    assert config["engine"]["urls"] == [f"http://127.0.0.1:{flag(vllm, 'port')}"]
    assert config["model"] in words(vllm)
    mounts = [{m["name"]: m["mountPath"] for m in c["volumeMounts"]} for _, c, _ in containers(manifests)]
    assert [m["handover"] for m in mounts if "handover" in m] == [config["engine"]["handover_folder"]] * 2


def test_vllm_takes_gpus_or_cores() -> None:
    """Threads by the limit: vLLM would else bind one to each core of the node."""
    for run, gpus in (("trainer-vllm", {"nvidia.com/gpu"}), ("trainer-vllm-cpu", set())):
        (vllm,) = (container for where, container, _ in containers(read(run)) if where.endswith("/vllm"))
        assert set(vllm["resources"]["limits"]) == {"cpu", "memory"} | gpus
        threads = {each["name"]: each.get("valueFrom") for each in vllm.get("env", [])}.get("OMP_NUM_THREADS")
        assert threads == (None if gpus else {"resourceFieldRef": {"resource": "limits.cpu"}})


def test_alerts_are_those_of_prometheus() -> None:
    alerts = yaml.safe_load((CHART / "files" / "alerts.yml").read_text())
    assert find(read("environments"), "PrometheusRule")["spec"] == alerts
    (job,) = set(re.findall(r'job="(\w+)"', str(alerts)))
    monitor = find(read("environments"), "PodMonitor")["spec"]
    for _, each in pods(read("environments")):
        assert each["metadata"]["labels"][monitor["jobLabel"]] == job
    targets = {relabeling["targetLabel"] for relabeling in monitor["podMetricsEndpoints"][0]["relabelings"]}
    assert "service" in targets, "alerts and the dashboard go by it"


def test_a_prometheus_without_the_operator_is_told_the_same_names() -> None:
    (block,) = re.findall(r"```yaml\n(relabel_configs:.*?)```", (CHART / "README.md").read_text(), re.DOTALL)
    told = {rule["target_label"]: rule["source_labels"] for rule in yaml.safe_load(block)["relabel_configs"]}
    monitor = find(read("environments"), "PodMonitor")["spec"]
    (endpoint,) = monitor["podMetricsEndpoints"]
    named = {rule["targetLabel"]: rule["sourceLabels"] for rule in endpoint["relabelings"]}
    named["job"] = ["__meta_kubernetes_pod_label_" + re.sub(r"\W", "_", monitor["jobLabel"])]
    # Which the operator gives by itself.
    named |= {"namespace": ["__meta_kubernetes_namespace"], "pod": ["__meta_kubernetes_pod_name"]}
    assert told == named


def test_the_adapter_asks_for_what_servers_export() -> None:
    rules = yaml.safe_load((KUBERNETES / "prometheus-adapter.yaml").read_text())["rules"]["custom"]
    for rule in rules:
        series = rule["seriesQuery"].partition("{")[0]
        assert series in exported()
        assert re.search(rule["name"]["matches"], series)
        # The labels that say whose a series is must not be the server's own.
        assert not set(rule["resources"]["overrides"]) & exported()[series]


def test_the_chart_bears_the_projects_version() -> None:
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text())
    assert chart["version"] == chart["appVersion"] == project()["version"]


def test_programs_are_where_the_images_have_them() -> None:
    for file in ("environment", "trainer"):
        text = (DEPLOY / "docker" / f"{file}.Dockerfile").read_text()
        assert 'ENTRYPOINT ["/opt/starpod/bin/starpod"]' in text
        assert "WORKDIR /opt/starpod\n" in text and "python -m venv --without-pip ." in text
    asked = {word for name in RENDERED for _, c, _ in containers(read(name)) for word in words(c) if "/bin/" in word}
    assert asked <= {f"/opt/starpod/bin/{program}" for program in ("starpod", "python")}
