"""Machines that are pods. The official client talks to an API on a socket, and the pods are real processes."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from starpod.env_server.authoring.environment import Busy, MachineLost, Unavailable
from starpod.env_server.hosting import harbor
from starpod.env_server.hosting.request import HostingError
from starpod.env_server.machines import engine
from starpod.env_server.machines.pool import MachinePool, machine_pool
from tests.env_server.machines import cluster as fake
from tests.env_server.machines.cluster import Cluster, eventually
from tests.env_server.machines.tasks import COUNT_SLEEPS, LEFTOVERS, TEXT_REWARD, leftover_labels, write_task
from tests.support import ROOT

pytest.importorskip("kubernetes")
POLICY, *_ = yaml.safe_load_all((ROOT / "deploy/kubernetes/chart/files/machines.yaml").read_text())
IMAGE = "[environment]\ndocker_image = 'team/hello:1'\n"


@pytest.fixture
def cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Cluster]:
    """A cluster that the kubeconfig names."""
    if problem := fake.missing():
        pytest.skip(f"pods need namespaces: {problem}")
    cluster = Cluster(tmp_path)
    kubeconfig = {
        "clusters": [
            {
                "name": "c",
                "cluster": {
                    "server": f"https://127.0.0.1:{cluster.port}",
                    "certificate-authority": str(cluster.authority),
                },
            }
        ],
        "contexts": [{"name": "x", "context": {"cluster": "c", "user": "u", "namespace": "agents"}}],
        "users": [{"name": "u", "user": {"token": "secret"}}],
        "current-context": "x",
    }
    (tmp_path / "config").write_text(yaml.safe_dump(kubeconfig))
    monkeypatch.setattr("kubernetes.config.kube_config.KUBE_CONFIG_DEFAULT_LOCATION", str(tmp_path / "config"))
    pools: list[MachinePool] = []

    class KnownPool(MachinePool):
        def __init__(self, engine: Any) -> None:
            super().__init__(engine)
            pools.append(self)

    monkeypatch.setattr("starpod.env_server.machines.pool.MachinePool", KnownPool)
    machine_pool.cache_clear()
    yield cluster
    for pool in pools:  # no later test has their warnings that this cluster is gone
        pool.close()
    machine_pool.cache_clear()
    cluster.close()


def host(folder: Path, hosting: str = "", settings: str = IMAGE, **task: str) -> Any:
    write_task(folder, **{"tests": TEXT_REWARD, "settings": settings, **task})
    return harbor.host(f"{folder}#engine=pods&warm=0&{hosting}")


def start(folder: Path, hosting: str = "user=root", **task: str) -> Any:
    """Return an environment of a task at its start, without a server."""
    environment = host(folder, hosting, **task)
    environment.prepare()
    instance = environment()
    instance.options = environment.Options()
    instance.reset(None)
    return instance


def test_an_episode_and_its_end(cluster: Cluster, tmp_path: Path) -> None:
    environment = start(tmp_path / "hello", "user=root&command_seconds=4", solution="echo hello > hello.txt")
    (pod,) = cluster.pods.values()
    assert pod["spec"]["containers"][0]["resources"]["limits"]["memory"] == "2048Mi"
    assert pod["metadata"]["labels"]["starpod.network"] == "none"
    assert environment.step("X='a b'; cd /tmp; cat; false").info["exit_status"] == 1
    environment.step('echo "$X in $PWD" >&2; seq 100000')
    assert environment.told.startswith("a b in /tmp\n1\n2\n")
    assert environment.told.endswith("\n100000\n[exit status 0]")
    environment.step("sleep 1000 & (trap '' TERM; setsid sleep 1000 &); sleep 1000")
    assert "the command took longer than 4 s; a new shell starts in /tmp" in environment.told
    environment.step(f"{COUNT_SLEEPS}; exit 3")
    assert environment.told.startswith("0\n[the command ended the shell")
    environment.step(f"cd /app; {environment.expert_action()}")
    outcome = environment.step("done")
    assert (outcome.reward, outcome.terminated, outcome.success) == (1.0, True, True)
    assert cluster.pods == {}


def test_a_solution_may_be_longer_than_an_agents_command(cluster: Cluster, tmp_path: Path) -> None:
    comment = f"# {'x' * harbor.MAX_LENGTH}"
    environment = start(tmp_path / "long", solution=f"echo hello > hello.txt\n{comment}")
    assert not environment.step(comment).valid
    assert environment.step(environment.expert_action()).valid
    assert environment.step(environment.expert_action()).reward == 1.0


@pytest.mark.skipif(os.getuid() != 0, reason="only root can map several users")
@pytest.mark.parametrize("has_setpriv", [True, False])
def test_commands_run_as_the_agents_user(
    cluster: Cluster, tmp_path: Path, has_setpriv: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not has_setpriv:
        from starpod.env_server.machines import pods

        monkeypatch.setattr(pods, "_ENTER", pods._ENTER.replace("-v setpriv", "-v no-setpriv"))
    environment = start(tmp_path / "users", "", settings=f'{IMAGE}[environment.env]\nA = "it\'s"\n')
    environment.step("id -u; id -g; echo $HOME $A; pwd; echo 1 > /logs/verifier/reward.txt; echo hello > hello.txt")
    assert environment.told.startswith("1000\n1000\n/tmp it's\n/app\n")
    assert "ermission denied" in environment.told
    assert environment.step("done").reward == 1.0
    other = start(tmp_path / "other", "user=daemon")
    other.step("echo $(id -un) $(id -gn) $HOME")
    assert other.told == "daemon daemon /usr/sbin\n[exit status 0]"
    with pytest.raises(Busy, match=r"has stopped: Error: chown: invalid user: .nobody-here"):
        start(tmp_path / "nobody", "user=nobody-here")


@pytest.mark.parametrize("during", [True, False])
def test_a_pod_that_ends_is_a_lost_machine(cluster: Cluster, tmp_path: Path, during: bool) -> None:
    environment = start(tmp_path / "lost")
    (name,) = cluster.pods
    reason = {"reason": "Evicted", "message": "The node was low on resource: memory."}
    if during:
        threading.Timer(0.5, lambda: cluster.end(name, **reason)).start()
    else:
        cluster.end(name, **reason)
    with pytest.raises(MachineLost, match="has stopped: Evicted: The node was low"):
        environment.step("sleep 5; echo hello > hello.txt")
    environment.close()
    assert cluster.pods == {}


def test_a_deleted_pod_is_a_lost_machine(cluster: Cluster, tmp_path: Path) -> None:
    environment = start(tmp_path / "deleted")
    environment.machine.engine.remove(environment.machine.id)
    with pytest.raises(MachineLost, match="is gone"):
        environment.step("done")


def test_a_pod_ends_with_the_connection_of_its_server(cluster: Cluster, tmp_path: Path) -> None:
    environment = start(tmp_path / "killed")
    environment.machine.guard.close()
    (name,) = cluster.pods
    find = environment.machine.engine._find_pod
    assert eventually(lambda: find(name).status.phase == "Succeeded")
    assert environment.machine.engine.sweep() == 1


@pytest.mark.parametrize(("place", "session", "seconds", "stays"), LEFTOVERS)
def test_a_sweep_removes_what_no_session_uses(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch, place: str, session: str, seconds: int, stays: bool
) -> None:
    monkeypatch.setattr(engine, "live_sessions", {"used"})
    annotations = leftover_labels(engine.identity(os.getpid()), place, session, seconds)
    metadata = {"name": "left", "labels": {engine.SERVER: "x"}, "annotations": annotations}
    cluster.pods["left"] = {"metadata": metadata, "status": {"phase": "Running"}}
    machine_pool("pods")  # sweeps when it connects
    assert ("left" in cluster.pods) == stays


UNSCHEDULABLE = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": "0/3 nodes"}


@pytest.mark.parametrize(
    ("status", "problem"),
    [
        ({"conditions": [UNSCHEDULABLE]}, "Unschedulable: 0/3 nodes"),
        (
            {
                "containerStatuses": [
                    {
                        "name": "machine",
                        "image": "a",
                        "imageID": "",
                        "ready": False,
                        "restartCount": 0,
                        "state": {"waiting": {"reason": "ImagePullBackOff", "message": "no such image"}},
                    }
                ]
            },
            "ImagePullBackOff: no such image",
        ),
    ],
)
def test_a_pod_that_does_not_start_says_why(
    cluster: Cluster, tmp_path: Path, status: dict[str, Any], problem: str
) -> None:
    cluster.waits = {"phase": "Pending", **status}
    with pytest.raises(Busy, match=f"no machine booted within 0.2 s: {problem}"):
        start(tmp_path / "waits", "boot_seconds=0.2")
    assert cluster.pods == {}


@pytest.mark.parametrize(("policies", "warns"), [([], True), ([POLICY], False)])
def test_a_missing_network_policy_is_reported(
    cluster: Cluster, tmp_path: Path, policies: list[Any], warns: bool, caplog: pytest.LogCaptureFixture
) -> None:
    cluster.policies = policies
    for name in ("one", "two"):
        host(tmp_path / name).prepare()
    assert caplog.text.count("tasks without network may reach it: no NetworkPolicy of the namespace agents") == warns


def test_pods_of_a_server_in_the_cluster_belong_to_its_pod(
    cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster.pods["server-1"] = {"metadata": {"name": "server-1", "uid": "7"}, "status": {"phase": "Running"}}
    (tmp_path / "token").write_text("secret")
    (tmp_path / "namespace").write_text("agents\n")
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "127.0.0.1")
    monkeypatch.setenv("KUBERNETES_SERVICE_PORT", str(cluster.port))
    monkeypatch.setattr("kubernetes.config.incluster_config.SERVICE_TOKEN_FILENAME", str(tmp_path / "token"))
    monkeypatch.setattr("kubernetes.config.incluster_config.SERVICE_CERT_FILENAME", str(cluster.authority))
    monkeypatch.setattr("starpod.env_server.machines.pods._NAMESPACE_FILE", tmp_path / "namespace")
    monkeypatch.setattr("kubernetes.config.kube_config.KUBE_CONFIG_DEFAULT_LOCATION", "/nonexistent")
    monkeypatch.setattr(socket, "gethostname", lambda: "server-1")
    environment = start(tmp_path / "owned")
    owner = cluster.pods[environment.machine.id]["metadata"]["ownerReferences"]
    assert owner == [{"apiVersion": "v1", "kind": "Pod", "name": "server-1", "uid": "7"}]
    environment.close()


def test_the_pool_replaces_a_dead_pod(cluster: Cluster, tmp_path: Path) -> None:
    environment = start(tmp_path / "pooled")
    pool = MachinePool(environment.machine.engine)
    pool._warm[environment.plan].append(environment.machine)
    cluster.end(environment.machine.id, reason="Evicted")
    machine = pool.take(environment.plan)
    assert machine.run("echo ready", 10).text == "ready\n"
    machine.close()
    assert cluster.pods == {}


@pytest.mark.parametrize(
    ("hosting", "settings", "problem"),
    [
        ("copies=fork", IMAGE, "copies=fork needs engine=docker: Kubernetes cannot save a pod"),
        ("", "", "push starpod-harbor:[0-9a-f]+ to a registry and set registry=PREFIX"),
        ("engine=pod", IMAGE, "is given twice"),
    ],
)
def test_settings_that_pods_cannot_have(tmp_path: Path, hosting: str, settings: str, problem: str) -> None:
    with pytest.raises(HostingError, match=problem):
        host(tmp_path / "refused", hosting, settings)


def test_images_come_from_the_registry(tmp_path: Path) -> None:
    environment = host(tmp_path / "pushed", "registry=registry.example.com/team", "")
    assert environment.plan.image == f"registry.example.com/team/{environment.task.image}"


def test_an_api_that_does_not_answer(cluster: Cluster, tmp_path: Path) -> None:
    cluster.close()
    with pytest.raises(Unavailable, match=r"no Kubernetes API lists pods at https://127.0.0.1:\d+ .*KUBECONFIG"):
        machine_pool("pods")


def test_a_handshake_that_is_not_answered(monkeypatch: pytest.MonkeyPatch) -> None:
    from kubernetes.client import Configuration
    from kubernetes.client.exceptions import ApiException

    from starpod.env_server.machines import pods

    monkeypatch.setattr(pods, "_CALL_SECONDS", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        configuration = Configuration(host=f"http://127.0.0.1:{silent.getsockname()[1]}")
        with pytest.raises(ApiException, match="timed out"):
            pods._connect(configuration, "connect_get_namespaced_pod_attach", "pod", "agents")


def test_no_client_is_imported_before_an_engine_is_chosen() -> None:
    script = "import sys, starpod.env_server.hosting.harbor; print({'docker', 'kubernetes'} & sys.modules.keys())"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout == "set()\n"


@pytest.mark.skipif(not Path("/usr/bin/python3").exists(), reason="the pods here have the python3 of /usr")
def test_programs_in_a_pod_reach_the_operators_address(cluster: Cluster, tmp_path: Path) -> None:
    """Over connections that begin together, and that send and receive at a time."""
    with socket.create_server(("127.0.0.2", 0)) as listener:
        port = listener.getsockname()[1]
        environment = start(tmp_path / "reaching", f"user=root&reach=127.0.0.2:{port}")

        def echo(connection: socket.socket) -> None:
            with connection:
                left = 1_000_000
                while left and (data := connection.recv(65_536)):
                    left -= len(data)
                    connection.sendall(data)

        def accept() -> None:
            for _ in range(8):
                threading.Thread(target=echo, args=(listener.accept()[0],), daemon=True).start()

        threading.Thread(target=accept, daemon=True).start()
        script = f"""
import os, socket, threading
def talk():
    connection, data = socket.create_connection(('127.0.0.1', {port})), os.urandom(1_000_000)
    threading.Thread(target=connection.sendall, args=(data,)).start()
    os.write(1, b'True\\n' * (connection.makefile('rb').read() == data))
for _ in range(8):
    threading.Thread(target=talk).start()
"""
        environment.step(f'python3 -c "{script}"')
        assert environment.told == "True\n" * 8 + "[exit status 0]"
        environment.close()
