"""The chart: its schema, its page, and the manifests that are made from it."""

import json
import os
import re
import shutil
import subprocess
from pathlib import Path

import jsonschema
import pytest
import yaml

from starpod.trainer.configuration.loading import load_config
from tests.deploy.manifest_checks import schemas
from tests.deploy.manifests import KUBERNETES, RENDERED, Manifest, containers, find, flag, of_kind, parse, read, words

CHART = KUBERNETES / "chart"
TRAINER: Manifest = {"enabled": True, "addresses": ["environments:50051"]}
HELM = os.environ.get("HELM") or shutil.which("helm")
needs_helm = pytest.mark.skipif(HELM is None, reason="needs helm on the path, or named by $HELM")


def values() -> Manifest:
    return dict(yaml.safe_load((CHART / "values.yaml").read_text()))


def schema() -> Manifest:
    return dict(json.loads((CHART / "values.schema.json").read_text()))


def test_the_schema_knows_each_value_and_no_other() -> None:
    jsonschema.Draft7Validator.check_schema(schema())
    jsonschema.validate(values(), schema(), jsonschema.Draft7Validator)

    def compare(own: Manifest, known: Manifest, path: str) -> None:
        known = schema()["definitions"][known["$ref"].rpartition("/")[2]] if "$ref" in known else known
        if known.get("additionalProperties") is not False:
            return
        assert set(known["properties"]) - {"global"} == set(own), path
        for key, value in own.items():
            if isinstance(value, dict):
                compare(value, known["properties"][key], f"{path}.{key}")

    compare(values(), schema(), "values")
    for name in RENDERED:
        given = yaml.safe_load((KUBERNETES / "values" / f"{name}.yaml").read_text())
        jsonschema.validate(given, schema(), jsonschema.Draft7Validator)


@pytest.mark.parametrize(
    "wrong",
    [
        {"fleets": {"a": {"replica": 1}}},
        {"fleets": {"A_b": {}}},
        {"fleets": {"a": {"tag": 0.1}}},
        {"tls": {"mode": "mtls"}},
        {"trainer": {"addresses": ["environments"]}},
        {"trainer": {"config": {"environment": "sokoban-v1"}}},
        {"fleet": {"maxUnavailable": "100%"}},
    ],
    ids=str,
)
def test_the_schema_refuses(wrong: Manifest) -> None:
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(wrong, schema(), jsonschema.Draft7Validator)


def test_each_value_is_explained() -> None:
    """`helm show values` is the reference: each value or its section has a comment."""
    text = (CHART / "values.yaml").read_text()
    explained: dict[int, bool] = {}
    silent, above = [], ""
    for line in text.splitlines():
        if key := re.match(r"( *)([\w.]+):(.*)$", line):
            depth = len(key[1])
            explained = {level: known for level, known in explained.items() if level < depth}
            explained[depth] = above.startswith("#") or " # " in key[3]
            if key[3].strip() and not any(explained.values()):
                silent.append(line)
        above = line.strip()
    assert silent == []


def helm(*arguments: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run([str(HELM), *map(str, arguments)], capture_output=True, text=True, timeout=250)


@needs_helm
def test_rendered_manifests_are_those_of_the_chart(tmp_path: Path) -> None:
    copied = tmp_path / "kubernetes"
    shutil.copytree(KUBERNETES, copied)
    subprocess.run([copied / "render"], env={**os.environ, "HELM": str(HELM)}, check=True, timeout=250)
    for name in RENDERED:
        fresh = parse((copied / "rendered" / f"{name}.yaml").read_text())

        def key(manifest: Manifest) -> str:
            return f"{manifest['kind']} {manifest['metadata']['name']}"

        assert sorted(fresh, key=key) == sorted(read(name), key=key), "stale: run deploy/kubernetes/render"


@needs_helm
@pytest.mark.parametrize(
    ("values", "complaint"),
    [
        ({"trainer": {"enabled": True}}, "trainer.addresses is empty"),
        ({"trainer": {**TRAINER, "processes": 2, "gpus": 1}}, "a GPU of its own"),
        ({"trainer": {**TRAINER, "vllm": {"enabled": True}}}, "needs trainer.config.model"),
        (
            {"trainer": {**TRAINER, "config": {"base": "bandit_llm", "model": "smollm2"}, "vllm": {"enabled": True}}},
            "set trainer.config.sampling.max_episode_tokens",
        ),
        ({"trainer": {**TRAINER, "nodes": 2}}, "accessMode to ReadWriteMany"),
        ({"trainer": {**TRAINER, "nodes": 2, "vllm": {"enabled": True}}}, "serves one node"),
        ({"fleets": {"a": {}}, "tls": {"mode": "secret"}}, "needs tls.serverSecret"),
        ({"fleets": {"a": {}}, "tls": {"mode": "certManager"}}, "needs tls.issuer.name"),
        ({"fleets": {"a" * 60: {}}}, "longer than 52 characters"),
        ({"fleets": {"a": {}}, "networkPolicy": {"clients": []}}, "nobody could call"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_the_chart_refuses_what_cannot_work(values: Manifest, complaint: str, tmp_path: Path) -> None:
    file = tmp_path / "values.yaml"
    file.write_text(yaml.safe_dump(values))
    refused = helm("template", "x", CHART, "--values", file)
    assert refused.returncode != 0 and complaint in refused.stderr


@needs_helm
def test_a_fleet_that_requires_the_sandbox_may_give_and_end_users(tmp_path: Path) -> None:
    (file := tmp_path / "values.yaml").write_text(yaml.safe_dump({"fleets": {"a": {"requireSandbox": True}}}))
    made = parse(helm("template", "x", CHART, "--values", file).stdout)
    (server,) = next(each for each in made if each["kind"] == "Deployment")["spec"]["template"]["spec"]["containers"]
    assert "--sandbox=require" in server["args"]
    assert server["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "runAsNonRoot": False,
        "runAsUser": 0,
        "capabilities": {"drop": ["ALL"], "add": ["SETUID", "SETGID", "KILL"]},
    }


@needs_helm
def test_only_a_fleet_that_makes_pods_has_the_rights_to(tmp_path: Path) -> None:
    (file := tmp_path / "values.yaml").write_text(yaml.safe_dump({"fleets": {"a": {"machinePods": True}, "b": {}}}))
    made = parse(helm("template", "x", CHART, "--values", file).stdout)
    assert list(schemas(made)) == []
    specs = {each["metadata"]["name"]: each["spec"]["template"]["spec"] for each in of_kind(made, "Deployment")}
    tokens = {
        name: (spec["automountServiceAccountToken"], spec.get("serviceAccountName")) for name, spec in specs.items()
    }
    assert tokens == {"x-a": (True, "x-machines"), "x-b": (False, None)}
    binding = find(made, "RoleBinding")
    assert binding["roleRef"]["name"] == find(made, "Role")["metadata"]["name"]
    assert [(each["kind"], each["name"]) for each in binding["subjects"]] == [("ServiceAccount", "x-machines")]
    policies = {each["metadata"]["name"]: each["spec"] for each in of_kind(made, "NetworkPolicy")}
    assert policies["x-machines"]["podSelector"]["matchExpressions"][0]["values"] == ["a"]
    assert policies["starpod-machines-none"] == {
        "podSelector": {"matchLabels": {"starpod.network": "none"}},
        "policyTypes": ["Ingress", "Egress"],
    }


def test_manifests_of_machines_are_valid() -> None:
    assert list(schemas(parse((CHART / "files" / "machines.yaml").read_text()))) == []


@needs_helm
def test_several_processes_share_the_vllm_beside_them(tmp_path: Path) -> None:
    """Rank 0 hands it the weights, and each samples from it."""
    run = {**TRAINER, "processes": 2, "gpus": 2, "config": {"model": "org/model"}, "vllm": {"enabled": True}}
    (file := tmp_path / "values.yaml").write_text(yaml.safe_dump({"trainer": run}))
    made = parse(helm("template", "x", CHART, "--values", file).stdout)
    by_name = {where.rpartition("/")[2]: container for where, container, _ in containers(made)}
    trainer, vllm = by_name["trainer"], by_name["vllm"]
    assert words(trainer)[2] == "starpod.trainer.parallel.launch" and flag(trainer, "nproc-per-node") == "2"
    engine = yaml.safe_load(find(made, "ConfigMap")["data"]["config.yaml"])["engine"]
    assert engine == {
        "name": "vllm_remote",
        "urls": [f"http://127.0.0.1:{flag(vllm, 'port')}"],
        "handover_folder": "/handover",
    }
    for each, gpus in ((trainer, "2"), (vllm, "1")):
        assert {"name": "handover", "mountPath": "/handover"} in each["volumeMounts"]
        assert each["resources"]["limits"]["nvidia.com/gpu"] == gpus


@needs_helm
def test_a_run_may_have_several_environments(tmp_path: Path) -> None:
    run = {**TRAINER, "config": {"base": "mixture"}}
    (file := tmp_path / "values.yaml").write_text(yaml.safe_dump({"trainer": run}))
    made = parse(helm("template", "x", CHART, "--values", file).stdout)
    (config := tmp_path / "config.yaml").write_text(find(made, "ConfigMap")["data"]["config.yaml"])
    tasks = load_config(str(config)).tasks
    assert len(tasks) == 3 and {task.environment.addresses for task in tasks} == {tuple(TRAINER["addresses"])}


@needs_helm
def test_a_newer_chart_leaves_the_pods_of_a_pinned_fleet_alone(tmp_path: Path) -> None:
    shutil.copytree(CHART, newer := tmp_path / "chart")
    about = yaml.safe_load((newer / "Chart.yaml").read_text())
    (newer / "Chart.yaml").write_text(yaml.safe_dump({**about, "version": "9.0.0", "appVersion": "9.0.0"}))
    (file := tmp_path / "values.yaml").write_text(yaml.safe_dump({"fleets": {"pinned": {"tag": "0.1.0"}, "not": {}}}))

    def pods_of(chart: Path) -> dict[str, Manifest]:
        made = parse(helm("template", "x", chart, "--values", file).stdout)
        return {each["metadata"]["name"]: each["spec"]["template"] for each in made if each["kind"] == "Deployment"}

    old, new = pods_of(CHART), pods_of(newer)
    assert old["x-pinned"] == new["x-pinned"]
    assert old["x-not"] != new["x-not"]
