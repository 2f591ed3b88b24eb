"""examples/cpp: it is small, it builds, it keeps the contract, the trainer learns from it, and it leaves gracefully."""

from __future__ import annotations

import contextlib
import io
import json
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from starpod.cli.main import main
from starpod.v1 import environment_pb2 as pb
from starpod.v1 import environment_pb2_grpc as rpc
from tests.skipped import not_by_time
from tests.support import ROOT, ServerProcess

EXAMPLE = ROOT / "examples" / "cpp"
BUILD = ROOT / "build" / "examples-cpp"
"""Kept between runs: what has not changed is not compiled again."""
TOOLS = ("cmake", "c++", "make", "protoc", "grpc_cpp_plugin")
ENVIRONMENT = "key_door-v1"
OBSERVATION = re.compile(r"(key|door) (Left|Right|-) \d (Up|Down|-) \d")

NEVER_SHOWN = {
    *("C-20", "C-21", "C-57"),  # it has no options
    "C-98",  # pings take long
    *("C-65", "C-70"),  # nor a score or pictures
    *("C-92", "C-95", "C-97", "S-15"),  # it is too large to fill, asks for no token, tells no timing
    *("S-11", "S-12", "S-13", "S-14", "S-16"),  # and takes no columns
}


def test_it_is_small() -> None:
    """Lines of code: blank lines and comments do not count."""
    sources = [file for file in EXAMPLE.iterdir() if file.suffix in (".h", ".cpp")]
    lines = [line.strip() for file in sources for line in file.read_text().splitlines()]
    assert sum(bool(line) and not line.startswith("//") for line in lines) < 400


@pytest.fixture(scope="module")
def program() -> Path:
    """The server, compiled with what Debian packages."""
    lacking = [tool for tool in TOOLS if shutil.which(tool) is None]
    if lacking or not Path("/usr/include/grpcpp/grpcpp.h").exists():
        pytest.skip(f"no {', '.join(lacking) or 'libgrpc++-dev'} here; examples/cpp/README.md names the packages")
    for command in (["cmake", "-S", str(EXAMPLE), "-B", str(BUILD)], ["cmake", "--build", str(BUILD)]):
        done = subprocess.run(command, capture_output=True, text=True, timeout=600)
        assert done.returncode == 0, done.stdout + done.stderr
        assert "warning:" not in done.stderr
    return BUILD / "key_door_server"


@pytest.fixture(scope="module")
def example(program: Path) -> Iterator[ServerProcess]:
    server = ServerProcess([str(program)])
    yield server
    server.close()


@pytest.mark.languages
@pytest.mark.timeout(700)  # the first build
def test_it_keeps_the_contract(program: Path, example: ServerProcess) -> None:
    other = ServerProcess([str(program)])
    with contextlib.closing(other):
        command = [sys.executable, "-m", "starpod.cli.main", "check", example.address, "--also", other.address]
        done = subprocess.run(
            [*command, "--timeout", "90", "--level", "core,stream", "--json", "-"],
            capture_output=True,
            text=True,
            timeout=250,
        )
    (environment,) = json.loads(done.stdout)["environments"]
    results = environment["results"]
    assert [f"{r['id']}: {r['message']}" for r in results if r["status"] in ("failed", "error")] == []
    skipped = not_by_time((r["id"], r["message"]) for r in results if r["status"] == "skipped")
    assert set(skipped) == NEVER_SHOWN
    assert done.returncode == 0, done.stderr


@pytest.mark.languages
@pytest.mark.timeout(700)
def test_the_trainer_learns_from_it(example: ServerProcess, tmp_path: Path) -> None:
    words = [
        str(EXAMPLE / "key_door.yaml"),
        f"environment.addresses=[{example.address}]",
        "collect.groups=4",
        "collect.group_size=4",
        "warm_start.steps=20",
        "warm_start.episodes=40",
        "warm_start.batch_size=16",
        "evaluation.episodes=16",
        "evaluation.every=3",
        "evaluation.reference=[random,expert]",
        "monitor.sinks.tensorboard=false",
        "monitor.screen=plain",
        "stop.iterations=3",
        "stop.minutes=null",
    ]
    with contextlib.redirect_stderr(io.StringIO()) as errors, pytest.raises(SystemExit) as exit_:
        main(["train", *words, "--run-dir", str(tmp_path / "run")])
    assert (exit_.value.code or 0) == 0, errors.getvalue()
    metrics = _lines(tmp_path / "run" / "metrics.jsonl")
    assert [record["metrics"]["collect/episodes"] for record in metrics] == [16, 16, 16]
    assert [record["metrics"]["collect/failed"] for record in metrics] == [0, 0, 0]
    assert any("update/grad_norm" in record["metrics"] for record in metrics), "nothing was learnt from"
    first, last = _lines(tmp_path / "run" / "evaluations.jsonl")
    assert (first["failed"], last["failed"]) == (0, 0)
    assert first["reference"]["expert"]["success"] > first["reference"]["random"]["success"]
    episodes = [each for file in (tmp_path / "run" / "episodes").glob("eval-*") for each in _lines(file)]
    assert len(episodes) == first["episodes"] + last["episodes"]
    for episode in episodes:
        assert (episode["environment"], episode["version"]) == (ENVIRONMENT, "1.0.0")
        assert all(OBSERVATION.fullmatch(turn["observation"]) for turn in episode["turns"])


@pytest.mark.languages
@pytest.mark.timeout(700)
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_it_drains_before_it_ends(program: Path, number: signal.Signals) -> None:
    with contextlib.closing(ServerProcess([str(program)])) as server, grpc.insecure_channel(server.address) as channel:
        service, health = rpc.EnvironmentServiceStub(channel), health_pb2_grpc.HealthStub(channel)
        (session,) = service.Open(pb.OpenRequest(environment_id=ENVIRONMENT)).sessions
        server.process.send_signal(number)
        watched = health_pb2.HealthCheckRequest(service=ENVIRONMENT)
        while health.Check(watched).status == health_pb2.HealthCheckResponse.SERVING:
            time.sleep(0.01)
        with pytest.raises(grpc.RpcError) as refusal:
            service.Open(pb.OpenRequest(environment_id=ENVIRONMENT))
        assert refusal.value.code() is grpc.StatusCode.UNAVAILABLE
        assert service.Describe(pb.DescribeRequest()).draining
        step = pb.StepRequest(session_id=session.session_id, epoch=1, actions=[pb.Action(text="Up")])
        assert service.Step(step).next_step_index == 1
        service.Close(pb.CloseRequest(session_ids=[session.session_id]))
        assert server.process.wait(60) == 0, server.log


@pytest.mark.languages
def test_a_port_that_is_taken_is_told(program: Path, example: ServerProcess) -> None:
    done = subprocess.run([program, "--port", str(example.port)], capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    assert "usage" in subprocess.run([program, "--prot"], capture_output=True, text=True, timeout=60).stderr


def _lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]
