"""`starpod train` on a tiny policy, and what it must learn again when it is disturbed."""

import contextlib
import io
import json
import os
from pathlib import Path
from typing import Any

import pytest

from starpod.cli.main import main

ITERATIONS = int(os.environ.get("STARPOD_FAULT_ITERATIONS", "3"))
SMALL = (
    "frozen_lake",
    "collect.groups=4",
    "collect.group_size=4",
    "warm_start.steps=30",
    "warm_start.lr=0.005",
    "warm_start.noise=0.5",
    "warm_start.episodes=40",
    "warm_start.batch_size=16",
    "evaluation.episodes=4",
    "evaluation.every=2",
    "evaluation.reference=[]",
    "checkpoint.every=1",
    "algorithm.mini_batch_size=4",
    "monitor.sinks.tensorboard=false",
    "monitor.screen=plain",
    "stop.minutes=null",
    f"stop.iterations={ITERATIONS}",
)
CLOCKED = ("time", "seconds", "rate/", "environment/latency", "collect/recoveries")
"""Beginnings of metrics that depend on the clock, or count what befell the servers."""


def train(*words: str, run_dir: Path, resume: bool = False, status: int = 0) -> str:
    """Runs the command in this process, which has torch already; returns what it wrote on standard error."""
    command = ["train", *words, "--run-dir", str(run_dir), *(["--resume"] if resume else [])]
    with contextlib.redirect_stderr(io.StringIO()) as errors, pytest.raises(SystemExit) as exit_:
        main(command)
    assert (exit_.value.code or 0) == status, errors.getvalue()
    return errors.getvalue()


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def learnt(run_dir: Path) -> list[dict[str, Any]]:
    """Metrics and evaluations, without the clock."""
    records = [{"step": record["step"], **record["metrics"]} for record in lines(run_dir / "metrics.jsonl")]
    records += lines(run_dir / "evaluations.jsonl")
    return [{key: value for key, value in record.items() if not key.startswith(CLOCKED)} for record in records]
