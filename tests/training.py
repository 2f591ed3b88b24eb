"""`starpod train` on a tiny policy, in this process, and what a run leaves in its folder."""

import contextlib
import hashlib
import io
import json
import os
import shutil
import signal
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from starpod.cli.main import main
from starpod.trainer.data.files import read_episodes

TINY = (
    "frozen_lake",
    "collect.groups=4",
    "collect.group_size=4",
    "warm_start.lr=0.005",
    "warm_start.noise=0.5",
    "warm_start.episodes=40",
    "warm_start.batch_size=16",
    "evaluation.every=2",
    "checkpoint.every=1",
    "monitor.sinks.tensorboard=false",
    "monitor.screen=plain",
    "stop.minutes=null",
)
SMALL = (
    *TINY,
    "warm_start.steps=20",
    "evaluation.episodes=8",
    "evaluation.reference=[random]",
    # With a critic, whose state has to go on, too; and a rate that does not know when the run ends.
    "algorithm={preset: starpo-s, filter: {value: 0.5}}",
    "algorithm.mini_batch_size=4",
    "optimizer.schedule=constant",
    "rewards.format_penalty=-0.1",
)
ITERATIONS = int(os.environ.get("STARPOD_FAULT_ITERATIONS", "3"))
DISTURBED = (
    *TINY,
    "warm_start.steps=30",
    "evaluation.episodes=4",
    "evaluation.reference=[]",
    "algorithm.mini_batch_size=4",
    f"stop.iterations={ITERATIONS}",
)
"""Words of the runs that tests/faults disturbs."""
COMMAND = (sys.executable, "-m", "starpod.cli.main")


class Screen(io.StringIO):
    """Standard error that calls `react` when `words` are written."""

    def __init__(self, words: str = "", react: Callable[[], object] = int) -> None:
        super().__init__()
        self.words, self.react = words, react

    def write(self, text: str) -> int:
        if self.words and self.words in text:
            self.react()
        return super().write(text)


def overlaid(*words: str) -> list[str]:
    """The words, later ones in the place of earlier ones with the same key: no command line may have both."""
    return list({word if word.startswith("--") else word.partition("=")[0]: word for word in words}.values())


def command(*words: str, run_dir: Path, resume: bool = False, base: Sequence[str] = SMALL) -> list[str]:
    return ["train", *overlaid(*base, *words), "--run-dir", str(run_dir), *["--resume"] * resume]


def train(
    *words: str,
    run_dir: Path,
    resume: bool = False,
    status: int = 0,
    base: Sequence[str] = SMALL,
    screen: Screen | None = None,
) -> str:
    """Runs the command in this process, which has torch already, and returns what it wrote on standard error."""
    with contextlib.redirect_stderr(screen or Screen()) as errors, pytest.raises(SystemExit) as exit_:
        main(command(*words, run_dir=run_dir, resume=resume, base=base))
    assert (exit_.value.code or 0) == status, errors.getvalue()
    return errors.getvalue()


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def iterations(run_dir: Path) -> int:
    """The number of iterations that a run has written."""
    file = run_dir / "metrics.jsonl"
    return file.read_bytes().count(b"\n") if file.exists() else 0


CLOCKED = ("time", "seconds", "rate/", "environment/latency", "collect/recoveries")
"""Beginnings of metrics that depend on the clock, or count what befell the servers."""


def learnt(run_dir: Path) -> list[dict[str, Any]]:
    """All that must be the same in two runs: metrics and evaluations without the clock."""
    records = [{"step": record["step"], **record["metrics"]} for record in lines(run_dir / "metrics.jsonl")]
    records += lines(run_dir / "evaluations.jsonl") + lines(run_dir / "final.json")
    return [{key: value for key, value in record.items() if not key.startswith(CLOCKED)} for record in records]


def latest(run_dir: Path) -> Path:
    """The last checkpoint."""
    return run_dir / "checkpoints" / (run_dir / "checkpoints" / "latest").read_text().strip()


def saved(run_dir: Path) -> dict[str, Any]:
    """The state in the last checkpoint."""
    return dict(json.loads((latest(run_dir) / "state.json").read_text()))


def weights(run_dir: Path) -> dict[str, str]:
    """Digests of the tensors in the last checkpoint."""
    return {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in latest(run_dir).glob("*.safetensors")}


def trained(run_dir: Path) -> list[list[int]]:
    """The groups of each iteration."""
    files = sorted((run_dir / "episodes").glob("train-*.jsonl.gz"))
    return [sorted({episode.group for episode in read_episodes(file)}) for file in files]


def rewound(run: Path, step: int, folder: Path) -> Path:
    """A copy of the run as of its checkpoint of a step, with all that it wrote afterwards: as if it had been killed."""
    shutil.copytree(run, folder)
    for checkpoint in (folder / "checkpoints").glob("step-*"):
        if int(checkpoint.name[5:13]) > step:
            shutil.rmtree(checkpoint)
    (folder / "checkpoints" / "latest").write_text(f"step-{step:08}\n")
    return folder


def interrupt(number: signal.Signals) -> Callable[[], None]:
    return partial(os.kill, os.getpid(), number)
