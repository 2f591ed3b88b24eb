"""Checks of a server in another language: the contract, a graceful shutdown, and training on it."""

import json
import signal
from pathlib import Path
from typing import Any

import grpc
import pytest
from click.testing import CliRunner
from grpc_health.v1 import health_pb2, health_pb2_grpc

from starpod.check.cli import check
from starpod.v1 import environment_pb2 as pb
from starpod.v1 import environment_pb2_grpc
from tests.skipped import not_by_time
from tests.support import ServerProcess
from tests.tools.ui.conftest import wait_until
from tests.training import lines, train


def code_lines(folder: Path, *endings: str, comments: tuple[str, ...] = ("//",)) -> int:
    """Count the lines of code, without blank lines and lines that are comments."""
    files = [file for file in folder.iterdir() if file.suffix in endings]
    stripped = [line.strip() for file in files for line in file.read_text().splitlines()]
    return len([line for line in stripped if line and not line.startswith(comments)])


def keep_contract(server: ServerProcess, also: ServerProcess, *words: str) -> dict[str, str]:
    """Check the server together with a second process of the same program. Return why requirements were skipped."""
    arguments = [server.address, "--also", also.address, "--timeout", "90", "--json", "-", *words]
    done = CliRunner().invoke(check, arguments)
    (environment,) = json.loads(done.stdout)["environments"]
    results = environment["results"]
    assert [f"{r['id']}: {r['message']}" for r in results if r["status"] not in ("passed", "skipped")] == []
    assert done.exit_code == 0, done.stderr
    return not_by_time((r["id"], r["message"]) for r in results if r["status"] == "skipped")


def drain(server: ServerProcess, environment: str, action: str, number: signal.Signals) -> None:
    """Stop the server while a session lives: the session continues, but a used key opens no new one."""
    with grpc.insecure_channel(server.address) as channel:
        service = environment_pb2_grpc.EnvironmentServiceStub(channel)
        health = health_pb2_grpc.HealthStub(channel)
        opening = pb.OpenRequest(environment_id=environment, key="first")
        (session,) = service.Open(opening).sessions
        server.process.send_signal(number)
        watched = health_pb2.HealthCheckRequest(service=environment)
        wait_until(lambda: health.Check(watched).status != health_pb2.HealthCheckResponse.SERVING)
        with pytest.raises(grpc.RpcError) as refusal:
            service.Open(pb.OpenRequest(environment_id=environment))
        assert refusal.value.code() is grpc.StatusCode.UNAVAILABLE
        assert service.Open(opening).sessions[0].session_id == session.session_id
        assert service.Describe(pb.DescribeRequest()).draining
        step = pb.StepRequest(session_id=session.session_id, epoch=1, actions=[pb.Action(text=action)])
        assert service.Step(step).next_step_index == 1
        assert server.process.poll() is None
        service.Close(pb.CloseRequest(session_ids=[session.session_id]))
    assert server.process.wait(60) == 0, server.log


def learn_from(server: ServerProcess, config: Path, run_dir: Path) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Trains for two iterations. Returns their metrics, and the evaluations' episodes."""
    words = (
        f"environment.addresses=[{server.address}]",
        "collect.groups=4",
        "collect.group_size=4",
        "warm_start.steps=20",
        "warm_start.episodes=40",
        "warm_start.batch_size=16",
        "evaluation.episodes=8",
        "evaluation.every=0",
        "evaluation.reference=[random,expert]",
        "monitor.sinks.tensorboard=false",
        "monitor.screen=plain",
        "stop.iterations=2",
        "stop.minutes=null",
    )
    train(*words, run_dir=run_dir, base=(str(config),))
    metrics = [line["metrics"] for line in lines(run_dir / "metrics.jsonl")]
    assert [(values["collect/episodes"], values["collect/failed"]) for values in metrics] == [(16, 0)] * 2
    assert any("update/grad_norm" in values for values in metrics), "nothing was learnt from"
    first, last = lines(run_dir / "evaluations.jsonl")
    assert (first["failed"], last["failed"]) == (0, 0)
    assert first["reference"]["expert"]["success"] > first["reference"]["random"]["success"]
    episodes = [episode for file in (run_dir / "episodes").glob("eval-*") for episode in lines(file)]
    assert len(episodes) == first["episodes"] + last["episodes"]
    return metrics, episodes
