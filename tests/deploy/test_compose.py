"""`docker compose up` for real: the images, a whole run, four replicas of which one is killed, and nothing left."""

import json
import os
import shlex
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from starpod.client import SyncFleet, Want
from tests.deploy.engine import Compose, docker, inspect, measured, missing
from tests.deploy.files import project
from tests.env_server.machines.tasks import write_tasks
from tests.training import COMMAND, SMALL, learnt, lines, overlaid

pytestmark = [pytest.mark.containers, pytest.mark.slow, pytest.mark.timeout(1800)]

# Groups enough for four replicas, and collections long enough to be disturbed.
JOB = overlaid(*SMALL, "collect.groups=16", "collect.group_size=8", "stop.iterations=6")
# Enough to learn the format, without which all replies earn the same and no update follows.
MODEL_JOB = (
    "bandit_llm",
    "collect.groups=2",
    "algorithm.filter.value=1.0",
    "warm_start.steps=10",
    "warm_start.lr=5.0e-5",
    "warm_start.episodes=16",
    "warm_start.batch_size=4",
    "evaluation.episodes=2",
    "monitor.screen=plain",
    "stop.iterations=2",
    "stop.minutes=null",
)
PROFILES = ("--profile", "browser", "--profile", "vllm", "--profile", "machines")
IMAGES = ("starpod-environment", "starpod-trainer")
USER = os.getuid() or 1000
PUBLIC_BASE_MB = 130
"""Of python:3.11-slim-bookworm. Another base may be larger: what lies on it is measured."""


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Compose]:
    """A project whose images are built, and whose run folder is not there yet."""
    if reason := missing():
        pytest.skip(reason)
    runs = tmp_path_factory.mktemp("compose") / "runs"
    compose = Compose(
        f"starpod-test-{os.getpid()}",
        STARPOD_RUNS=str(runs),
        STARPOD_JOB=shlex.join(JOB),
        STARPOD_UID=str(USER),
        STARPOD_GID=str(os.getgid() or 1000),
    )
    compose("build", "symbolic", "trainer", timeout=1500)
    try:
        yield compose
    finally:
        compose(*PROFILES, "down", "--volumes", "--timeout", "5")


@pytest.fixture
def compose(built: Compose) -> Iterator[Compose]:
    """The project with nothing running, before and after."""
    yield built
    built(*PROFILES, "down", "--volumes", "--timeout", "5")
    assert built.containers() == []


@pytest.fixture(scope="module")
def undisturbed(built: Compose, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of an equal run without containers."""
    folder = tmp_path_factory.mktemp("without") / "run"
    subprocess.run([*COMMAND, "train", *JOB, "--run-dir", str(folder)], check=True, capture_output=True, timeout=300)
    return folder


def assert_same(run: Path, undisturbed: Path) -> None:
    """Line for line, but for clocks."""
    ours, theirs = (json.loads((folder / "run.json").read_text())["packages"] for folder in (run, undisturbed))
    if ours["torch"] != theirs["torch"]:
        pytest.skip(f"torch {ours['torch']} in the container, {theirs['torch']} outside: they round differently")
    assert len(lines(run / "metrics.jsonl")) == 6
    assert learnt(run) == learnt(undisturbed)


def test_the_override_replaces_trainers_and_vllm(built: Compose) -> None:
    files = ("-f", "docker-compose.yml", "-f", "docker-compose.gpu.yml")
    plain, both = (yaml.safe_load(built(*words, "--profile", "vllm", "config"))["services"] for words in ((), files))
    changed = {name for name in plain if both[name]["image"] != plain[name]["image"]}
    assert changed == {"trainer", "trainer-vllm", "vllm"}
    for name in changed:
        assert both[name]["build"]["target"] == "trainer-gpu"
        assert both[name]["command"] == plain[name]["command"]
        assert both[name]["read_only"] is True


@pytest.mark.parametrize("image", IMAGES)
def test_an_image_is_what_it_says(built: Compose, image: str) -> None:
    facts = inspect(image)
    assert facts["Config"]["User"] == "1000:1000"
    assert facts["Config"]["Labels"]["org.opencontainers.image.version"] == project()["version"]
    assert docker("run", "--rm", image, "--version").endswith(project()["version"])


def test_the_environment_image_is_small(built: Compose) -> None:
    base = os.environ.get("STARPOD_BASE_IMAGE", "python:3.11-slim-bookworm")
    ours, below = (
        [int(size) for size in docker("history", "--human=false", "--format", "{{.Size}}", image).splitlines()]
        for image in ("starpod-environment", base)
    )
    assert sum(ours[: len(ours) - len(below)]) / 1e6 + PUBLIC_BASE_MB < 350


def test_images_of_environments_have_no_torch_and_the_trainers_no_browser(built: Compose) -> None:
    script = "from importlib.metadata import distributions; print(*(each.name.lower() for each in distributions()))"
    environment, trainer = (
        set(docker("run", "--rm", "--entrypoint", "/opt/starpod/bin/python", image, "-c", script).split())
        for image in IMAGES
    )
    assert "starpod" in environment & trainer
    assert "torch" in trainer - environment
    assert "selenium" not in environment | trainer


def test_up_trains_as_without_containers(compose: Compose, undisturbed: Path) -> None:
    compose("up", "--detach", "symbolic", "trainer", STARPOD_RUN="one")
    compose.wait("trainer")
    run = Path(compose.variables["STARPOD_RUNS"]) / "one"
    assert (run / "report.html").stat().st_uid == USER
    assert run.parent.stat().st_uid == USER
    assert_same(run, undisturbed)


def test_sessions_spread_over_four_and_a_killed_one_changes_nothing(compose: Compose, undisturbed: Path) -> None:
    compose("up", "--detach", "--scale", "symbolic=4", "symbolic", "trainer", STARPOD_RUN="four")
    run = Path(compose.variables["STARPOD_RUNS"]) / "four"
    replicas = compose.containers("symbolic")
    victim, opened = replicas[0], list[float]()
    process, killed = inspect(victim)["State"]["Pid"], False

    def kill_one() -> None:
        """Kill a server during its episodes, after two iterations."""
        nonlocal killed
        if killed:
            return
        if not opened and (run / "metrics.jsonl").exists() and len(lines(run / "metrics.jsonl")) >= 2:
            opened.extend(measured(replica, "starpod_sessions_opened_total") for replica in replicas)
        if opened and measured(victim, "starpod_live_sessions"):
            os.kill(process, signal.SIGKILL)  # `docker kill` would come when its episodes are over
            killed = True

    compose.wait("trainer", watch=kill_one)
    assert len(opened) == 4
    assert min(opened) > 0.5 * max(opened), "sessions do not spread"
    assert inspect(victim)["State"]["Pid"] != process  # gone, or started again as its policy says
    assert lines(run / "metrics.jsonl")[-1]["metrics"]["collect/recoveries"] > 0
    assert_same(run, undisturbed)


def test_a_server_cannot_change_its_image(compose: Compose) -> None:
    compose("up", "--detach", "symbolic")
    (server,) = compose.containers("symbolic")
    touch = ["docker", "exec", "--user", "0", server, "touch", "/opt/starpod/changed"]
    done = subprocess.run(touch, capture_output=True, text=True, timeout=30)
    assert "Read-only file system" in done.stderr
    assert docker("exec", server, "id", "-u") == "1000"
    address = compose("port", "symbolic", "50051")
    hosted = subprocess.run([*COMMAND, "list", address, "--json"], capture_output=True, text=True, timeout=30)
    assert "frozen_lake-v1" in hosted.stdout, hosted.stderr


@pytest.mark.parametrize("service", ["webshop", pytest.param("webshop-browser", marks=pytest.mark.browser)])
def test_the_shop_is_open(compose: Compose, service: str) -> None:
    """The first start fills an empty volume, and the second one uses the volume's content."""
    environment = f"{service}-v1"
    compose("--profile", "browser", "build", service, timeout=1500)
    for _ in range(2):
        compose("--profile", "browser", "up", "--detach", "--force-recreate", service)
        compose.wait_until_healthy(service)
        with SyncFleet(compose("--profile", "browser", "port", service, "50051")) as fleet:
            (session,) = fleet.open(environment, seed=3, want=Want(expert_action=True))
            if service == "webshop-browser":
                picture = session.render("png")
                assert isinstance(picture, bytes) and picture.startswith(b"\x89PNG")
            while not session.done:
                action = session.observation.expert_action
                assert action is not None
                transition = session.step(action)
            assert transition.reward > 0


def test_tasks_run_in_containers_of_the_engine_whose_socket_is_mounted(compose: Compose, tmp_path: Path) -> None:
    """Here it is the engine that runs the stack, since tests cannot start a second one."""
    write_tasks(tmp_path)
    socket = Path(os.environ.get("DOCKER_HOST", "unix:///var/run/docker.sock").removeprefix("unix://"))
    owner = socket.stat()
    compose("--profile", "machines", "build", "machines", timeout=1500)
    compose(
        *("--profile", "machines", "up", "--detach", "machines"),
        STARPOD_TASKS=str(tmp_path),
        STARPOD_ENGINE_SOCKET=str(socket),
        STARPOD_ENGINE_UID=str(owner.st_uid),
        STARPOD_ENGINE_GID=str(owner.st_gid),
    )
    compose.wait_until_healthy("machines")
    with SyncFleet(compose("--profile", "machines", "port", "machines", "50051")) as fleet:
        for seed in range(3):
            (session,) = fleet.open("harbor-machine_tasks-v1", seed=seed, want=Want(expert_action=True))
            session.step(session.observation.expert_action)
            assert session.step("done").reward == 1.0


def test_a_vllm_server_samples_for_the_trainer(compose: Compose) -> None:
    """The bundled model, for two iterations, by a server that gets each policy's weights and that environments cannot
    reach."""
    compose("--profile", "vllm", "build", "trainer-vllm", timeout=1500)
    job = {"STARPOD_JOB": shlex.join(MODEL_JOB), "STARPOD_RUN": "llm"}
    compose("--profile", "vllm", "up", "--detach", "trainer-vllm", timeout=900, **job)
    (vllm,) = compose.containers("vllm")
    assert inspect(vllm)["NetworkSettings"]["Ports"] in ({}, None)
    (environments,) = compose.containers("symbolic")
    reach = "import socket; socket.create_connection(('vllm', 8000), 5)"
    python = ["docker", "exec", environments, "/opt/starpod/bin/python", "-c", reach]
    assert subprocess.run(python, capture_output=True, timeout=60).returncode != 0, "environments reach its endpoints"
    compose.wait("trainer-vllm", 1200)
    run = Path(compose.variables["STARPOD_RUNS"]) / "llm"
    metrics = [line["metrics"] for line in lines(run / "metrics.jsonl")]
    assert len(metrics) == 2 and all(each["collect/tokens_per_turn"] > 0 for each in metrics)
    logs = subprocess.run(["docker", "logs", vllm], capture_output=True, text=True, timeout=30)
    updated = [each for each in metrics if not each["update/skipped"]]
    # The trainer rounds to bfloat16, and the server does not.
    assert updated and max(each["policy/logprob_gap_mean"] for each in updated) < 0.02, "another policy was sampled"
    assert (logs.stdout + logs.stderr).count('"POST /collective_rpc HTTP/1.1" 200') >= len(updated)
