"""The files of deploy/ fit the project and each other. No container runs here."""

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from starpod.env_server.operation.metrics import Metrics
from tests.deploy.files import DEPLOY, DOCKERFILES, project, services
from tests.support import ROOT, start_server

DASHBOARD = DEPLOY / "grafana" / "dashboards" / "starpod.json"
OURS = {name: service for name, service in services().items() if "build" in service}


def exported() -> dict[str, set[str]]:
    """Every series that a server exports, with its labels."""
    metrics = Metrics()
    metrics.step("e", 0.1)
    metrics.count_live("e", 1)
    metrics.count_reaped("e")
    metrics.count_lost("e")
    metrics.error("m", "r")
    return {sample.name: set(sample.labels) for family in metrics.collect() for sample in family.samples}


def queries() -> Iterator[tuple[str, str]]:
    """Each expression that deploy/ asks Prometheus for, and where it stands."""
    for panel in json.loads(DASHBOARD.read_text())["panels"]:
        for target in panel["targets"]:
            yield panel["title"], target["expr"]
    for group in yaml.safe_load((DEPLOY / "kubernetes" / "chart" / "files" / "alerts.yml").read_text())["groups"]:
        for rule in group["rules"]:
            yield rule["alert"], rule["expr"]


@pytest.mark.parametrize(("where", "query"), list(queries()))
def test_a_query_asks_for_what_servers_export(where: str, query: str) -> None:
    series = exported()
    asked = set(re.findall(r"\bstarpod_\w+", query))
    assert asked or "up{" in query, where
    assert asked <= set(series), where
    labels = {label.strip() for found in re.findall(r"by \(([^)]*)\)", query) for label in found.split(",")}
    from_prometheus = {"service", "instance"}
    assert labels <= set.union(from_prometheus, *(series[name] for name in asked)), where


def test_the_dashboard_shows_every_metric_once_or_more() -> None:
    text = DASHBOARD.read_text()
    families = {re.sub(r"_(bucket|count|sum|created)$", "", name) for name in exported()}
    assert {name for name in families if name not in text} == set()


def test_panels_do_not_overlap() -> None:
    taken: set[tuple[int, int]] = set()
    for panel in json.loads(DASHBOARD.read_text())["panels"]:
        place = panel["gridPos"]
        cells = {(place["x"] + i, place["y"] + j) for i in range(place["w"]) for j in range(place["h"])}
        assert place["x"] + place["w"] <= 24
        assert not taken & cells, panel["title"]
        taken |= cells


def test_prometheus_scrapes_the_servers_of_compose() -> None:
    config = yaml.safe_load((DEPLOY / "prometheus" / "prometheus.yml").read_text())
    (job,) = config["scrape_configs"]
    (discovery,) = job["dns_sd_configs"]
    servers = {name for name, each in OURS.items() if "environment.Dockerfile" in each["build"]["dockerfile"]}
    assert set(discovery["names"]) == servers
    for name in servers:
        assert any(port.endswith(f":{discovery['port']}") for port in OURS[name]["ports"])
    mounted = [volume.split(":") for volume in services()["prometheus"]["volumes"] if volume.startswith("./")]
    files = {target: ROOT / source for source, target, *_ in mounted}
    assert all(files[file].is_file() for file in config["rule_files"])


def test_grafana_finds_its_data_source_and_dashboard() -> None:
    grafana = services()["grafana"]
    mounts = {target: ROOT / source for source, target, *_ in (v.split(":") for v in grafana["volumes"])}
    provisioning = DEPLOY / "grafana" / "provisioning"
    assert mounts["/etc/grafana/provisioning"] == provisioning
    (source,) = yaml.safe_load((provisioning / "datasources" / "prometheus.yml").read_text())["datasources"]
    assert source["url"] == "http://prometheus:9090"
    assert set(re.findall(r'"type": "prometheus",\s+"uid": "(\w+)"', DASHBOARD.read_text())) == {source["uid"]}
    (provider,) = yaml.safe_load((provisioning / "dashboards" / "starpod.yml").read_text())["providers"]
    assert mounts[provider["options"]["path"]] == DASHBOARD.parent
    home = Path(grafana["environment"]["GF_DASHBOARDS_DEFAULT_HOME_DASHBOARD_PATH"])
    assert mounts[str(home.parent)] / home.name == DASHBOARD


@pytest.mark.parametrize("file", DOCKERFILES, ids=lambda file: file.stem)
def test_an_image_begins_from_the_public_one_and_bears_the_projects_version(file: Path) -> None:
    text = file.read_text()
    (base,) = re.findall(r"^ARG BASE_IMAGE=(.*)$", text, re.MULTILINE)
    assert re.fullmatch(r"python:3\.1[1-3]-slim-bookworm", base), "no registry but the public one"
    stages = re.findall(r"^FROM (\S+) AS (\S+)$", text, re.MULTILINE)
    names = {name for _, name in stages}
    assert {source for source, _ in stages} <= {"${BASE_IMAGE}"} | names
    versions = re.findall(r"^ARG VERSION=(.*)$", text, re.MULTILINE)
    assert set(versions) == {project()["version"]}
    assert len(versions) == len(re.findall(r"^USER 1000:1000$", text, re.MULTILINE))


@pytest.mark.parametrize("name", services())
def test_a_service_is_confined(name: str) -> None:
    service = services()[name]
    assert service["read_only"] is True
    assert service["cap_drop"] == ["ALL"]
    assert service["security_opt"] == ["no-new-privileges:true"]
    assert service["mem_limit"] and service["pids_limit"]
    assert all(port.startswith("127.0.0.1:") for port in service.get("ports", []))
    assert not re.search("password|secret|token", json.dumps(service.get("environment", {})), re.IGNORECASE)


@pytest.mark.parametrize("name", OURS)
def test_a_service_is_built_from_a_stage_that_there_is(name: str) -> None:
    build = OURS[name]["build"]
    assert f" AS {build['target']}\n" in (ROOT / build["dockerfile"]).read_text()
    assert build["args"]["BASE_IMAGE"].startswith("${STARPOD_BASE_IMAGE:-python:")


def test_the_override_gives_trainers_and_vllm_a_gpu() -> None:
    override = services("docker-compose.gpu.yml")
    asked = {}
    for name, service in override.items():
        assert f" AS {service['build']['target']}\n" in (ROOT / OURS[name]["build"]["dockerfile"]).read_text()
        (device,) = service["deploy"]["resources"]["reservations"]["devices"]
        assert device["capabilities"] == ["gpu"]
        asked[name] = device["device_ids"]
    assert asked["trainer-vllm"] != asked["vllm"], "each needs a GPU of its own"


def test_vllm_is_reached_by_its_trainer_alone() -> None:
    """vLLM's development endpoints need no key, so nobody else may reach it."""
    services_ = services()
    vllm, trainer = services_["vllm"], services_["trainer-vllm"]
    assert "ports" not in vllm
    (network,) = vllm["networks"]
    assert [name for name, each in services_.items() if network in each.get("networks", ())] == ["trainer-vllm", "vllm"]
    config = dict(word.split("=", 1) for word in trainer["command"].split() if "=" in word)
    assert config["engine.urls"] == f"[http://vllm:{vllm['command'].split()[-1]}]"
    folder = config["engine.handover_folder"]
    shared = [{v.rpartition(":")[2]: v for v in each["volumes"]}[folder] for each in (vllm, trainer)]
    assert shared[0] == shared[1] and vllm["user"] == trainer["user"]


def run(file: str, *words: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(DEPLOY / "docker" / file), *map(str, words)]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=250)


def test_an_image_installs_what_its_extras_hold() -> None:
    extras: dict[str, Any] = project()["optional-dependencies"]
    lines = run("requirements.py", "server", "webshop").stdout.splitlines()
    assert set(lines) == {*project()["dependencies"], *extras["server"], *extras["webshop"]}
    environment = run("requirements.py", "server", "tracing", "load", "webshop", "browser").stdout
    assert "torch" not in environment
    assert "selenium" not in run("requirements.py", "trainer", "vllm").stdout
    assert run("requirements.py", "no-such-extra").returncode != 0


def test_health_is_what_the_server_says() -> None:
    with start_server("bandit-v1") as server:
        assert run("health.py", server.port).returncode == 0
        assert run("health.py", server.port, "bandit-v1").stdout == "SERVING\n"
        assert run("health.py", server.port, "sokoban-v1").returncode == 1
        server.kill()
        gone = run("health.py", server.port)
        assert gone.returncode == 1
        assert gone.stdout.startswith("UNAVAILABLE")
