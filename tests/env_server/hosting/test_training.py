"""The trainer's tiny policy starts on a hosted environment, at an address and on services of its own."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support import ROOT, start_server

pytest.importorskip("torch", reason="the trainer is not installed")

LAKE = "FrozenLake-v1?is_slippery=false#actions=Left,Down,Right,Up"
SMALL = (
    *("environment.id=gymnasium-frozen-lake-v1", "environment.max_turns=4", "environment.max_actions_per_turn=1"),
    *(
        "collect.groups=3",
        "collect.group_size=4",
        "evaluation.episodes=4",
        "evaluation.every=2",
        "evaluation.reference=[random]",
    ),
    *("warm_start.actions=random", "warm_start.episodes=60", "warm_start.steps=40"),
    *("warm_start.lr=0.005", "warm_start.batch_size=16"),
    *("stop.iterations=2", "monitor.sinks.tensorboard=false", "monitor.screen=plain"),
)


def train(run_dir: Path, *words: str) -> list[dict[str, float]]:
    """Runs the tiny policy and returns the metrics of its iterations."""
    command = [sys.executable, "-m", "starpod.cli.main", "train", "tiny", *SMALL, *words, "--run-dir", str(run_dir)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    return [json.loads(line)["metrics"] for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.minutes
@pytest.mark.timeout(400)
def test_the_tiny_policy_trains_on_gymnasiums_lake(tmp_path: Path) -> None:
    """The same episodes, whoever started the server: so the same metrics."""
    with start_server("--gymnasium", LAKE) as server:
        there = train(tmp_path / "there", f"environment.addresses=[{server.address}]")
    here = train(tmp_path / "here", f"environment.serve={json.dumps(['--gymnasium', LAKE])}")
    assert len(there) == len(here) == 2
    assert there[-1]["collect/actions_per_turn"] > 0
    assert there[-1]["collect/valid_rate"] > 0
    names = [name for name in there[0] if name.startswith(("collect/", "reward/", "update/"))]
    for one, other in zip(there, here, strict=True):
        assert {name: one[name] for name in names} == {name: other[name] for name in names}
