"""examples/typescript: built from its lock file, checked from outside, trained on by the trainer as it is."""

from __future__ import annotations

import json
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from starpod.v1 import environment_pb2 as pb
from starpod.v1 import environment_pb2_grpc
from tests.skipped import not_by_time
from tests.support import ROOT, ServerProcess

EXAMPLE = ROOT / "examples" / "typescript"
STARPOD = (sys.executable, "-m", "starpod.cli.main")
SNAPSHOTS = {*(f"N-{number:02}" for number in range(1, 11)), "N-12"}
UNREACHABLE = ("ENOTFOUND", "EAI_AGAIN", "ECONNREFUSED", "ECONNRESET", "ETIMEDOUT", "ENETUNREACH", "ERR_SOCKET_TIMEOUT")
"""npm's codes where no registry answers."""
NEVER_SHOWN = {"C-70", "C-95", "C-97", "C-98", "F-10", "S-11", "S-12", "S-13", "S-14", "S-15", "S-16"}
"""It draws no pictures, wants no token, tells no timing, declares fork, takes no columns; pings
take long."""


def test_its_source_is_short() -> None:
    """Blank lines and comments aside."""
    lines = [line.strip() for path in (EXAMPLE / "src").glob("*.ts") for line in path.read_text().splitlines()]
    assert 0 < len([line for line in lines if line and not line.startswith(("//", "/*", "*"))]) < 400


def test_its_lock_file_names_no_registry() -> None:
    """So that `npm ci` asks the registry that is configured."""
    packages = json.loads((EXAMPLE / "package-lock.json").read_text())["packages"]
    assert not [name for name, package in packages.items() if "resolved" in package]
    assert all("integrity" in package for name, package in packages.items() if name)


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The program, built in a copy, so that the working tree stays as it is."""
    for tool in ("node", "npm"):
        if not shutil.which(tool):
            pytest.skip(f"there is no {tool} here")
    version = subprocess.run(["node", "--version"], capture_output=True, text=True, check=True).stdout
    if tuple(map(int, version.lstrip("v").split(".")[:2])) < (20, 10):
        pytest.skip(f"node is {version.strip()}, and the example needs 20.10 or newer")
    top = tmp_path_factory.mktemp("typescript")
    folder = top / "examples" / "typescript"
    shutil.copytree(EXAMPLE, folder, ignore=shutil.ignore_patterns("node_modules", "dist", "generated"))
    shutil.copytree(ROOT / "proto" / "starpod", top / "proto" / "starpod")
    for words in (["ci"], ["run", "build"]):
        done = subprocess.run(["npm", *words], cwd=folder, capture_output=True, text=True, timeout=200)
        said = done.stdout + done.stderr
        if done.returncode != 0 and any(code in said for code in UNREACHABLE):
            pytest.skip(f"npm reaches no registry: {said.strip().splitlines()[0]}")
        assert done.returncode == 0, said
    return folder / "dist" / "main.js"


@pytest.fixture
def serve(built: Path) -> Iterator[Callable[..., ServerProcess]]:
    servers: list[ServerProcess] = []

    def start(*arguments: str) -> ServerProcess:
        servers.append(ServerProcess(["node", str(built), *arguments]))
        return servers[-1]

    yield start
    for server in servers:
        server.close()


@pytest.mark.languages
@pytest.mark.timeout(700)  # the first build
def test_it_keeps_the_contract(serve: Callable[..., ServerProcess]) -> None:
    """Two processes, so few sessions that the check can fill one, and every requirement but those it cannot show."""
    server, other = serve("--max-sessions", "250"), serve()
    command = [*STARPOD, "check", server.address, "--also", other.address, "--timeout", "90", "--json", "-"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=250)
    assert done.stdout, done.stderr
    (environment,) = json.loads(done.stdout)["environments"]
    results = {result["id"]: result for result in environment["results"]}
    bad = [f"{r['id']}: {r['message']}" for r in results.values() if r["status"] not in ("passed", "skipped")]
    assert not bad, "\n".join(bad)
    skipped = not_by_time((number, r["message"]) for number, r in results.items() if r["status"] == "skipped")
    assert set(skipped) - NEVER_SHOWN == SNAPSHOTS, "snapshots alone are left out"
    assert {"C-92", "C-94", "S-07", "F-08"} <= {n for n, result in results.items() if result["status"] == "passed"}
    assert done.returncode == 0
    assert server.log == "", "something was thrown that is no refusal"


@pytest.mark.languages
@pytest.mark.timeout(700)
def test_sigterm_drains(serve: Callable[..., ServerProcess]) -> None:
    server = serve()
    with grpc.insecure_channel(server.address) as channel:
        stub = environment_pb2_grpc.EnvironmentServiceStub(channel)
        health = health_pb2_grpc.HealthStub(channel)
        session = stub.Open(pb.OpenRequest(environment_id="hangman-v1", key="first")).sessions[0]
        server.process.send_signal(signal.SIGTERM)
        serving = health_pb2.HealthCheckResponse.SERVING
        until(lambda: health.Check(health_pb2.HealthCheckRequest()).status != serving)
        with pytest.raises(grpc.RpcError) as refused:
            stub.Open(pb.OpenRequest(environment_id="hangman-v1"))
        assert refused.value.code() == grpc.StatusCode.UNAVAILABLE
        again = stub.Open(pb.OpenRequest(environment_id="hangman-v1", key="first"))
        assert again.sessions[0].session_id == session.session_id, "a key that was used opens nothing"
        step = pb.StepRequest(session_id=session.session_id, epoch=1, actions=[pb.Action(text="e")])
        assert stub.Step(step).next_step_index == 1
        assert server.process.poll() is None
        stub.Close(pb.CloseRequest(session_ids=[session.session_id]))
    assert server.process.wait(timeout=60) == 0


@pytest.mark.languages
@pytest.mark.timeout(700)
def test_it_is_trained_on_and_may_be_killed(serve: Callable[..., ServerProcess], tmp_path: Path) -> None:
    """The trainer plays every episode to its end, although the server is killed with live sessions on the way."""
    server = serve()
    settings = (
        f"environment.addresses=[{server.address}]",
        "collect.groups=4",
        "collect.group_size=4",
        "warm_start.steps=5",
        "warm_start.episodes=16",
        "evaluation.episodes=4",
        "evaluation.reference=[expert]",
        "monitor.sinks.tensorboard=false",
        "monitor.screen=plain",
        "stop.iterations=3",
        "stop.minutes=null",
    )
    for attempt in range(5):
        folder = tmp_path / str(attempt)
        command = [*STARPOD, "train", str(EXAMPLE / "hangman.yaml"), *settings, "--run-dir", str(folder)]
        with (tmp_path / "log").open("w+") as log:
            training = subprocess.Popen(command, cwd=ROOT, stdout=log, stderr=subprocess.STDOUT)
            try:
                killed = kill_while_it_plays(server, training, folder / "metrics.jsonl")
                status = training.wait(timeout=250)
            finally:
                training.kill()
                training.wait()
            log.seek(0)
            assert status == 0, log.read()
        metrics = [json.loads(line)["metrics"] for line in (folder / "metrics.jsonl").read_text().splitlines()]
        if killed and metrics[-1]["collect/recoveries"] > 0:
            break  # else it was over first, or the episodes were, as this process was held up
    assert killed, "it always ended before the server could be killed"
    assert [(values["collect/episodes"], values["collect/failed"]) for values in metrics] == [(16, 0)] * 3
    assert metrics[-1]["collect/recoveries"] > 0, "no session was opened again"
    assert sum("update/grad_norm" in values for values in metrics) > 0
    evaluation = json.loads((folder / "evaluations.jsonl").read_text().splitlines()[0])
    assert evaluation["reference"]["expert"]["success"] == 1
    episodes = [
        json.loads(line) for path in (folder / "episodes").glob("*.jsonl") for line in path.read_text().splitlines()
    ]
    assert episodes
    for episode in episodes:
        assert episode["environment"] == "hangman-v1"
        assert all(re.search(r"[a-z_]( [a-z_])+ wrong .+ lives \d+", turn["observation"]) for turn in episode["turns"])


def kill_while_it_plays(server: ServerProcess, training: subprocess.Popen[bytes], metrics: Path) -> bool:
    """Kills the server with live sessions after the first iteration, and starts it again. False if training ended."""
    with grpc.insecure_channel(server.address) as channel:
        stub = environment_pb2_grpc.EnvironmentServiceStub(channel)
        while training.poll() is None:
            time.sleep(0.02)
            if not metrics.exists() or "\n" not in metrics.read_text():
                continue
            # Frozen, it closes no session between the look and the kill.
            training.send_signal(signal.SIGSTOP)
            try:
                if stub.Describe(pb.DescribeRequest(), wait_for_ready=True, timeout=60).live_sessions > 8:
                    server.restart()
                    return True
            finally:
                training.send_signal(signal.SIGCONT)
    return False


def until(condition: Callable[[], bool], seconds: float = 90) -> None:
    limit = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < limit, "waited in vain"
        time.sleep(0.02)
